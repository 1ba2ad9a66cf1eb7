"""An application's own objects in a URL's place: they say how to connect, and their connections are left alone.

A lock has to be seen by everybody at once and must not go with somebody's rollback, so it never lives in a transaction of
theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from fencelock.core.adopted_client import AdoptedClient, Words, ask_engine, check_engine, ready
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.place import Place, spelled
from fencelock.errors import EngineUnavailable, InvalidType

LIBPQ = frozenset({"psycopg", "psycopg_async", "psycopg2", "psycopg2cffi"})
"""SQLAlchemy's drivers whose connections can say how they were made."""


def application(runtime: Runtime, client: Any) -> AdoptedClient[Place]:
    """Return what an object stands for; raise InvalidType if there is no telling, or it belongs to the other colour."""
    package = next(
        kind.__module__.partition(".")[0]
        for kind in type(client).__mro__
        if kind.__module__.partition(".")[0] in _KINDS
    )
    return _KINDS[package](runtime, client)


def _connection(_: Runtime, connection: Any) -> AdoptedClient[Place]:
    if not hasattr(getattr(connection, "info", None), "get_parameters"):
        raise InvalidType(f"a Connection or AsyncConnection of psycopg is needed here, not {type(connection).__name__}")
    words = _words(connection)  # now: it may be closed by the time it is needed
    return AdoptedClient(lambda: ready(words), spelled, "the application's connection", _url(words))


def _pool(runtime: Runtime, pool: Any) -> AdoptedClient[Place]:
    async def find() -> Words:
        info, more = [await _called(runtime, each) for each in (pool.conninfo, pool.kwargs)]
        return {**conninfo_to_dict(info or ""), **(more or {})}

    plain = isinstance(pool.conninfo, str) and not callable(pool.kwargs)
    known = {**conninfo_to_dict(pool.conninfo), **(pool.kwargs or {})} if plain else {}
    return AdoptedClient(find, spelled, "the application's pool", _url(known))


async def _called(runtime: Runtime, value: Any) -> Any:
    """Return what a pool was given, or what the function returns that it was given instead."""
    if not callable(value):
        return value
    found = await runtime.run_blocking(value)
    if not isawaitable(found):
        return found
    if not runtime.shares_connections:
        found.close()  # type: ignore[attr-defined]
        raise EngineUnavailable("the pool asks a coroutine how to connect: use fencelock.aio.connect")
    return await found


def _sqlalchemy(runtime: Runtime, engine: Any) -> AdoptedClient[Place]:
    url = check_engine(runtime, engine)
    if engine.dialect.driver not in LIBPQ:
        raise InvalidType(
            f"an engine with the driver {engine.dialect.driver} cannot tell how it connects; give its URL as "
            "postgresql://, or use the driver psycopg"
        )

    def read(_: Any, connection: Any) -> Words:
        return _words(connection.driver_connection)

    return AdoptedClient(
        lambda: ask_engine(runtime, engine, read), spelled, "the application's engine", url, connects=True
    )


def _django(_: Runtime, connection: Any) -> AdoptedClient[Place]:
    async def find() -> Words:
        words: Words = connection.get_connection_params()
        return words

    settings = connection.settings_dict
    return AdoptedClient(
        find, spelled, "Django's connection", _url({"host": settings.get("HOST"), "dbname": settings.get("NAME")})
    )


_KINDS: dict[str, Callable[[Runtime, Any], AdoptedClient[Place]]] = {
    "psycopg": _connection,
    "psycopg_pool": _pool,
    "sqlalchemy": _sqlalchemy,
    "django": _django,
}


def _words(connection: Any) -> Words:
    """Return what a connection of psycopg 3, or of psycopg2, was made with."""
    info = connection.info
    words = info.get_parameters() if hasattr(info, "get_parameters") else info.dsn_parameters
    return {**words, "password": info.password}


def _url(words: Words) -> str:
    return f"postgresql://{words.get('host') or ''}/{words.get('dbname') or ''}"
