"""One connection's bytes: what was asked over it and not answered yet, what was read and is not whole yet.

Any thread may send and any may read: whoever asks need not wake another to send, nor be woken by another that has read the
answer. A signal handler may interrupt either in the middle, and ask for something itself: see `tangled`.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from ssl import SSLWantReadError, SSLWantWriteError
from struct import Struct
from threading import RLock
from typing import Any

from kazoo.exceptions import ConnectionLoss

from fencelock.engines.zookeeper.answers import Answer
from fencelock.engines.zookeeper.messages import SET_WATCHES

CHUNK = 65536
LAST_NUMBER = 2**31 - 1
LENGTH = Struct("!i")
HEADER = Struct("!iii")
EMPTY = 20
"""Bytes of an answer without content."""

NOT_NOW = (BlockingIOError, SSLWantReadError, SSLWantWriteError)

Asked = tuple[Any, Answer]


class Line:
    """A socket that does not block. kazoo takes it for one."""

    def __init__(self, sock: socket.socket, tls: bool) -> None:
        self.sock = sock
        self.number = sock.fileno()
        self.poll: select.poll | None = None
        """What whoever reads waits with, while nobody does."""
        self.shared = not tls
        """Whether any thread may be at it: TLS is not made for two."""
        self.mutex = RLock()
        self.pending: deque[tuple[Any, Answer, int]] = deque()
        """What is to be answered next, in order, with its number."""
        self.unread = bytearray()
        self.unsent = b""
        self.dead = False
        """Whether nothing more goes over it. Whoever takes part in it sees to it that kazoo's thread hears of that."""
        self.deserted = False
        """Whether the thread that has the mutex may not get on: it is in a signal handler, which waits."""
        self._number = 0
        self._dozes = False
        self._sending = self._taking = False

    # ------------------------------------------------------------------ what kazoo does with a socket

    def setblocking(self, flag: bool) -> None:
        """Block, or do not."""
        self.sock.setblocking(flag)

    def fileno(self) -> int:
        """Return its descriptor."""
        return self.sock.fileno()

    def close(self) -> None:
        """Close it."""
        self.kill()
        self.sock.close()
        self.fail()

    # ------------------------------------------------------------------ what we do

    def kill(self) -> None:
        """Have nothing more go over it, in either direction, and wake whoever looks at it."""
        self.dead = True
        with suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # past TLS, which is not made for two threads

    def fail(self) -> None:
        """Tell whoever has asked over it, and was not told yet, that nobody knows."""
        with suppress(IndexError):
            while True:
                self.pending.popleft()[1].set_exception(ConnectionLoss())

    def tangled(self) -> bool:
        """Return whether this very thread was interrupted while it was at the line: nobody else can get on with it."""
        return self.mutex._is_owned()  # type: ignore[attr-defined, no-any-return]

    def send(self, *asked: Asked) -> bool:
        """Send, if nothing is in the way of that; return whether it was taken in."""
        with self.mutex:
            if self.dead or self._sending or self.unsent:
                return False
            self._sending = True
            try:
                self.add(asked)
                self.flush()
            except BaseException:
                self.kill()  # nobody knows how much of it was sent
                raise
            finally:
                self._sending = False
                if self.deserted:
                    self.fail()
            return True

    def add(self, asked: tuple[Asked, ...]) -> None:
        """Have `flush` send these, too. The mutex is held."""
        self._doze(self.shared and not self.pending and len(asked) == 1 and asked[0][0].type == SET_WATCHES)
        packed = [self.unsent]
        for request, answer in asked:
            self._number = number = self._number % LAST_NUMBER + 1
            body = request.serialize()
            packed += HEADER.pack(8 + len(body), number, request.type), body
            self.pending.append((request, answer, number))
        self.unsent = b"".join(packed)

    def _doze(self, flag: bool) -> None:
        """Sleep on when nothing comes but the answer to a watch, which says nothing: it is read with what fires it."""
        if flag is not self._dozes:
            with suppress(OSError):  # where there is no such thing, or no connection any more
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, EMPTY + 1 if flag else 1)
            self._dozes = flag

    def flush(self) -> None:
        """Send as much as the system takes. The mutex is held."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent) :]
        except NOT_NOW:
            pass
        except OSError:
            self.kill()

    def take_in(self, deliver: Callable[[Line, bytes], None]) -> None:
        """Read what is there and deliver every message that is whole by now. It does not wait."""
        with self.mutex:
            if self.dead or self._taking:
                return
            self._taking = True
            try:
                if chunk := self._read():
                    for message in self._whole(chunk):
                        deliver(self, message)
            except (OSError, IndexError):
                self.kill()  # or nothing is pending any more, as it was given up meanwhile, in a signal handler
            except BaseException:
                self.kill()  # a message may have been lost on its way
                raise
            finally:
                self._taking = False
                if self.deserted:
                    self.fail()

    def _read(self) -> bytes:
        found = b""
        try:
            while chunk := self.sock.recv(CHUNK):
                if self.shared:
                    return chunk  # a look at the socket shows whether there is more, which is not so of TLS
                found += chunk
        except NOT_NOW:
            return found
        if not found:
            raise ConnectionResetError("the server closed the connection")
        return found

    def _whole(self, chunk: bytes) -> list[bytes]:
        """Take the messages that are whole with this."""
        unread: bytes | bytearray = chunk
        if self.unread:
            self.unread += chunk
            unread = self.unread
        start, length, messages = 0, len(unread), []
        while length - start >= LENGTH.size:
            begin = start + LENGTH.size
            end = begin + LENGTH.unpack_from(unread, start)[0]
            if end < begin:
                raise ConnectionResetError("the server talks nonsense")
            if length < end:
                break
            messages.append(bytes(unread[begin:end]))
            start = end
        if unread is self.unread:
            del self.unread[:start]
        elif start < length:
            self.unread += chunk[start:]
        return messages
