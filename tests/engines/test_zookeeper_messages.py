"""The messages that we pack and read ourselves: what kazoo makes of them, what a server does, and who is woken by them."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue

import pytest
from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import (
    Create2,
    Delete,
    GetChildren,
    SetData,
    Transaction,
    Watch,
    int_struct,
    stat_struct,
    write_string,
)
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

import fencelock
from fencelock.engines.zookeeper import messages
from fencelock.engines.zookeeper.engine import ZooKeeperEngine
from fencelock.engines.zookeeper.line import Line
from fencelock.engines.zookeeper.link import Link
from fencelock.engines.zookeeper.messages import HEAD
from tests.contract.subject import SOON
from tests.engines.zookeeper_server import bare, chroot
from tests.servers.zookeeper import ZooKeeper

PATH = "/locks/näme/x-1234-0000000012"
START = 5
"""Where the answers below begin: not at the beginning."""


def link_of(locks: fencelock.Locks) -> Link:
    """Return the connection of the one session that a client has."""
    engine = locks._client.engine
    assert isinstance(engine, ZooKeeperEngine)
    (session,) = engine._sessions._open.values()
    return session.handle


@pytest.mark.parametrize("acl", [OPEN_ACL_UNSAFE, CREATOR_ALL_ACL])
def test_requests_are_kazoos(acl: object) -> None:
    """They are the bytes that kazoo would send."""
    made = messages.line_up(PATH, b"20 somebody", messages.packed_acl(acl))
    assert (made.type, made.serialize()) == (Create2.type, Create2(PATH, b"20 somebody", acl, 3).serialize())
    found = messages.children(PATH)
    assert (found.type, found.serialize()) == (GetChildren.type, GetChildren(PATH, None).serialize())
    passed = messages.pass_on(PATH)
    steps = Transaction([SetData(PATH, b"", -1), Delete(PATH, -1)])
    assert (passed.type, passed.serialize()) == (Transaction.type, steps.serialize())


def test_answers_are_read_as_kazoo_reads_them() -> None:
    """What we take out of an answer is what kazoo finds there."""
    before = b"." * START
    stat = stat_struct.pack(2**40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    made = before + write_string(PATH) + stat
    path, found = Create2.deserialize(made, START)
    assert messages.line_up(PATH, b"", b"").deserialize(made, START) == (path.rpartition("/")[2], found.czxid)
    names = ["x-1-0000000001", "ünrelated", "3-2--2147483648"]
    there = before + int_struct.pack(len(names)) + b"".join(map(write_string, names))
    assert messages.children(PATH).deserialize(there, START) == GetChildren.deserialize(there, START) == names
    done = before + messages.SET_STEP + stat + messages.DELETE_STEP + messages.NO_STEP
    assert messages.pass_on(PATH).deserialize(done, START) is None
    failure = messages.STEP.pack(-1, False, NoNodeError.code) + int_struct.pack(NoNodeError.code)
    refused = before + failure * 2 + messages.NO_STEP
    assert isinstance(messages.pass_on(PATH).deserialize(refused, START), NoNodeError)
    event = messages.HEAD.pack(-1, -1, 0) + messages.INT.pack(2) + messages.INT.pack(3) + write_string(PATH)
    watch, _ = Watch.deserialize(event, messages.HEAD.size)
    assert messages.fired(event) == (watch.type, watch.path) == (2, PATH)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
def test_messages_that_come_in_pieces(tls: bool, piece: int) -> None:
    """However the bytes are cut on their way, the messages are what was sent."""
    sent = [b"", b"short", b"." * 5000, b"last"]
    stream = b"".join(messages.INT.pack(len(message)) + message for message in sent)
    ours, server = socket.socketpair()
    with ours, server:
        ours.setblocking(False)
        line, taken = Line(ours, tls), list[bytes]()
        for start in range(0, len(stream), piece):
            server.sendall(stream[start : start + piece])
            line.take_in(lambda _, message: taken.append(message))
        assert taken == sent
        assert not line.unread
        assert not line.dead


def test_watch_that_comes_late(zookeeper1: ZooKeeper) -> None:
    """A node that is gone, or was written to after the change that is named, is told of at once; else when it goes."""
    told: Queue[tuple[str, bool | None]] = Queue()

    def tell(name: str, gone: bool | None) -> None:
        told.put((name, gone))

    with fencelock.connect(url := chroot(zookeeper1)) as locks, bare(zookeeper1) as kazoo:
        assert locks.lock("x", ttl=6).acquire().release()
        link, folder = link_of(locks), f"/{url.rpartition('/')[2]}"
        zxid = {}
        for name in ("gone", "changed", "there"):
            _, stat = kazoo.create(f"{folder}/{name}", b"", include_data=True)
            zxid[name] = stat.czxid
        kazoo.delete(f"{folder}/gone")
        kazoo.set(f"{folder}/changed", b"")
        for name, number in zxid.items():
            link.watch(f"{folder}/{name}", object(), partial(tell, name), zxid=number)
        assert {told.get(timeout=SOON), told.get(timeout=SOON)} == {("gone", True), ("changed", False)}
        kazoo.delete(f"{folder}/there")
        assert told.get(timeout=SOON) == ("there", True)


def test_nobody_is_kept_from_an_answer(zookeeper1: ZooKeeper) -> None:
    """While a waiter sleeps on through answers without content, those of others come at once."""
    with fencelock.connect(chroot(zookeeper1)) as locks, ThreadPoolExecutor(1) as threads:
        lease = locks.lock("x", ttl=60).acquire()
        waiter = threads.submit(lambda: locks.lock("x", ttl=60, timeout=60).acquire().release())
        line = link_of(locks)._driver.turns.line
        assert line is not None
        until = time.monotonic() + SOON
        while line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1:
            assert time.monotonic() < until, "it wakes for everything"
            time.sleep(0.01)
        begun = time.monotonic()
        for _ in range(30):
            assert (
                locks.lock("x", ttl=60).try_acquire() is None
            )  # its claim is deleted, which is answered without content
        assert time.monotonic() - begun < SOON, threading.enumerate()
        assert lease.release()
        assert waiter.result(SOON)


@pytest.mark.parametrize("length", [0, 3, HEAD.size, HEAD.size + 5])
def test_reply_that_breaks_off(zookeeper1: ZooKeeper, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """A reply that cannot be read ends the connection: what was asked is unknown, asked again, and no bare error escapes."""
    whole = Line._whole
    broken: list[bytes] = []

    def breaks_off(self: Line, chunk: bytes) -> list[bytes]:
        found = whole(self, chunk)
        for index, message in enumerate(found):
            if not broken and self.pending and self.pending[0][0].type == messages.CREATE and len(message) > length:
                broken.append(message)
                found[index] = message[:length]
        return found

    with fencelock.connect(chroot(zookeeper1)) as locks:
        assert locks.lock("x", ttl=6).acquire().release()
        monkeypatch.setattr(Line, "_whole", breaks_off)
        first = locks.lock("x", ttl=6).acquire(timeout=SOON)
        assert broken
        assert [holder.token for holder in locks.inspect("x").holders] == [first.token]
        assert first.release() is True
        assert locks.inspect("x").holders == ()


def test_error_that_kazoo_does_not_know(zookeeper1: ZooKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A code of a newer server is a refusal like any other."""
    whole = Line._whole

    def refuses(self: Line, chunk: bytes) -> list[bytes]:
        found = whole(self, chunk)
        for index, message in enumerate(found):
            if self.pending and self.pending[0][0].type == messages.CREATE:
                number, zxid, _ = HEAD.unpack_from(message)
                found[index] = HEAD.pack(number, zxid, -4321)
        return found

    with fencelock.connect(chroot(zookeeper1)) as locks:
        assert locks.lock("x", ttl=6).acquire().release()
        with monkeypatch.context() as patched:
            patched.setattr(Line, "_whole", refuses)
            with pytest.raises(fencelock.EngineUnavailable, match="code -4321"):
                locks.lock("x", ttl=6).acquire(timeout=SOON)
