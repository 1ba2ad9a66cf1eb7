"""An application's own psycopg, SQLAlchemy or Django objects in a URL's place: connected as they are, and left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast

import psycopg
import psycopg_pool
import pytest
import sqlalchemy
import sqlalchemy.ext.asyncio
import sqlalchemy.orm
from django.db import ConnectionHandler

import fencelock
from fencelock import EngineUnavailable, InvalidURL, aio
from tests import django_app
from tests.engines.conftest import Clients
from tests.engines.postgres_server import ask, empty
from tests.servers.postgres import Postgres
from tests.support.waiting import SOON

PASSWORD = "s3cr3t ';--%40"
WORDS = {"user": "app", "password": PASSWORD}


@pytest.fixture
def pg(own_postgres: Callable[..., Postgres]) -> Postgres:
    """A server on which the application has a password, and may make its schema."""
    server = own_postgres()
    (server.data / "pg_hba.conf").write_text(
        "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
    )
    ask(server, "SELECT pg_reload_conf()")
    ask(server, f"CREATE ROLE app LOGIN PASSWORD {psycopg.sql.quote(PASSWORD)}")
    ask(server, 'CREATE DATABASE "its own; --" OWNER app')
    return server


def where(server: Postgres) -> dict[str, Any]:
    """What a driver is told, with a database whose name is not for the faint of heart."""
    return {"host": server.host, "port": server.port, "dbname": "its own; --", **WORDS}


def ours(server: Postgres) -> int:
    """How many connections of ours there are, all to the right database and with the right user."""
    rows = ask(
        server,
        "SELECT usename, datname, count(*) FROM pg_stat_activity WHERE application_name LIKE 'fencelock%%' GROUP BY 1, 2",
    )
    assert [row[:2] for row in rows] == [("app", "its own; --")]
    return int(rows[0][2])


def url_of(server: Postgres, driver: str) -> sqlalchemy.URL:
    """The same for SQLAlchemy."""
    return sqlalchemy.URL.create(
        f"postgresql+{driver}", "app", PASSWORD, server.host, server.port, database="its own; --"
    )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is to be closed at the end."""
    with ExitStack() as stack:
        yield stack


def django_connection(server: Postgres) -> Any:
    """A connection of Django's, as `django.db.connections` makes it."""
    django_app.ready()
    given = where(server)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": given["dbname"],
        "USER": "app",
        "PASSWORD": PASSWORD,
        "HOST": server.host,
        "PORT": str(server.port),
        "OPTIONS": {"connect_timeout": 3},
    }
    return ConnectionHandler({"default": database})["default"]


def pool_with_functions(server: Postgres, stack: ExitStack) -> Any:
    """A pool that asks for its password for each connection."""
    return stack.enter_context(
        psycopg_pool.ConnectionPool(
            conninfo=lambda: f"host={server.host} port={server.port}",
            kwargs=lambda: {"autocommit": True, "dbname": "its own; --", **WORDS},
            min_size=1,
            open=True,
        )
    )


def engine(server: Postgres, stack: ExitStack, driver: str, **options: Any) -> Any:
    """An engine of SQLAlchemy, disposed of in the end."""
    made = sqlalchemy.create_engine(url_of(server, driver), **options)
    stack.callback(made.dispose)
    return made


MADE: dict[str, Callable[[Postgres, ExitStack], Any]] = {
    "connection": lambda server, stack: stack.enter_context(psycopg.connect(**where(server))),
    "pool": lambda server, stack: stack.enter_context(
        psycopg_pool.ConnectionPool("", kwargs=where(server), min_size=1, open=True)
    ),
    "pool with functions": pool_with_functions,
    "engine": lambda server, stack: engine(server, stack, "psycopg"),
    "engine with psycopg2": lambda server, stack: engine(server, stack, "psycopg2"),
    # What the URL does not say: SQLAlchemy connects with something else.
    "engine with a creator": lambda server, stack: _creator(server, stack),
    "django": lambda server, _: django_connection(server),
}


def _creator(server: Postgres, stack: ExitStack) -> Any:
    made = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(**where(server)), pool_size=1, max_overflow=0
    )
    stack.callback(made.dispose)
    return made


@pytest.mark.parametrize("kind", MADE)
def test_blocking(pg: Postgres, stack: ExitStack, kind: str) -> None:
    """We connect as it does, to the same database, over connections of our own; its password is nowhere to be seen."""
    theirs = MADE[kind](pg, stack)
    with fencelock.connect(theirs) as locks:
        with locks.lock("x") as lease:
            assert ours(pg) >= 1
            assert [holder.token for holder in locks.inspect("x").holders] == [lease.token]
        assert PASSWORD not in f"{locks!r} {locks.traits!r}"
    if kind == "connection":
        assert theirs.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


@pytest.mark.parametrize("kind", ["connection", "pool", "pool with functions", "engine", "engine with psycopg2"])
async def test_asyncio_takes_blocking_ones(pg: Postgres, stack: ExitStack, kind: str) -> None:
    """An application's asyncio objects work in the blocking API and the other way round: only their parameters are read."""
    async with aio.connect(MADE[kind](pg, stack)) as locks, locks.lock("x"):
        assert ours(pg) >= 1


async def test_asyncio(pg: Postgres) -> None:
    """The asyncio twins of connection, pool and engine say how to connect, too."""

    async def words() -> str:
        return f"host={pg.host} port={pg.port}"

    connection = await psycopg.AsyncConnection.connect(**where(pg))
    pool = psycopg_pool.AsyncConnectionPool(words, kwargs=where(pg), min_size=1, open=False)
    engine = sqlalchemy.ext.asyncio.create_async_engine(url_of(pg, "psycopg"), pool_size=1, max_overflow=0)
    await pool.open()
    try:
        for theirs in (connection, pool, engine):
            async with aio.connect(theirs) as locks, locks.lock("x") as lease:
                assert ours(pg) >= 1
                lease.check()
        with pytest.raises(TypeError, match=r"aio\.connect"):
            fencelock.connect(engine)
        with fencelock.connect(pool) as blocking, pytest.raises(EngineUnavailable, match=r"aio\.connect"):
            blocking.lock("x").acquire()
    finally:
        await connection.close()
        await pool.close()
        await engine.dispose()


def test_lock_is_independent_of_the_applications_transaction(pg: Postgres, stack: ExitStack) -> None:
    """An application's rollback does not affect a lock, and its transaction does not delay one."""
    theirs = engine(pg, stack, "psycopg", pool_size=2, max_overflow=0)
    with theirs.connect() as connection, fencelock.connect(theirs) as locks:
        connection.execute(sqlalchemy.text("CREATE TABLE t (n integer)"))
        lease = locks.lock("x").acquire()
        connection.rollback()
        lease.renew()
        with fencelock.connect(theirs) as others:
            assert others.lock("x").try_acquire() is None
        assert lease.release()


async def test_engine_whose_connections_are_all_in_use(pg: Postgres, stack: ExitStack, clients: Clients) -> None:
    """Who holds all connections of a pool gets locks all the same; the engine opens one connection to be asked, once."""
    theirs: Any
    if clients.runtime_name == "aio":
        theirs = sqlalchemy.ext.asyncio.create_async_engine(
            url_of(pg, "psycopg"), pool_size=1, max_overflow=0, pool_timeout=0.1
        )
        held = await theirs.connect()
    else:
        theirs = engine(pg, stack, "psycopg", pool_size=1, max_overflow=0, pool_timeout=0.1)
        held = theirs.connect()
    made: list[object] = []
    sqlalchemy.event.listen(getattr(theirs, "sync_engine", theirs), "connect", lambda *_: made.append(None))
    locks = clients.connect(theirs)
    leases = [await locks.lock(f"n{number}").acquire(SOON) for number in range(3)]
    ask(pg, "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE 'fencelock%%'")
    assert all([await lease.release() for lease in leases])
    assert len(made) == 1
    await locks.close()
    for done in (held.close(), theirs.dispose()):
        if done is not None:
            await done


def test_password_that_changes_under_an_engine(pg: Postgres, stack: ExitStack) -> None:
    """After a login that the server refuses, an engine is asked again how to connect, and nobody notices."""
    now = {"password": PASSWORD}
    theirs = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(**{**where(pg), **now}))
    stack.callback(theirs.dispose)
    with fencelock.connect(theirs) as locks:
        with locks.lock("x"):
            pass
        ask(pg, "ALTER ROLE app PASSWORD 'another'")
        ask(
            pg, "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE 'fencelock%%'"
        )
        now["password"] = "another"
        with locks.lock("x"):
            pass


def test_password_that_changes(pg: Postgres, stack: ExitStack) -> None:
    """Who changes the password under a pool that asks for it is asked again, and nobody notices."""
    now = {"password": PASSWORD}
    pool = stack.enter_context(
        psycopg_pool.ConnectionPool("", kwargs=lambda: {**where(pg), **now}, min_size=1, open=True)
    )
    with fencelock.connect(pool) as locks:
        with locks.lock("x"):
            pass
        ask(pg, "ALTER ROLE app PASSWORD 'another'")
        ask(
            pg, "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE 'fencelock%%'"
        )
        now["password"] = "another"
        with locks.lock("x"):
            pass


def test_engine_that_cannot_connect(own_postgres: Callable[..., Postgres]) -> None:
    """An engine whose server is not there is told of as such; nothing else is connected to."""
    made = sqlalchemy.create_engine("postgresql+psycopg://app:s3cret@127.0.0.1:1/db")
    with fencelock.connect(made) as locks, pytest.raises(EngineUnavailable) as caught:
        locks.lock("x").try_acquire()
    assert "s3cret" not in f"{caught.value} {locks!r}"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: sqlalchemy.create_engine("sqlite://"),
            r"a URL must be a str .*, not sqlalchemy\.Engine; connect\(\) also accepts",
        ),
        (lambda: sqlalchemy.make_url("postgresql://h/db"), r"not sqlalchemy\.URL; .* an engine of SQLAlchemy"),
        (lambda: sqlalchemy.orm.Session(), r"not sqlalchemy\.Session; .* an engine of SQLAlchemy"),
        (lambda: sqlalchemy.create_mock_engine("postgresql+psycopg://", print), "AsyncEngine of SQLAlchemy is needed"),
        (lambda: object(), "a URL must be a str"),
    ],
)
def test_refused(make: Callable[[], Any], words: str) -> None:
    """What cannot say how to connect is refused when the client is made."""
    with pytest.raises((InvalidURL, TypeError), match=words):
        fencelock.connect(make())


def test_cursor_is_refused(postgres: Postgres) -> None:
    """A cursor is not a connection, and that is said."""
    with psycopg.connect(postgres.url) as theirs, pytest.raises(TypeError, match="not Cursor"):
        fencelock.connect(cast(Any, theirs.cursor()))


def test_unknown_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose driver keeps its parameters to itself is refused, rather than believed by its URL."""
    made = sqlalchemy.create_engine("postgresql+psycopg://")
    monkeypatch.setattr(made.dialect, "driver", "asyncpg")
    with pytest.raises(TypeError, match="the driver asyncpg cannot tell"):
        fencelock.connect(made)


def test_empty(postgres: Postgres) -> None:
    """The shared server's own role needs no password, and a connection without one works."""
    with psycopg.connect(empty(postgres).url) as theirs, fencelock.connect(theirs) as locks, locks.lock("x") as lease:
        lease.check()
