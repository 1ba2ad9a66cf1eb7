"""An application's own object in place of a URL: it says how to connect, and fencelock opens connections of its own.

A lock must be visible to everybody immediately and must survive the application's rollback, so it never lives in one of the
application's transactions.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from fencelock.core.adopted_client import AdoptedClient, Arguments, adopt_django, adopt_engine, ready
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.url import PostgresUrl, from_params
from fencelock.errors import EngineUnavailable, InvalidType

LIBPQ = frozenset({"psycopg", "psycopg_async", "psycopg2", "psycopg2cffi"})
"""SQLAlchemy's drivers whose connections report their parameters."""


def adopted_client(runtime: Runtime, client: Any) -> AdoptedClient[PostgresUrl]:
    """Return how to connect as this object does; raise InvalidType if that is unknown, or it is for the other runtime."""
    package = next(
        kind.__module__.partition(".")[0]
        for kind in type(client).__mro__
        if kind.__module__.partition(".")[0] in _ADAPTERS
    )
    return _ADAPTERS[package](runtime, client)


def _connection(_: Runtime, connection: Any) -> AdoptedClient[PostgresUrl]:
    if not hasattr(getattr(connection, "info", None), "get_parameters"):
        raise InvalidType(f"a Connection or AsyncConnection of psycopg is needed here, not {type(connection).__name__}")
    params = _params(connection)  # read now: the application may close it before the engine connects
    return AdoptedClient(lambda: ready(params), from_params, "the application's connection", _url(params))


def _pool(runtime: Runtime, pool: Any) -> AdoptedClient[PostgresUrl]:
    async def find() -> Arguments:
        conninfo, kwargs = [await _value_of(runtime, each) for each in (pool.conninfo, pool.kwargs)]
        return {**conninfo_to_dict(conninfo or ""), **(kwargs or {})}

    constant = isinstance(pool.conninfo, str) and not callable(pool.kwargs)
    known = {**conninfo_to_dict(pool.conninfo), **(pool.kwargs or {})} if constant else {}
    return AdoptedClient(find, from_params, "the application's pool", _url(known))


async def _value_of(runtime: Runtime, value: Any) -> Any:
    """Return an argument of a pool, or the result if the argument is a function."""
    if not callable(value):
        return value
    found = await runtime.run_blocking(value)
    if not isawaitable(found):
        return found
    if not runtime.shares_connections:
        found.close()  # type: ignore[attr-defined]
        raise EngineUnavailable("the pool asks a coroutine how to connect: use fencelock.aio.connect")
    return await found


def _sqlalchemy(runtime: Runtime, engine: Any) -> AdoptedClient[PostgresUrl]:
    adopted = adopt_engine(runtime, engine, from_params, lambda _, connection: _params(connection.driver_connection))
    if engine.dialect.driver not in LIBPQ:
        raise InvalidType(
            f"an engine with the driver {engine.dialect.driver} cannot tell how it connects; give its URL as "
            "postgresql://, or use the driver psycopg"
        )
    return adopted


def _django(_: Runtime, connection: Any) -> AdoptedClient[PostgresUrl]:
    return adopt_django(connection, from_params, "postgresql")


_ADAPTERS: dict[str, Callable[[Runtime, Any], AdoptedClient[PostgresUrl]]] = {
    "psycopg": _connection,
    "psycopg_pool": _pool,
    "sqlalchemy": _sqlalchemy,
    "django": _django,
}


def _params(connection: Any) -> Arguments:
    """Return the parameters that a connection of psycopg 3 or psycopg2 was made with."""
    info = connection.info
    params = info.get_parameters() if hasattr(info, "get_parameters") else info.dsn_parameters
    return {**params, "password": info.password}


def _url(params: Arguments) -> str:
    return f"postgresql://{params.get('host') or ''}/{params.get('dbname') or ''}"
