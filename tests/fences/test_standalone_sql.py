"""The standalone SQL fence: connections from drivers, pools and factories, given back after each entry."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from fencelock import InvalidType, StaleToken
from fencelock.aio.fences import sql as aio_sql
from fencelock.aio.fences.http import FencingMiddleware
from fencelock.fences.http import WsgiFencingMiddleware, path_of
from fencelock.fences.sql import SqlFence, StandaloneSqlFence
from tests.fences.connection_kinds import Databases, postgres_url

OLD, NEW = SimpleNamespace(token=33, id="a"), SimpleNamespace(token=34, id="b")


@pytest.fixture
def url(where: Databases) -> str:
    """A PostgreSQL with an empty fence table."""
    with psycopg.connect(postgres_url(where)) as connection:
        SqlFence().create(connection)
        connection.execute("TRUNCATE fencelock_fence")
    return postgres_url(where)


def enter_often(fence: StandaloneSqlFence) -> None:
    """Enter more often than the pool has connections, with refusals in between."""
    for _ in range(4):
        fence.enter(NEW, "printer")
        with pytest.raises(StaleToken):
            fence.enter(OLD, "printer")


@pytest.mark.parametrize("how", ["connection", "getconn", "getconn of one that returns at close"])
def test_psycopg_pool(url: str, how: str) -> None:
    """A pool of psycopg gets its connections back, with each way to take them."""
    close_returns = "close" in how
    with ConnectionPool(url, min_size=1, max_size=2, timeout=30, close_returns=close_returns) as pool:
        enter_often(StandaloneSqlFence(pool.connection if how == "connection" else pool.getconn))
        assert pool.get_stats()["pool_available"] == pool.get_stats()["pool_size"]


@pytest.mark.parametrize("how", ["connection", "getconn"])
def test_psycopg_pool_awaited(url: str, how: str) -> None:
    """An asyncio pool of psycopg gets its connections back, with each way to take them."""

    async def use() -> None:
        async with AsyncConnectionPool(url, min_size=1, max_size=2, timeout=30, open=False) as pool:
            fence = aio_sql.StandaloneSqlFence(pool.connection if how == "connection" else pool.getconn)
            for _ in range(4):
                await fence.enter(NEW, "printer")
                with pytest.raises(StaleToken):
                    await fence.enter(OLD, "printer")

    asyncio.run(use())


@pytest.mark.parametrize("how", ["connect", "begin", "session"])
def test_alchemy(url: str, how: str) -> None:
    """The fence takes connections from an engine and from session factories of SQLAlchemy."""
    import sqlalchemy
    from sqlalchemy.orm import scoped_session, sessionmaker

    engine = sqlalchemy.create_engine(
        url.replace("postgresql:", "postgresql+psycopg:"), pool_size=1, max_overflow=0, pool_timeout=30
    )
    givers: dict[str, Callable[[], Any]] = {"connect": engine.connect, "begin": engine.begin}
    givers["session"] = scoped_session(sessionmaker(engine))
    enter_often(StandaloneSqlFence(givers[how]))
    engine.dispose()


def test_alchemy_awaited(url: str) -> None:
    """The fence takes connections from an asyncio engine of SQLAlchemy."""
    from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

    async def use() -> None:
        engine = create_async_engine(
            url.replace("postgresql:", "postgresql+psycopg:"), pool_size=1, max_overflow=0, pool_timeout=30
        )
        for giver in (engine.connect, engine.begin, async_sessionmaker(engine)):
            fence = aio_sql.StandaloneSqlFence(giver)
            for _ in range(2):
                await fence.enter(NEW, "printer")
                with pytest.raises(StaleToken):
                    await fence.enter(OLD, "printer")
        await engine.dispose()

    asyncio.run(use())


@pytest.mark.parametrize("how", ["connect", "pool"])
def test_asyncpg(url: str, how: str) -> None:
    """The fence closes a connection of asyncpg, and gives one of a pool back."""
    import asyncpg

    async def use() -> None:
        async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool:
            fence = aio_sql.StandaloneSqlFence(pool.acquire if how == "pool" else lambda: asyncpg.connect(url))
            for _ in range(3):
                await fence.enter(NEW, "printer")
                with pytest.raises(StaleToken):
                    await fence.enter(OLD, "printer")
            assert pool.get_idle_size() == 1

    asyncio.run(use())


def test_the_other_half_refuses_the_connection(tmp_path: Any) -> None:
    """A function that opens a connection of the other API is an error that names the module to use."""
    import aiosqlite

    with pytest.raises(InvalidType, match=r"use fencelock\.aio\.fences"):
        StandaloneSqlFence(lambda: aiosqlite.connect(tmp_path / "fences.db")).enter(NEW, "printer")
    with pytest.raises(InvalidType, match=r"use fencelock\.aio\.fences"):
        StandaloneSqlFence(lambda: psycopg.AsyncConnection.connect("")).enter(NEW, "printer")
    blocking = aio_sql.StandaloneSqlFence(lambda: sqlite3.connect(tmp_path / "fences.db"))
    with pytest.raises(InvalidType, match=r"use fencelock\.fences"):
        asyncio.run(blocking.enter(NEW, "printer"))


def test_own_context_manager() -> None:
    """The fence leaves the caller's context manager, and does not close its connection."""
    database, left = sqlite3.connect(":memory:"), []

    @contextmanager
    def lend() -> Any:
        try:
            yield database
        finally:
            left.append(database.in_transaction)

    StandaloneSqlFence(lend).enter(NEW, "printer")
    with pytest.raises(StaleToken):
        StandaloneSqlFence(lend).enter(OLD, "printer")
    assert left[0] is False
    assert len(left) == 2
    database.close()


@pytest.mark.parametrize("make", [SqlFence, lambda: None, str, lambda: sqlite3.connect(":memory:")])
@pytest.mark.parametrize("middleware", [FencingMiddleware, WsgiFencingMiddleware])
def test_invalid_fence_is_refused(middleware: Any, make: Callable[[], Any]) -> None:
    """A middleware refuses anything without `enter`, a standalone fence anything that opens no connection, with advice."""
    given = make()
    with pytest.raises(
        TypeError, match=r"a fence with enter\(lease, resource\).*a function that opens a connection.*not "
    ):
        middleware(lambda: None, given, resource=path_of)
    with pytest.raises(TypeError, match=r"a function that opens a connection.*not "):
        StandaloneSqlFence(given)
    if hasattr(given, "close"):
        given.close()


@pytest.mark.parametrize("middleware", [FencingMiddleware, WsgiFencingMiddleware])
def test_function_in_place_of_a_fence(middleware: Any) -> None:
    """A middleware refuses a function that opens connections, and says which fence takes it."""
    with pytest.raises(InvalidType, match=r"StandaloneSqlFence\(connect\).*not function"):
        middleware(lambda: None, lambda: sqlite3.connect(":memory:"), resource=path_of)


def test_function_that_opens_no_connection() -> None:
    """The first entry raises an error that names an object which is no connection."""
    with pytest.raises(TypeError, match=r"a connection or a cursor is needed.*not int"):
        StandaloneSqlFence(lambda: 5).enter(NEW, "printer")
