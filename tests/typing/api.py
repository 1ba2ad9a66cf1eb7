"""Checked by mypy, never run: the types that users of the public API see, blocking and asyncio."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, assert_type

import aiosqlite
import etcd3gw
import psycopg
import redis
import redis.asyncio
from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

import fencelock
from fencelock import aio
from fencelock.aio.fences import etcd as aio_etcd
from fencelock.aio.fences import file as aio_file
from fencelock.aio.fences import redis as aio_redis
from fencelock.aio.fences import sql as aio_sql
from fencelock.aio.lockfree import idempotency as aio_idempotency
from fencelock.aio.lockfree import outbox as aio_outbox
from fencelock.aio.lockfree import schema as aio_schema
from fencelock.aio.lockfree.optimistic import RedisKey as AioRedisKey
from fencelock.fences.etcd import EtcdFence
from fencelock.fences.redis import FencedPipeline, RedisFence
from fencelock.fences.sql import SqlFence
from fencelock.lockfree.crdt import GCounter, HybridClock, LWWRegister, ORSet
from fencelock.lockfree.idempotency import IdempotencyKey, Run, idempotent, prune
from fencelock.lockfree.optimistic import RedisKey, SqlRow, Versioned
from fencelock.lockfree.outbox import Message, Outbox
from fencelock.lockfree.relay import Relay
from fencelock.lockfree.schema import create_tables


def blocking() -> None:
    """The blocking API."""
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
    """The asyncio API."""
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


def primitives(locks: fencelock.Locks, stop: threading.Event) -> None:
    """Reader-writer locks, semaphores, multi-locks, elections and watches that block."""
    rw = locks.rwlock("x", ttl=5, timeout=None, renew=True, max_hold=3, stall_after=9, reentrant=True)
    assert_type(rw, fencelock.RWLock)
    assert_type(rw.read(), fencelock.Lock)
    with rw.write() as lease:
        assert_type(lease, fencelock.Lease)
        assert_type(lease.mode, fencelock.Mode)
        assert_type(lease.downgrade(), None)
        assert_type(lease.progress(), None)
    assert_type(locks.semaphore("x", 5, ttl=3, purpose="correctness"), fencelock.Lock)
    locks.semaphore("x")  # type: ignore[call-arg]
    locks.semaphore("x", "5")  # type: ignore[arg-type]
    locks.semaphore("x", 5, reentrant=True)  # type: ignore[call-arg]
    multi = locks.multi("a", "b", read=["c"], write=("d",), ttl=3, timeout=5)
    assert_type(multi, fencelock.MultiLock)
    assert_type(multi.names, tuple[str, ...])
    assert_type(multi.acquire(timeout=5), fencelock.Group)
    assert_type(multi.try_acquire(), fencelock.Group | None)
    with multi as group:
        assert_type(group, fencelock.Group)
        assert_type(group["a"], fencelock.Lease)
        assert_type(group.leases, Mapping[str, fencelock.Lease])
        assert_type(group.remaining, float)
        assert_type(group.reason, fencelock.LossReason | None)
        assert_type(group.lost, fencelock.Lost)
        assert_type(group.release(), bool)
        group.check()
    election = locks.election("x", value="http://web-7", ttl=15)
    assert_type(election, fencelock.Election)
    with election.campaign(timeout=None) as term:
        assert_type(term, fencelock.Lease)
    assert_type(election.leader(), fencelock.Leader | None)
    assert_type(election.candidates(), list[fencelock.Candidate])
    assert_type(election.observe(stop), Iterator[fencelock.Leader | None])
    assert_type(election.resign(), bool)
    assert_type(election.healthy(grace=3), bool)
    election.run(lambda term: assert_type(term, fencelock.Lease), stop=stop)
    election.run(lambda: None)  # type: ignore[arg-type, misc]
    assert_type(locks.watch("x", stop=stop), Iterator[fencelock.Snapshot])
    locks.watch("x", stop=3)  # type: ignore[arg-type]
    locks.assert_held("x", mode="shared")
    locks.assert_held("x", "write")  # type: ignore[arg-type]


async def primitives_awaited(locks: aio.Locks, stop: asyncio.Event) -> None:
    """The same, awaited."""
    rw = locks.rwlock("x", ttl=5, reentrant=True)
    assert_type(rw, aio.RWLock)
    assert_type(rw.read(), aio.Lock)
    async with rw.write() as lease:
        assert_type(lease, aio.Lease)
        await lease.downgrade()
        lease.downgrade()  # type: ignore[unused-coroutine]
        lease.progress()
    assert_type(locks.semaphore("x", 5), aio.Lock)
    multi = locks.multi("a", "b", read=["c"])
    assert_type(multi, aio.MultiLock)
    assert_type(await multi.acquire(timeout=5), aio.Group)
    assert_type(await multi.try_acquire(), aio.Group | None)
    async with multi as group:
        assert_type(group["a"], aio.Lease)
        assert_type(group.lost, aio.Lost)
        assert_type(await group.release(), bool)
    election = locks.election("x", value="http://web-7")
    assert_type(election, aio.Election)
    async with election.campaign() as term:
        assert_type(term, aio.Lease)
    assert_type(await election.leader(), fencelock.Leader | None)
    assert_type(await election.candidates(), list[fencelock.Candidate])
    assert_type(election.observe(), AsyncIterator[fencelock.Leader | None])
    assert_type(await election.resign(), bool)

    async def work(term: aio.Lease) -> int:
        return term.token

    await election.run(work, stop=stop)
    await election.run(lambda term: term.token)  # type: ignore[arg-type, return-value]
    assert_type(locks.watch("x", stop), AsyncIterator[fencelock.Snapshot])
    locks.assert_held("x", "permit")


def told(lease: fencelock.Lease, reason: fencelock.LossReason) -> None:
    """A callback of the blocking API."""


def told_awaited(lease: aio.Lease, reason: fencelock.LossReason) -> int:
    """A callback of the asyncio API; what it returns does not matter."""
    return lease.token


def callbacks() -> None:
    """The `on_lost` of each API gets a lease of that API."""
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
    with IdempotencyKey(db, "key", payload={"amount": 10}, ttl=60, wait=False) as run:
        assert_type(run, Run)
        assert_type(run.replayed, bool)
    assert_type(prune(db), int)
    assert_type(SqlRow(db, "t", {"id": 7}, ["n"]).update(lambda row: row), dict[str, Any] | None)
    Outbox("x").append(db, "key", [1, 2])
    assert_type(Outbox("x").pending(db), int)
    Relay(Outbox("x"), lambda: db, lambda message: assert_type(message, Message), locks).stop()

    @idempotent("pay:{order}")
    def pay(connection: sqlite3.Connection, order: int) -> str:
        return str(order)

    assert_type(pay(db, 42), str)
    pay(db, "42")  # type: ignore[arg-type]
    assert_type((GCounter().add("a") | GCounter()).value, int)
    assert_type(LWWRegister("x", HybridClock("a").tick()).value, str)
    GCounter() | ORSet()  # type: ignore[operator]


async def without_a_lock_awaited(connection: psycopg.AsyncConnection[tuple[int]], client: redis.asyncio.Redis) -> None:
    """The same, awaited."""
    await aio_schema.create_tables(connection)
    async with aio_idempotency.IdempotencyKey(connection, "key") as run:
        assert_type(run, Run)
    assert_type(await aio_idempotency.prune(connection), int)
    outbox = aio_outbox.Outbox("x")
    await outbox.append(connection, "key", None)
    assert_type(await outbox.pending(connection), int)
    outbox.append(connection.cursor(), "key", None)  # type: ignore[unused-coroutine]
    Outbox("x").append(connection, "key", None)  # type: ignore[arg-type]
    assert_type(await AioRedisKey(client, "x").read(), Versioned[bytes | None])

    @aio_idempotency.idempotent("pay:{order}")
    async def pay(connection: psycopg.AsyncConnection[tuple[int]], order: int) -> str:
        return str(order)

    assert_type(await pay(connection, 42), str)


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
    assert_type(SqlFence().prune(db, 5), int)
    SqlFence().check(db, lease)
    SqlFence().check(db, lease, "x")
    SqlFence().check(db, lease, resource="x")
    SqlFence().check(db, "x", lease)  # type: ignore[arg-type]
    SqlFence().check("app.db", lease, "x")  # type: ignore[arg-type]


def fenced_with_an_engine(engine: Engine, lease: fencelock.Lease) -> None:
    """What has no transaction is no connection."""
    SqlFence().check(engine, lease, "x")  # type: ignore[arg-type]


async def fenced_awaited(
    connection: psycopg.AsyncConnection[tuple[int]],
    bind: AsyncConnection,
    session: AsyncSession,
    lite: aiosqlite.Connection,
    lease: aio.Lease,
) -> None:
    """The same, awaited; type checkers report a forgotten `await` and a connection of the other half."""
    fence = aio_sql.SqlFence()
    assert_type(await fence.token(connection, "x"), int | None)
    assert_type(await fence.token(bind, "x"), int | None)
    assert_type(await fence.token(lite, "x"), int | None)
    assert_type(await fence.token(await lite.cursor(), "x"), int | None)
    await fence.check(connection, lease, "x")
    fence.check(connection, lease, "x")  # type: ignore[unused-coroutine]
    fence.check(connection.cursor(), lease, "x")  # type: ignore[unused-coroutine]
    fence.check(session, lease, "x")  # type: ignore[unused-coroutine]
    fence.rebase(connection, "x", 5, reason="why")  # type: ignore[unused-coroutine]
    SqlFence().check(connection, lease, "x")  # type: ignore[arg-type]


def fenced_redis(client: redis.Redis, lease: fencelock.Lease) -> None:
    """The Redis fence, blocking."""
    fence = RedisFence(client)
    assert_type(fence.token("x"), int | None)
    assert_type(fence.prune(5), int)
    fence.enter(lease)
    fence.enter(lease, "x")
    fence.rebase("x", 5, reason="why")
    with client.pipeline() as pipe:
        assert_type(fence.pipeline(lease, pipe), FencedPipeline)
    fence.enter("x")  # type: ignore[arg-type]
    assert_type(RedisKey(client, "x").read(), Versioned[bytes | None])


async def fenced_redis_awaited(client: redis.asyncio.Redis, lease: aio.Lease) -> None:
    """The Redis fence, awaited."""
    fence = aio_redis.RedisFence(client)
    await fence.enter(lease, "x")
    fence.enter(lease, "x")  # type: ignore[unused-coroutine]
    fence.rebase("x", 5, reason="why")  # type: ignore[unused-coroutine]
    assert_type(await fence.token("x"), int | None)
    assert_type(await fence.prune(5), int)
    assert_type(await aio_file.FileFence().token("path"), int | None)


def fenced_etcd(client: etcd3gw.Etcd3Client, lease: fencelock.Lease) -> None:
    """The etcd fence, blocking."""
    fence = EtcdFence(client)
    fence.enter(lease)
    fence.enter(lease, "x")
    fence.rebase("x", 5, reason="why")
    assert_type(fence.transaction(lease, {}, "x"), dict[str, Any])
    assert_type(fence.token("x"), int | None)
    assert_type(fence.prune(5), int)


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


async def fenced_etcd_awaited(client: Any, lease: aio.Lease) -> None:
    """The etcd fence, awaited."""
    fence = aio_etcd.EtcdFence(client)
    await fence.enter(lease, "x")
    fence.enter(lease, "x")  # type: ignore[unused-coroutine]
    fence.transaction(lease, {}, "x")  # type: ignore[unused-coroutine]
    assert_type(await fence.transaction(lease, {}, "x"), dict[str, Any])
    assert_type(await fence.token("x"), int | None)
