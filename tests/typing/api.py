"""Checked by mypy, never run: the types that users of the public API see, in both colours."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, assert_type

import aiosqlite
import etcd3gw
import psycopg
import redis
import redis.asyncio
from redis.client import Pipeline
from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

import fencelock
from fencelock import aio
from fencelock.fences.etcd import EtcdFence
from fencelock.fences.redis import RedisFence
from fencelock.fences.sql import SqlFence
from fencelock.lockfree.crdt import GCounter, HybridClock, LWWRegister, ORSet
from fencelock.lockfree.idempotency import Run, collect, idempotent, idempotent_by
from fencelock.lockfree.outbox import Message, Outbox
from fencelock.lockfree.relay import Relay
from fencelock.lockfree.schema import create_tables


def blocking() -> None:
    """The blocking colour."""
    with fencelock.connect(
        "memory://x", namespace="app", ttl=5, owner="me", on_lost=lambda lease, reason: None
    ) as locks:
        assert_type(locks, fencelock.Locks)
        assert_type(locks.traits, fencelock.Traits)
        assert_type(locks.owner, str)
        lock = locks.lock("x", ttl=1.5, timeout=None, renew=False, max_hold=3, reentrant=True, purpose="correctness")
        assert_type(lock, fencelock.Lock)
        assert_type(lock.name, str)
        with lock as lease:
            assert_type(lease, fencelock.Lease)
        assert_type(lock.acquire(), fencelock.Lease)
        assert_type(lock.acquire(timeout=5), fencelock.Lease)
        assert_type(lock.acquire(timeout=None), fencelock.Lease)
        assert_type(lock.try_acquire(), fencelock.Lease | None)
        with lock.acquire() as lease:
            assert_type(lease, fencelock.Lease)
        assert_type(lease.name, str)
        assert_type(lease.token, int)
        assert_type(lease.id, str)
        assert_type(lease.owner, str)
        assert_type(lease.ttl, float)
        assert_type(lease.remaining, float)
        assert_type(lease.reason, fencelock.LossReason | None)
        assert_type(lease.lost, fencelock.Lost)
        assert_type(lease.lost.is_set(), bool)
        assert_type(lease.lost.wait(timeout=1), bool)
        assert_type(lease.release(), bool)
        lease.renew()
        lease.check()
        snapshot = locks.inspect("x")
        assert_type(snapshot, fencelock.Snapshot)
        assert_type(snapshot.token, int | None)
        assert_type(snapshot.holders, tuple[fencelock.Holder, ...])
        assert_type(snapshot.waiters, tuple[fencelock.Waiter, ...])
        assert_type(locks.names(prefix="x"), Iterator[str])
        assert_type(locks.force_release("x", reason="why"), int)

        @locks.locked("report:{day}", ttl=3)
        def report(day: str, copies: int = 1) -> bytes:
            return f"{day}{copies}".encode()

        assert_type(report("monday", copies=2), bytes)
        report(3)  # type: ignore[arg-type]
        locks.lock("x", "y")  # type: ignore[call-arg, arg-type]
        locks.lock("x", ttl="30")  # type: ignore[arg-type]
        locks.lock("x", purpose="safety")  # type: ignore[arg-type]
        locks.locked("x", purpose="safety")  # type: ignore[arg-type]
        locks.force_release("x")  # type: ignore[call-arg]
        fencelock.nosuchname  # type: ignore[attr-defined]  # noqa: B018


async def awaited() -> None:
    """The asyncio colour."""
    async with aio.connect("memory://x", namespace="app", ttl=5, owner="me") as locks:
        assert_type(locks, aio.Locks)
        assert_type(locks.traits, fencelock.Traits)
        lock = locks.lock("x", ttl=1.5, timeout=None, renew=False, max_hold=3, reentrant=True, purpose="correctness")
        assert_type(lock, aio.Lock)
        async with lock as lease:
            assert_type(lease, aio.Lease)
        assert_type(await lock.acquire(), aio.Lease)
        assert_type(await lock.acquire(timeout=5), aio.Lease)
        assert_type(await lock.try_acquire(), aio.Lease | None)
        async with await lock.acquire() as lease:
            assert_type(lease, aio.Lease)
        assert_type(lease.token, int)
        assert_type(lease.remaining, float)
        assert_type(lease.reason, fencelock.LossReason | None)
        assert_type(lease.lost, aio.Lost)
        assert_type(lease.lost.is_set(), bool)
        assert_type(await lease.lost.wait(timeout=1), bool)
        assert_type(await lease.release(), bool)
        await lease.renew()
        assert_type(await locks.inspect("x"), fencelock.Snapshot)
        assert_type(locks.names(), AsyncIterator[str])
        assert_type(await locks.force_release("x", reason="why"), int)

        @locks.locked("report:{day}", ttl=3)
        async def report(day: str) -> bytes:
            return day.encode()

        assert_type(await report("monday"), bytes)
        assert_type(asyncio.create_task(report("monday")), asyncio.Task[bytes])

        def make() -> Callable[[str], Coroutine[Any, Any, bytes]]:
            return locks.locked("report:{day}")(report)

        assert_type(make(), Callable[[str], Coroutine[Any, Any, bytes]])
        locks.lock("x", purpose="safety")  # type: ignore[arg-type]
        with lock:  # type: ignore[attr-defined]
            pass


def told(lease: fencelock.Lease, reason: fencelock.LossReason) -> None:
    """A callback of the blocking colour."""


def told_awaited(lease: aio.Lease, reason: fencelock.LossReason) -> int:
    """A callback of the asyncio colour; what it returns does not matter."""
    return lease.token


def callbacks() -> None:
    """The `on_lost` of each colour gets a lease of that colour."""
    fencelock.connect(on_lost=told)
    aio.connect(on_lost=told_awaited)
    fencelock.connect(on_lost=lambda lease, reason: assert_type(lease, fencelock.Lease))
    aio.connect(on_lost=lambda lease, reason: assert_type(reason, fencelock.LossReason))
    fencelock.connect(on_lost=told_awaited)  # type: ignore[arg-type]
    aio.connect(on_lost=told)  # type: ignore[arg-type]


def errors() -> None:
    """The errors, as they are caught."""
    try:
        blocking()
    except fencelock.LeaseLost as error:
        assert_type(error.name, str | None)
        assert_type(error.reason, fencelock.LossReason | None)
    except fencelock.FencelockError as error:
        assert_type(error.name, str | None)


def without_a_lock(db: sqlite3.Connection, locks: fencelock.Locks) -> None:
    """What needs no lock, on a connection that blocks."""
    create_tables(db)
    with idempotent(db, "key", payload={"amount": 10}, ttl=60, wait=False) as run:
        assert_type(run, Run)
        assert_type(run.repeated, bool)
    assert_type(collect(db), int)
    Outbox("x").append(db, "key", [1, 2])
    assert_type(Outbox("x").pending(db), int)
    Relay(Outbox("x"), lambda: db, lambda message: assert_type(message, Message), locks).stop()

    @idempotent_by("pay:{order}")
    def pay(connection: sqlite3.Connection, order: int) -> str:
        return str(order)

    assert_type(pay(db, 42), str)
    pay(db, "42")  # type: ignore[arg-type]
    assert_type((GCounter().add("a") | GCounter()).value, int)
    assert_type(LWWRegister("x", HybridClock("a").tick()).value, str)
    GCounter() | ORSet()  # type: ignore[operator]


async def without_a_lock_awaited(connection: psycopg.AsyncConnection[tuple[int]]) -> None:
    """The same, awaited."""
    await create_tables(connection)
    async with idempotent(connection, "key") as run:
        assert_type(run, Run)
    assert_type(await collect(connection), int)
    await Outbox("x").append(connection, "key", None)
    assert_type(await Outbox("x").pending(connection), int)
    Outbox("x").append(connection.cursor(), "key", None)  # type: ignore[unused-coroutine]


def fenced(
    db: sqlite3.Connection,
    server: psycopg.Connection[tuple[int]],
    bind: Connection,
    session: Session,
    lease: fencelock.Lease,
) -> None:
    """A fence, on a connection that blocks."""
    assert_type(SqlFence().token(db, "x"), int | None)
    assert_type(SqlFence().token(db.cursor(), "x"), int | None)
    assert_type(SqlFence().token(server, "x"), int | None)
    assert_type(SqlFence().token(server.cursor(), "x"), int | None)
    assert_type(SqlFence().token(bind, "x"), int | None)
    assert_type(SqlFence().token(session, "x"), int | None)
    assert_type(SqlFence().collect(db, 5), int)
    SqlFence().check(db, lease)
    SqlFence().check(db, lease, "x")
    SqlFence().check(db, lease, resource="x")
    SqlFence().check(db, "x", lease)  # type: ignore[call-overload]
    SqlFence().check("app.db", lease, "x")  # type: ignore[call-overload]


def fenced_with_an_engine(engine: Engine, lease: fencelock.Lease) -> None:
    """What has no transaction is no connection."""
    SqlFence().check(engine, lease, "x")  # type: ignore[call-overload]


async def fenced_awaited(
    connection: psycopg.AsyncConnection[tuple[int]],
    bind: AsyncConnection,
    session: AsyncSession,
    lite: aiosqlite.Connection,
    lease: aio.Lease,
) -> None:
    """The same, awaited; a forgotten `await` is seen."""
    assert_type(await SqlFence().token(connection, "x"), int | None)
    assert_type(await SqlFence().token(bind, "x"), int | None)
    assert_type(await SqlFence().token(lite, "x"), int | None)
    assert_type(await SqlFence().token(await lite.cursor(), "x"), int | None)
    await SqlFence().check(connection, lease, "x")
    SqlFence().check(connection, lease, "x")  # type: ignore[unused-coroutine]
    SqlFence().check(connection.cursor(), lease, "x")  # type: ignore[unused-coroutine]
    SqlFence().check(session, lease, "x")  # type: ignore[unused-coroutine]
    SqlFence().rebase(connection, "x", 5, reason="why")  # type: ignore[unused-coroutine]


def fenced_redis(client: redis.Redis, lease: fencelock.Lease) -> None:
    """The fences that are made with a client have its colour."""
    fence = RedisFence(client)
    assert_type(fence, RedisFence[redis.Redis])
    assert_type(fence.enter(lease), None)
    assert_type(fence.enter(lease, "x"), None)
    assert_type(fence.token("x"), int | None)
    assert_type(fence.collect(5), int)
    fence.rebase("x", 5, reason="why")
    with client.pipeline() as pipe:
        assert_type(fence.enter(lease, "x", on=pipe), Pipeline)
    fence.enter(lease, "x", on=client)  # type: ignore[call-overload]


async def fenced_redis_awaited(client: redis.asyncio.Redis, lease: aio.Lease) -> None:
    """A forgotten `await` is seen, but not in a pipeline, which is to be executed."""
    fence = RedisFence(client)
    await fence.enter(lease, "x")
    fence.enter(lease, "x")  # type: ignore[unused-coroutine]
    fence.rebase("x", 5, reason="why")  # type: ignore[unused-coroutine]
    assert_type(await fence.token("x"), int | None)
    assert_type(await fence.collect(5), int)
    async with client.pipeline() as pipe:
        fence.enter(lease, "x", on=pipe)


def fenced_etcd(client: etcd3gw.Etcd3Client, lease: fencelock.Lease) -> None:
    """etcd's, on a client that blocks."""
    fence = EtcdFence(client)
    fence.enter(lease)
    fence.enter(lease, "x")
    fence.rebase("x", 5, reason="why")
    assert_type(fence.transaction({}, lease, "x"), dict[str, Any])
    assert_type(fence.token("x"), int | None)
    assert_type(fence.collect(5), int)


def jobs(locks: fencelock.Locks) -> None:
    """Jobs: the block of `once` may get None, and work is a plain function."""

    def work(slot: fencelock.Slot) -> None:
        assert_type(slot.token, int)
        assert_type(slot.lease, fencelock.Lease)

    async def awaited(slot: aio.Slot) -> None: ...

    with locks.once("bill", "monday") as slot:
        assert_type(slot, fencelock.Slot | None)
    assert_type(locks.once("bill", "monday").run(work), bool)
    schedule = locks.schedule("bill", every=60)
    assert_type(schedule.run_due(work), list[fencelock.Run])
    schedule.run_due(awaited)  # type: ignore[arg-type]
    assert_type(schedule.history()[0].outcome, fencelock.Outcome)
    assert_type(schedule(work)(), list[fencelock.Run])


async def awaited_jobs(locks: aio.Locks) -> None:
    """The same, awaited; work is a coroutine function."""

    async def work(slot: aio.Slot) -> None: ...

    def plain(slot: aio.Slot) -> None: ...

    async with locks.once("bill", "monday") as slot:
        assert_type(slot, aio.Slot | None)
    schedule = locks.schedule("bill", every=60)
    assert_type(await schedule.run_due(work), list[fencelock.Run])
    await schedule.run_due(plain)  # type: ignore[arg-type]
    assert_type(await schedule(work)(), list[fencelock.Run])


class AwaitedEtcd:
    """A client of somebody's own."""

    async def transaction(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send it."""
        return request


async def fenced_etcd_awaited(lease: aio.Lease) -> None:
    """The same, awaited."""
    fence = EtcdFence(AwaitedEtcd())
    await fence.enter(lease, "x")
    fence.enter(lease, "x")  # type: ignore[unused-coroutine]
    fence.transaction({}, lease, "x")  # type: ignore[unused-coroutine]
    assert_type(await fence.transaction({}, lease, "x"), dict[str, Any])
    assert_type(await fence.token("x"), int | None)
    assert_type(await fence.collect(5), int)


async def fenced_by_whatever(client: Any, on_redis: RedisFence, on_etcd: EtcdFence, lease: fencelock.Lease) -> None:
    """Of a client whose type is not known, or not told, nothing is known: it may be of either colour."""
    assert_type(RedisFence(client), RedisFence[Any])
    assert_type(RedisFence(client).enter(lease, "x"), Any)
    assert_type(EtcdFence(client).enter(lease, "x"), Any)
    assert_type(on_redis.token("x"), Any)
    assert_type(on_etcd.token("x"), Any)
    on_redis.enter("x")  # type: ignore[call-overload]
