"""Runs SQL on a caller's own connection, inside the caller's own transaction.

`adapt(connection)` recognises a connection by the package of its type, without importing a driver. Statements are written
once, with `:name` for their arguments, and are rendered for the driver's paramstyle. What uses an adapter is written once, as
coroutines: on a connection that blocks they never suspend.
"""

from __future__ import annotations

import re
from collections.abc import Coroutine, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from fencelock.errors import FencelockError, InvalidType

POSTGRESQL, MYSQL, SQLITE = "postgresql", "mysql", "sqlite"

_ARGUMENT = re.compile(r"(?<![:\w]):(\w+)")


class Result(NamedTuple):
    """The result of a statement: its rows, if it returns any, and the number of rows that the driver counts."""

    rows: list[tuple[Any, ...]]
    rowcount: int


class BlockingConnection(Protocol):
    """A connection, session or cursor that blocks, for type checkers."""

    def close(self) -> None: ...


class AsyncConnection(Protocol):
    """A connection, session or cursor of asyncio, for type checkers."""

    def close(self) -> Coroutine[Any, Any, None]: ...


class ConnectionAdapter(Protocol):
    """A caller's connection. On one that blocks, no coroutine of it suspends."""

    @property
    def dialect(self) -> str:
        """The SQL dialect: postgresql, mysql (also MariaDB) or sqlite."""
        ...

    @property
    def awaited(self) -> bool:
        """Whether it is a connection of asyncio."""
        ...

    @property
    def how_to_begin(self) -> str:
        """How the owner of such a connection begins a transaction, for error messages."""
        ...

    async def execute(self, sql: str, args: Mapping[str, Any] = ...) -> Result:
        """Run one statement with `:name` arguments. The driver's errors are raised unchanged."""
        ...

    async def is_autocommit(self) -> bool:
        """Return whether each statement commits by itself: no transaction is open, and the next statement opens none."""
        ...

    async def begin(self) -> None:
        """Begin a transaction, on drivers that do not begin one with the first statement."""
        ...

    async def commit(self) -> None:
        """Commit the transaction."""
        ...

    async def rollback(self) -> None:
        """Roll the transaction back."""
        ...


@lru_cache(maxsize=256)
def render(sql: str, paramstyle: str) -> tuple[str, tuple[str, ...]]:
    """Return a statement in the driver's paramstyle, and the names of its arguments in the order of the placeholders.

    >>> render("SELECT :a, :b, :a::text", "qmark")
    ('SELECT ?, ?, ?::text', ('a', 'b', 'a'))
    >>> render("SELECT :a, 5 % :b", "format")
    ('SELECT %s, 5 %% %s', ('a', 'b'))
    >>> render("SELECT :a, :b, :a", "numeric_dollar")
    ('SELECT $1, $2, $1', ('a', 'b'))
    """
    names: list[str] = []

    def placeholder(found: re.Match[str]) -> str:
        name = found[1]
        if paramstyle == "numeric_dollar":
            if name not in names:
                names.append(name)
            return f"${names.index(name) + 1}"
        names.append(name)
        return "?" if paramstyle == "qmark" else "%s"

    if paramstyle in ("format", "pyformat"):
        sql = sql.replace("%", "%%")
    return _ARGUMENT.sub(placeholder, sql), tuple(names)


def bind(sql: str, args: Mapping[str, Any], paramstyle: str) -> tuple[str, tuple[Any, ...]]:
    """Return a statement in the driver's paramstyle, and its arguments in the order of the placeholders."""
    text, names = render(sql, paramstyle)
    return text, tuple(args[name] for name in names)


def adapt(connection: Any, package: str, *, awaited: bool) -> ConnectionAdapter:
    """Return the adapter of a connection for the blocking or the asyncio API of a package such as "fences".

    Raise InvalidType for anything that is not a supported connection, and for a connection of the other API.
    """
    from fencelock.sqlio.drivers import find_adapter

    adapter = find_adapter(connection)
    if adapter.awaited is not awaited:
        raise wrong_api(connection, package, awaited=awaited)
    return adapter


async def require_transaction(adapter: ConnectionAdapter, what: str, name: str | None = None) -> None:
    """Raise FencelockError if the connection commits each statement by itself; the message says how to begin."""
    if await adapter.is_autocommit():
        raise FencelockError(
            f"{what} needs a transaction, and this connection commits each statement by itself: {adapter.how_to_begin}",
            name,
        )


def wrong_api(thing: object, package: str, *, awaited: bool) -> InvalidType:
    """Return the error for an object that belongs to the other API of a package.

    >>> import sqlite3
    >>> print(wrong_api(sqlite3.connect(":memory:"), "fences", awaited=True))
    sqlite3.Connection would block the event loop: use fencelock.fences, or give fencelock.aio.fences one of asyncio
    """
    mine, other = f"fencelock.aio.{package}", f"fencelock.{package}"
    if awaited:
        return InvalidType(f"{kind_of(thing)} would block the event loop: use {other}, or give {mine} one of asyncio")
    return InvalidType(f"{kind_of(thing)} is for asyncio: use {mine}, or give {other} one that blocks")


def kind_of(thing: object) -> str:
    """Return the name of an object's type, for messages."""
    kind = type(thing)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def error_codes(error: BaseException) -> set[str]:
    """Return the SQLSTATEs and MySQL error numbers of an error, also if SQLAlchemy or Django has wrapped it.

    >>> error_codes(ValueError("not an error of a database"))
    set()
    """
    found: set[str] = set()
    current: BaseException | None = error
    while current is not None:
        for name in ("sqlstate", "pgcode"):
            if isinstance(code := getattr(current, name, None), str):
                found.add(code)
        if current.args and isinstance(current.args[0], int):
            found.add(str(current.args[0]))
        current = getattr(current, "orig", None) or current.__cause__  # SQLAlchemy's, and Django's
    return found


def is_missing_table(error: BaseException) -> bool:
    """Return whether an error says that a table does not exist."""
    return bool(error_codes(error) & {"42P01", "1146"}) or "no such table" in str(error)
