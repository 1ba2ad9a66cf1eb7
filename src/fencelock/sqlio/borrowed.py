"""Borrows a connection from a driver's `connect`, a session factory or a pool, and gives it back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from inspect import iscoroutine
from typing import Any

from fencelock.errors import InvalidType
from fencelock.sqlio import adapt, kind_of, wrong_api
from fencelock.sqlio.drivers import find_adapter, resolve


def check_connect(connect: object, who: str) -> Callable[[], Any]:
    """Return a function that opens connections; raise InvalidType if it is not a function.

    >>> check_connect("postgresql://localhost/shop", "Relay")
    Traceback (most recent call last):
    fencelock.errors.InvalidType: Relay needs a function that opens a connection, such as lambda: psycopg.connect(…), not str
    """
    # A connection of sqlite3 is callable, too.
    if callable(connect) and not (type(connect).__module__ == "sqlite3" and hasattr(connect, "commit")):
        return connect
    raise InvalidType(
        f"{who} needs a function that opens a connection, such as lambda: psycopg.connect(…), not {kind_of(connect)}"
    )


@asynccontextmanager
async def borrowed_connection(connect: Callable[[], Any], package: str, *, awaited: bool) -> AsyncIterator[Any]:
    """Open a connection, and give it back at the end: closed, to its pool, or by the context manager that it came in.

    Raise InvalidType for a connection of the other API.
    """
    given = connect()
    if iscoroutine(given) and awaited:
        given = await given
    elif hasattr(given, "__aenter__") and awaited:
        async with given as connection:
            yield connection
        return
    elif iscoroutine(given) or (hasattr(given, "__aenter__") and not hasattr(given, "__enter__")):
        if iscoroutine(given):
            given.close()
        raise wrong_api(given, package, awaited=False)
    elif hasattr(given, "__enter__") and not awaited and not _is_connection(given):
        with given as connection:
            yield connection
        return
    try:
        adapt(given, package, awaited=awaited)
        yield given
    finally:
        # A pool of psycopg expects its connection back: close() returns it only if the pool was configured so.
        pool: Any = getattr(given, "_pool", None)
        with suppress(Exception):  # it must not hide the error of the block
            if hasattr(pool, "putconn"):
                await resolve(pool.putconn(given))
            elif hasattr(given, "close"):
                await resolve(given.close())


def _is_connection(given: Any) -> bool:
    try:
        find_adapter(given)
    except TypeError:
        return False
    return True
