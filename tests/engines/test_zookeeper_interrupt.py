"""A Ctrl-C in the middle of making a session: what was begun is ended, and the next one can be made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import fencelock
from fencelock.engines.zookeeper.connection import Connection, Handler
from fencelock.engines.zookeeper.link import Link
from tests.engines.zookeeper_server import chroot
from tests.servers.zookeeper import ZooKeeper


def test_interrupt_before_the_thread_runs(zookeeper1: ZooKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptors of a connection whose thread was never started are closed, not left to garbage collection."""
    left: list[Connection] = []

    def interrupted(_: Handler, loop: Callable[[], None], *__: Any) -> Any:
        left.append(loop.__self__)  # type: ignore[attr-defined]
        assert left[-1]._read_sock is not None
        raise KeyboardInterrupt

    with fencelock.connect(chroot(zookeeper1)) as locks:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Handler, "spawn", interrupted)
            locks.lock("x").acquire()
        assert left
        assert not any(connection._read_sock or connection._write_sock for connection in left)
        with locks.lock("x", timeout=20):
            pass


def test_interrupt_after_the_thread_runs(zookeeper1: ZooKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was just started ends when whoever started it was interrupted."""
    start = Link.start

    def interrupted(self: Link) -> None:
        start(self)
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with fencelock.connect(chroot(zookeeper1)) as locks:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Link, "start", interrupted)
            locks.lock("x").acquire()
        until = time.monotonic() + 20
        while left := set(threading.enumerate()) - before:
            assert time.monotonic() < until, left
            time.sleep(0.05)
        with locks.lock("x", timeout=20):
            pass
