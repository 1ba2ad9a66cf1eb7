"""A row with a version column."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fencelock.errors import FencelockError, InvalidArgument
from fencelock.lockfree.cell import Cell, Seen
from fencelock.lockfree.colour import settled
from fencelock.sqlio import POSTGRESQL, codes, link

Row = dict[str, Any]

COLLISIONS = {"40001", "40P01", "1213", "1205", "1020"}
"""What databases say when transactions got into each other's way: could not serialize, deadlock, changed since last read."""

_IDENTIFIER = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)?")


class SqlRow(Cell[Any]):
    """A row of a table with a version column: an integer that every write raises. PostgreSQL, MySQL, MariaDB and SQLite.

    `read` and `write` are part of your transaction. `modify` makes one of its own for each attempt, as a transaction that has
    read once may go on seeing the same; it is refused while one of yours is open.

    >>> import sqlite3
    >>> db = sqlite3.connect(":memory:")
    >>> _ = db.execute("CREATE TABLE account (id INTEGER, balance INTEGER, version INTEGER)")
    >>> _ = db.execute("INSERT INTO account VALUES (7, 100, 1)"); db.commit()
    >>> account = SqlRow(db, "account", {"id": 7}, ["balance"])
    >>> account.modify(lambda row: {"balance": row["balance"] - 10})
    {'balance': 90}
    >>> seen = account.read()
    >>> account.write({"balance": 80}, seen.version)
    >>> account.write({"balance": 70}, seen.version)
    Traceback (most recent call last):
    fencelock.errors.VersionConflict: 'account id=7' is no longer as it was read: read again, and decide again
    >>> db.close()
    """

    def __init__(
        self,
        connection: Any,
        table: str,
        where: Mapping[str, Any],
        columns: Sequence[str],
        *,
        version: str = "version",
    ) -> None:
        if not where or not columns:
            raise InvalidArgument(f"{table}: say which row, as in {{'id': 7}}, and which columns, as in ['balance']")
        for name in (table, version, *where, *columns):
            if not _IDENTIFIER.fullmatch(name):
                raise InvalidArgument(
                    f"{name!r} cannot be the name of a table or column here; write SQL of your own for it"
                )
        self._connection = connection
        self._link = link(connection)
        self.awaited = self._link.awaited
        self.name = f"{table} {' '.join(f'{name}={value}' for name, value in where.items())}"
        self._columns = tuple(columns)
        self._where = {f"where_{number}": value for number, value in enumerate(where.values())}
        quoted = partial(_quoted, self._link.dialect)
        which = " AND ".join(f"{quoted(name)} = :where_{number}" for number, name in enumerate(where))
        self._version, at = version, quoted(version)
        self._select = f"SELECT {', '.join(map(quoted, (version, *columns)))} FROM {quoted(table)} WHERE {which}"
        self._update = f"UPDATE {quoted(table)} SET {at} = {at} + 1{{}} WHERE {which} AND {at} = :version"

    async def _read(self) -> Seen[Row]:
        rows = (await self._link.execute(self._select, self._where)).rows
        if len(rows) != 1:
            raise FencelockError(f"{self.name!r} is {len(rows)} rows, and has to be one", self.name)
        version, *values = rows[0]
        if version is None:
            raise FencelockError(
                f"{self.name!r}: its version is NULL (column {self._version}), which no write could find unchanged. Set it "
                "to 1, and make the column NOT NULL",
                self.name,
            )
        return Seen(dict(zip(self._columns, values, strict=True)), version)

    async def _write(self, value: Row, version: Any) -> bool:
        others = value.keys() - set(self._columns)
        if others:
            raise InvalidArgument(
                f"{self.name!r} has no column {', '.join(sorted(others))} among those it was made with"
            )
        names = (_quoted(self._link.dialect, name) for name in value)
        sets = "".join(f", {name} = :set_{number}" for number, name in enumerate(names))
        args = {f"set_{number}": new for number, new in enumerate(value.values())}
        args |= self._where | {"version": version}
        return (await self._link.execute(self._update.format(sets), args)).touched == 1

    async def _attempt(self, change: Callable[[Row], Any]) -> tuple[bool, Row | None]:
        if _busy(self._connection):
            raise FencelockError(
                f"{self.name!r}: modify makes a transaction of its own, and this connection has one that is open: commit it "
                "first, or use read and write inside it",
                self.name,
            )
        changed = _Changed(change)
        try:
            settled_, value = await super()._attempt(changed)
            await settled(self._connection.commit() if settled_ else self._connection.rollback())
        except BaseException as error:
            with suppress(Exception):  # the connection may be what failed, and the first error says more
                await settled(self._connection.rollback())
            if isinstance(error, Exception) and error is not changed.error and _collided(error):
                return False, None
            raise
        return settled_, value


def _quoted(dialect: str, name: str) -> str:
    """Return a name in quotes, as it may be a word of SQL's own such as `order`; it means what it does without them.

    >>> _quoted("postgresql", "Shop.order"), _quoted("mysql", "order")
    ('"shop"."order"', '`order`')
    """
    if dialect == POSTGRESQL:  # which folds what has no quotes, as far as ASCII goes
        folded = "".join(letter.lower() if letter.isascii() else letter for letter in name)
        return ".".join(f'"{part}"' for part in folded.split("."))
    # Not "…" for SQLite, which would take it for a text if there is no such column.
    return ".".join(f"`{part}`" for part in name.split("."))


class _Changed:
    """Calls the caller's function, and remembers its error: whatever that looks like, no database has said it."""

    def __init__(self, change: Callable[[Row], Any]) -> None:
        self._change = change
        self.error: BaseException | None = None

    async def __call__(self, row: Row) -> Any:
        try:
            return await settled(self._change(row))
        except BaseException as error:
            self.error = error
            raise


def _collided(error: Exception) -> bool:
    return bool(codes(error) & COLLISIONS) or "database is locked" in str(error)


def _busy(connection: Any) -> bool:
    """Return whether a transaction is open on it, as far as its driver can tell."""
    if hasattr(connection, "in_atomic_block"):  # Django
        return bool(connection.in_atomic_block)
    if hasattr(connection, "in_transaction"):
        inside = connection.in_transaction  # SQLite's tells, SQLAlchemy's is asked
        return bool(inside() if callable(inside) else inside)
    if hasattr(connection, "server_status"):
        return bool(connection.server_status & 1)
    info = getattr(connection, "info", None)
    return getattr(info, "transaction_status", 0) != 0
