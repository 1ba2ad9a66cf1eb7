"""Frames, transactions, and replies that cannot be decoded."""

from __future__ import annotations

import pytest
from kazoo.protocol.serialization import Create, Delete, SetData, reply_header_struct
from kazoo.security import OPEN_ACL_UNSAFE

import fencelock
from fencelock.core.runtime import NO_REPLY
from fencelock.engines.zookeeper.connection import ZooKeeperConnection
from fencelock.engines.zookeeper.protocol import FrameParser, Malformed, Multi, Reply
from fencelock.runtime.blocking import run_sync
from tests.engines.zookeeper_server import chroot, session_of
from tests.servers.zookeeper import ZooKeeper
from tests.support.waiting import SOON, eventually_blocking


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
def test_frames_that_arrive_in_pieces(piece: int) -> None:
    """However the bytes are split on their way, the frames are what was sent."""
    sent = [b"", b"short", b"." * 5000, b"last"]
    stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in sent)
    parser, found = FrameParser(), []
    for start in range(0, len(stream), piece):
        parser.feed(stream[start : start + piece])
        while (frame := parser.gets()) is not NO_REPLY:
            found.append(frame)
    assert found == sent


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff", b"HTTP"])
def test_length_that_is_not_zookeepers(length: bytes) -> None:
    """A stream that is not ZooKeeper's is refused at once, instead of waiting for gigabytes."""
    parser = FrameParser()
    parser.feed(length)
    with pytest.raises(Malformed):
        parser.gets()


def test_transactions(zookeeper1: ZooKeeper) -> None:
    """A transaction replies for each step, or with the step that failed; a SetData in it has the transaction's number."""
    with fencelock.connect(url := chroot(zookeeper1)) as locks:
        assert locks.lock("x", ttl=6).acquire().release()
        session, root = session_of(locks), f"/{url.rpartition('/')[2]}/fencelock"

        def run(*steps: object) -> Reply:
            (reply,) = run_sync(session.request(Multi(steps), timeout=SOON))
            return reply

        create = Create(f"{root}/näme", b"", OPEN_ACL_UNSAFE, 0)
        stat, path, deleted = run(SetData(root, b"", -1), create, Delete(f"{root}/näme", -1)).get()
        assert (path, deleted) == (f"{root}/näme", True)
        assert stat.mzxid == session.zxid
        failed = run(SetData(root, b"", -1), Delete(f"{root}/missing", -1), create)
        assert (failed.failed_step, failed.no_node) == (1, True)
        with pytest.raises(fencelock.EngineUnavailable, match="NoNode"):
            failed.get()


HEADER = reply_header_struct.size


@pytest.mark.parametrize("length", [0, 3, HEADER, HEADER + 5])
def test_reply_that_ends_too_early(zookeeper1: ZooKeeper, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """A reply that cannot be decoded closes the connection: the attempt is repeated, and no other error escapes."""
    received = ZooKeeperConnection._received
    broken: list[bytes] = []

    def cut(self: ZooKeeperConnection, message: bytes) -> None:
        if not broken and self._pending and self._pending[0][1].type == Multi.type and len(message) > length:
            broken.append(message)
            message = message[:length]
        received(self, message)

    with fencelock.connect(chroot(zookeeper1)) as locks:
        assert locks.lock("x", ttl=6).acquire().release()
        monkeypatch.setattr(ZooKeeperConnection, "_received", cut)
        session_of(locks)._connection.close()  # type: ignore[union-attr]  # the next one is cut
        first = locks.lock("x", ttl=6).acquire(timeout=SOON)
        assert broken
        assert [holder.token for holder in locks.inspect("x").holders] == [first.token]
        assert first.release() is True
        assert locks.inspect("x").holders == ()


def test_error_code_that_kazoo_does_not_know(zookeeper1: ZooKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error code of a newer server is a refusal like any other."""
    received = ZooKeeperConnection._received

    def refuse(self: ZooKeeperConnection, message: bytes) -> None:
        if self._pending and self._pending[0][1].type == Multi.type:
            xid, zxid, _ = reply_header_struct.unpack_from(message)
            message = reply_header_struct.pack(xid, zxid, -4321)
        received(self, message)

    with fencelock.connect(chroot(zookeeper1)) as locks:
        assert locks.lock("x", ttl=6).acquire().release()
        with monkeypatch.context() as patched:
            patched.setattr(ZooKeeperConnection, "_received", refuse)
            session_of(locks)._connection.close()  # type: ignore[union-attr]  # the next one has the patched method
            eventually_blocking(lambda: _answers(locks), "the session has its new connection")
            with pytest.raises(fencelock.EngineUnavailable, match="code -4321"):
                locks.lock("x", ttl=6).acquire(timeout=SOON)


def _answers(locks: fencelock.Locks) -> bool:
    try:
        locks.inspect("x")
    except fencelock.EngineUnavailable:
        return False
    return True
