"""Ctrl-C at any step of an acquire and a release, on a real server: an interrupted caller leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import pytest

import fencelock
from fencelock.core.runtime import Command
from fencelock.engines.redis.engine import RedisEngine
from fencelock.engines.redis.pool import MAX_IDLE_CONNECTIONS, RedisPool
from fencelock.errors import OutcomeUnknown
from fencelock.runtime.blocking import run_sync
from fencelock.runtime.socket_connection import SocketConnection
from tests.engines.redis_steps import assert_in_step, engine_of, held
from tests.interrupts import interrupted_at
from tests.servers.redis import Redis
from tests.support.waiting import SOON

Own = Callable[..., Redis]

STEPS = (
    RedisEngine.attempt,
    RedisEngine.release,
    RedisPool.run,
    SocketConnection.request,
    SocketConnection.post,
    SocketConnection._use,
    SocketConnection._exchange,
    SocketConnection._post,
    SocketConnection._send_all,
)


@pytest.mark.filterwarnings("ignore:the lease on .x. .* was dropped:ResourceWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_interrupted_at_any_step(own_redis: Own) -> None:
    """After an interrupt at any step, each request gets its own reply, and others get the lock after the ttl at most."""
    server = own_redis()
    for step in count(1):
        with fencelock.connect(server.url) as locks:
            held(locks.lock("x"))
            if not interrupted_at(step, STEPS, lambda: held(locks.lock("x", ttl=0.3, timeout=SOON))):
                break
            assert_in_step(locks)
            assert locks.lock("x", timeout=SOON).acquire().release()
    assert step > 30


@pytest.mark.parametrize("late", [("ECHO", "late"), ("EVALSHA", "0" * 40, 0)])
@pytest.mark.parametrize("forced", [False, True])
def test_release_behind_a_pending_reply(own_redis: Own, late: Command, forced: bool) -> None:
    """A release does not take the late reply to an earlier, timed-out request for its own."""
    server = own_redis()
    with fencelock.connect(server.url) as locks:
        lease = locks.lock("x").acquire()
        (connection,) = engine_of(locks)._pool._idle
        if forced:
            with fencelock.connect(server.url) as others:
                others.force_release("x", reason="a test")
        server.pause()
        try:
            with pytest.raises(OutcomeUnknown):
                run_sync(connection.raw.request(late, 0.05))
        finally:
            server.resume()
        assert connection.raw.pending
        assert lease.release() is not forced
        assert_in_step(locks)
        assert not connection.raw.pending


def test_idle_connections_after_many_threads(server: Redis) -> None:
    """The pool keeps a bounded number of idle connections, however many threads used it."""
    with fencelock.connect(server.url) as locks:
        lock = locks.lock("many", timeout=4 * SOON)

        def work() -> None:
            for _ in range(10):
                held(lock)

        threads = [threading.Thread(target=work) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(engine_of(locks)._pool._idle) <= MAX_IDLE_CONNECTIONS


@pytest.mark.filterwarnings("ignore:the lease on .x. .* was dropped:ResourceWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_interrupted_before_the_lease_is_there(server: Redis) -> None:
    """Wherever an acquire is interrupted, close() leaves nothing behind."""
    for step in count(1):
        with fencelock.connect(server.url, namespace=f"step-{step}") as locks:
            held(locks.lock("x"))
            over = not interrupted_at(step, STEPS, locks.lock("x").acquire)
        with fencelock.connect(server.url, namespace=f"step-{step}") as locks:
            assert not list(locks.names()), f"interrupted at step {step}, and the lock is still held"
        if over:
            break
    assert step > 20
