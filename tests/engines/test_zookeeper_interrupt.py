"""Ctrl-C while a session is being opened: its thread and connection end, and the next session can be opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

import fencelock
from fencelock.engines.zookeeper.session import ZooKeeperSession
from fencelock.runtime.blocking import BlockingRuntime
from tests.engines.zookeeper_server import chroot
from tests.servers.zookeeper import ZooKeeper


def ends(before: set[threading.Thread]) -> None:
    """Wait until no new thread is left."""
    until = time.monotonic() + 20
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < until, left
        time.sleep(0.05)


@pytest.mark.parametrize("started", [False, True])
def test_interrupt_while_a_thread_starts(zookeeper1: ZooKeeper, monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    """Neither a thread nor a connection is left, whether the interrupt comes before or after the thread has started."""
    spawn = BlockingRuntime.spawn

    def interrupted(self: BlockingRuntime, work: Coroutine[Any, Any, None], name: str) -> None:
        if started:
            spawn(self, work, name)
        else:
            work.close()
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with fencelock.connect(chroot(zookeeper1)) as locks:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(BlockingRuntime, "spawn", interrupted)
            locks.lock("x").acquire()
        ends(before)
        with locks.lock("x", timeout=20):
            pass


def test_interrupt_while_it_connects(zookeeper1: ZooKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt during the wait for the connection ends the session."""

    async def interrupted(self: ZooKeeperSession, timeout: float) -> bool:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with fencelock.connect(chroot(zookeeper1)) as locks:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(ZooKeeperSession, "wait_connected", interrupted)
            locks.lock("x").acquire()
        ends(before)
        with locks.lock("x", timeout=20):
            pass
