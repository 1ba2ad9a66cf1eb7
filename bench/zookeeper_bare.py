"""The bound on ZooKeeper: a lock over a raw socket, without a library, a token, or handling of faults."""

from __future__ import annotations

import socket
import struct
from typing import Any

CREATE, DELETE, GET, CHILDREN = 1, 2, 4, 8
EVENT, NO_NODE, EXISTS = -1, -101, -110
EPHEMERAL_SEQUENTIAL = 3
OPEN_ACL = struct.pack(">ii", 1, 31) + b"\0\0\0\5world\0\0\0\6anyone"


class BareLock:
    """A lock in four requests: create and children together, a watch on the node ahead, delete. It has no threads."""

    def __init__(self, url: str, parent: str, seconds: int) -> None:
        host, _, port = url.partition("://")[2].partition(":")
        self._sock = socket.create_connection((host, int(port)), seconds)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread = b""
        self._parent, self._node = parent, ""
        self._send(struct.pack(">iqiq", 0, 0, seconds * 1000, 0) + text(b"\0" * 16))
        self._message()
        self._send(struct.pack(">ii", 1, CREATE) + text(parent) + text(b"") + OPEN_ACL + struct.pack(">i", 0))
        if self._reply()[0] not in (0, EXISTS):
            raise ConnectionError(f"ZooKeeper did not create {parent}")
        path = text(f"{parent}/lock-") + text(b"")
        self._enter = packet(struct.pack(">ii", 1, CREATE) + path + OPEN_ACL + struct.pack(">i", EPHEMERAL_SEQUENTIAL))
        self._enter += packet(struct.pack(">ii", 1, CHILDREN) + text(parent) + b"\0")

    def __enter__(self) -> None:
        self._sock.sendall(self._enter)
        _, made = self._reply()
        self._node = made[4:].decode().rpartition("/")[2]
        _, found = self._reply()
        ahead = max((child for child in strings(found) if child < self._node), default=None)
        if ahead is not None:
            self._send(struct.pack(">ii", 1, GET) + text(f"{self._parent}/{ahead}") + b"\1")
            error, _ = self._reply()
            while error != NO_NODE and self._message()[0] != EVENT:
                pass

    def __exit__(self, *_: Any) -> None:
        path = text(f"{self._parent}/{self._node}")
        self._send(struct.pack(">ii", 1, DELETE) + path + struct.pack(">i", -1))
        self._reply()

    def _send(self, content: bytes) -> None:
        self._sock.sendall(packet(content))

    def _reply(self) -> tuple[int, bytes]:
        while True:
            number, error, content = self._message()
            if number != EVENT:
                return error, content

    def _message(self) -> tuple[int, int, bytes]:
        while len(self._unread) < 4 or len(self._unread) < 4 + (length := int.from_bytes(self._unread[:4])):
            chunk = self._sock.recv(65536)
            if not chunk:
                raise ConnectionError("ZooKeeper closed the connection")
            self._unread += chunk
        message, self._unread = self._unread[4 : 4 + length], self._unread[4 + length :]
        number, _, error = struct.unpack_from(">iqi", message)
        return number, error, message[16:]


def packet(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def text(content: str | bytes) -> bytes:
    return packet(content.encode() if isinstance(content, str) else content)


def strings(content: bytes) -> list[str]:
    found, offset = [], 4
    for _ in range(int.from_bytes(content[:4])):
        length = int.from_bytes(content[offset : offset + 4])
        found.append(content[offset + 4 : offset + 4 + length].decode())
        offset += 4 + length
    return found
