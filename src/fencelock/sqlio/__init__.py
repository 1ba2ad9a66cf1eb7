"""Runs SQL on whatever connection a caller hands in, blocking or awaited, inside the caller's own transaction.

`link(connection)` finds out what it is by the package of its type, without importing any driver. Statements are written
once, with `:name` for their arguments, and rendered for the driver's paramstyle. What is written on top of it is written once
as well, as coroutines: `run` drives them to their end at once for a connection that blocks, and hands them to the caller to
be awaited for one that does not.
"""

from __future__ import annotations

import re
from collections.abc import Coroutine, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

POSTGRESQL, MYSQL, SQLITE = "postgresql", "mysql", "sqlite"

_ARGUMENT = re.compile(r"(?<![:\w]):(\w+)")


class Answer(NamedTuple):
    """What a statement gave: its rows, for one that has any, and how many it touched, as the driver counts."""

    rows: list[tuple[Any, ...]]
    touched: int


class Blocking(Protocol):
    """A connection, session or cursor that blocks, for type checkers."""

    def close(self) -> None: ...


class Awaited(Protocol):
    """A connection, session or cursor of asyncio's, for type checkers: what is done on it is to be awaited."""

    def close(self) -> Coroutine[Any, Any, None]: ...


class Link(Protocol):
    """A connection of the caller's, as far as we use it. No colour but that of `execute`."""

    @property
    def dialect(self) -> str:
        """The database's language: postgresql, mysql (which is MariaDB's, too) or sqlite."""
        ...

    @property
    def awaited(self) -> bool:
        """Whether the caller awaits what is done on it; otherwise `execute` never suspends."""
        ...

    @property
    def begin(self) -> str:
        """How whoever has such a connection begins a transaction, to be told."""
        ...

    async def execute(self, sql: str, args: Mapping[str, Any] = ...) -> Answer:
        """Run one statement with `:name` arguments. The driver's errors come out as they are."""
        ...

    async def commits_each(self) -> bool:
        """Return whether each statement commits by itself: there is no transaction, and none begins with the next."""
        ...


class BlockingLink(Link, Protocol):
    """A connection that has done its work when it returns."""

    @property
    def awaited(self) -> Literal[False]:
        """No."""
        ...


class AwaitedLink(Link, Protocol):
    """A connection of asyncio's, where work can be forgotten."""

    @property
    def awaited(self) -> Literal[True]:
        """Yes."""
        ...

    def refuse(self, why: str, /) -> None:
        """Have the connection take no more statements, and commit nothing, at once."""
        ...


def run(link: Link, work: Coroutine[Any, Any, T]) -> Any:
    """Return what the work returns, or the work itself, to be awaited, if that is the connection's colour."""
    return work if link.awaited else finish(work)


async def settled(value: Any) -> Any:
    """Return what a driver's function returned, awaited if that is its colour."""
    return await value if hasattr(value, "__await__") else value


def finish(
    work: Coroutine[Any, Any, T],
    suspended: str = "a statement on a blocking connection suspended: its driver is not what it seems to be",
) -> T:
    """Run work on what blocks to its end, and return what it returns; if it suspends all the same, say so."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError(suspended)


@lru_cache(maxsize=256)
def render(sql: str, paramstyle: str) -> tuple[str, tuple[str, ...]]:
    """Return a statement as a driver wants it, and the names of its arguments in the order of their places.

    >>> render("SELECT :a, :b, :a::text", "qmark")
    ('SELECT ?, ?, ?::text', ('a', 'b', 'a'))
    >>> render("SELECT :a, 5 % :b", "format")
    ('SELECT %s, 5 %% %s', ('a', 'b'))
    >>> render("SELECT :a, :b, :a", "numeric_dollar")
    ('SELECT $1, $2, $1', ('a', 'b'))
    """
    names: list[str] = []

    def place(found: re.Match[str]) -> str:
        name = found[1]
        if paramstyle == "numeric_dollar":
            if name not in names:
                names.append(name)
            return f"${names.index(name) + 1}"
        names.append(name)
        return "?" if paramstyle == "qmark" else "%s"

    if paramstyle in ("format", "pyformat"):
        sql = sql.replace("%", "%%")
    return _ARGUMENT.sub(place, sql), tuple(names)


def bind(sql: str, args: Mapping[str, Any], paramstyle: str) -> tuple[str, tuple[Any, ...]]:
    """Return a statement as a driver wants it, and its arguments in the order of their places."""
    text, names = render(sql, paramstyle)
    return text, tuple(args[name] for name in names)


def link(connection: Any) -> BlockingLink | AwaitedLink:
    """Return what runs SQL on this connection; raise InvalidType for what is not one that we know."""
    from fencelock.sqlio.drivers import find

    return find(connection)


def codes(error: BaseException) -> set[str]:
    """Return what the database calls an error: SQLSTATEs and MySQL's numbers, also through those who wrap a driver's errors.

    >>> codes(ValueError("no database said this"))
    set()
    """
    found: set[str] = set()
    seen: BaseException | None = error
    while seen is not None:
        for name in ("sqlstate", "pgcode"):
            if isinstance(code := getattr(seen, name, None), str):
                found.add(code)
        if seen.args and isinstance(seen.args[0], int):
            found.add(str(seen.args[0]))
        seen = getattr(seen, "orig", None) or seen.__cause__  # SQLAlchemy's, and Django's
    return found


def misses_table(error: BaseException) -> bool:
    """Return whether an error says that a table is not there."""
    return bool(codes(error) & {"42P01", "1146"}) or "no such table" in str(error)
