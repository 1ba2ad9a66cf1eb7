"""Forks at awkward moments."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fencelock


def in_child(look: Callable[[], bool]) -> bool:
    """Return what the look returns in a forked child."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if look() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


@contextmanager
def clients_come_and_go() -> Iterator[None]:
    """Open and close clients in other threads as fast as it goes."""
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            fencelock.connect("memory://churn").close()

    threads = [threading.Thread(target=churn) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        done.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()


def test_forked_child_loses_leases_of_clients_made_during_the_fork() -> None:
    """Every lease is lost in the child, even if another thread makes a client during the fork."""
    with fencelock.connect("memory://fork") as locks, locks.lock("x") as lease, clients_come_and_go():
        for _ in range(40):
            assert in_child(lambda: lease.lost.is_set() and lease.reason is fencelock.LossReason.FORKED)
        assert not lease.lost.is_set()


def test_signal_handler_may_fork_during_a_fork() -> None:
    """A signal handler may fork while its thread is about to fork."""
    inner: list[bool] = []

    def fork_again() -> None:
        if not inner:
            inner.append(True)
            signal.raise_signal(signal.SIGUSR1)

    with fencelock.connect("memory://fork-in-fork") as locks, locks.lock("x") as lease:
        before = signal.signal(signal.SIGUSR1, lambda *_: inner.append(in_child(lease.lost.is_set)))
        client = locks._client
        client.before_fork = fork_again  # type: ignore[method-assign]
        try:
            assert in_child(lease.lost.is_set)
        finally:
            signal.signal(signal.SIGUSR1, before)
            del client.before_fork
        assert inner == [True, True]
        assert not lease.lost.is_set()
