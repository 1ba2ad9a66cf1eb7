"""A connection for a while, from whatever gives one: a driver's `connect`, a session factory, or a pool, of either colour."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import Any

from fencelock.errors import InvalidType
from fencelock.sqlio import link
from fencelock.sqlio.drivers import kind_of


def check_connect(connect: object, who: str) -> Callable[[], Any]:
    """Return what gives connections; raise InvalidType if it cannot.

    >>> check_connect("postgresql://localhost/shop", "a door")
    Traceback (most recent call last):
    fencelock.errors.InvalidType: a door needs a function that gives a connection, such as lambda: psycopg.connect(…), not str
    """
    # A connection of sqlite3's can be called, for reasons of its own.
    if callable(connect) and not (type(connect).__module__ == "sqlite3" and hasattr(connect, "commit")):
        return connect
    raise InvalidType(
        f"{who} needs a function that gives a connection, such as lambda: psycopg.connect(…), not {kind_of(connect)}"
    )


def is_awaited(given: Any) -> bool:
    """Return whether what was given for a connection is of asyncio's."""
    if isawaitable(given):
        return True
    return (
        link(given).awaited
        if _is_connection(given)
        else not hasattr(given, "__enter__") and hasattr(given, "__aenter__")
    )


@asynccontextmanager
async def lent(given: Any) -> AsyncIterator[Any]:
    """Give the connection, and put it back where it belongs: closed, to its pool, or by the context manager that it came in.

    Suspends only where it is awaited.
    """
    if isawaitable(given):
        given = await given
    if _is_connection(given):
        try:
            yield given
        finally:
            # psycopg's pool expects it back; its connections' own close() does that only if they were told so.
            pool: Any = getattr(given, "_pool", None)
            done = pool.putconn(given) if hasattr(pool, "putconn") else given.close()
            if isawaitable(done):
                await done
    elif hasattr(given, "__enter__"):
        with given as connection:
            yield connection
    elif hasattr(given, "__aenter__"):
        async with given as connection:
            yield connection
    else:
        link(given)  # says what is wanted


def _is_connection(given: Any) -> bool:
    try:
        link(given)
    except TypeError:
        return False
    return True
