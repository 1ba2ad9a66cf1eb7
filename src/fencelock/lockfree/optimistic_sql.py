"""A row with a version column."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fencelock.errors import FencelockError, InvalidArgument
from fencelock.lockfree.versioned import BaseVersionedValue, Versioned, VersionedValue
from fencelock.sqlio import POSTGRESQL, adapt, error_codes
from fencelock.sqlio.drivers import resolve

Row = dict[str, Any]

COLLISIONS = {"40001", "40P01", "1213", "1205", "1020"}
"""Error codes for colliding transactions: serialization failure, deadlock, lock timeout, row changed since it was read."""

_IDENTIFIER = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)?")


class BaseSqlRow(BaseVersionedValue[Row]):
    """What both APIs share."""

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
            raise InvalidArgument(f"{table}: name the row, as in {{'id': 7}}, and the columns, as in ['balance']")
        for name in (table, version, *where, *columns):
            if not _IDENTIFIER.fullmatch(name):
                raise InvalidArgument(f"SqlRow does not support {name!r} as a name of a table or column")
        self._connection = connection
        self._adapter = adapt(connection, "lockfree", awaited=self._awaited)
        self.name = f"{table} {' '.join(f'{name}={value}' for name, value in where.items())}"
        self._columns = tuple(columns)
        self._where = {f"where_{number}": value for number, value in enumerate(where.values())}
        quoted = partial(_quoted, self._adapter.dialect)
        row = " AND ".join(f"{quoted(name)} = :where_{number}" for number, name in enumerate(where))
        self._version, at = version, quoted(version)
        self._select = f"SELECT {', '.join(map(quoted, (version, *columns)))} FROM {quoted(table)} WHERE {row}"
        self._update_sql = f"UPDATE {quoted(table)} SET {at} = {at} + 1{{}} WHERE {row} AND {at} = :version"

    async def _load(self) -> Versioned[Row]:
        rows = (await self._adapter.execute(self._select, self._where)).rows
        if len(rows) != 1:
            raise FencelockError(f"{self.name!r} is {len(rows)} rows, and must be one", self.name)
        version, *values = rows[0]
        if version is None:
            raise FencelockError(
                f"the version of {self.name!r} (column {self._version}) is NULL, which no write could find unchanged: set it "
                "to 1, and make the column NOT NULL",
                self.name,
            )
        return Versioned(dict(zip(self._columns, values, strict=True)), version)

    async def _store(self, value: Row, version: Any) -> bool:
        others = value.keys() - set(self._columns)
        if others:
            raise InvalidArgument(f"{self.name!r} was made without the column {', '.join(sorted(others))}")
        names = (_quoted(self._adapter.dialect, name) for name in value)
        assignments = "".join(f", {name} = :set_{number}" for number, name in enumerate(names))
        args = {f"set_{number}": new for number, new in enumerate(value.values())}
        args |= self._where | {"version": version}
        return (await self._adapter.execute(self._update_sql.format(assignments), args)).rowcount == 1

    async def _attempt(self, fn: Callable[[Row], Any]) -> tuple[bool, Row | None]:
        if _has_open_transaction(self._connection):
            raise FencelockError(
                f"{self.name!r}: update makes its own transaction, and this connection has an open one: commit it first, or "
                "use read and write inside it",
                self.name,
            )
        user = _UserFunction(fn)
        try:
            await self._adapter.begin()
            done, value = await super()._attempt(user)
            await (self._adapter.commit() if done else self._adapter.rollback())
        except BaseException as error:
            with suppress(Exception):  # the connection may be what failed, and the first error says more
                await self._adapter.rollback()
            if isinstance(error, Exception) and error is not user.error and _is_collision(error):
                return False, None
            raise
        return done, value


class SqlRow(BaseSqlRow, VersionedValue[Row]):
    """A row of a table with a version column: an integer that every write raises. PostgreSQL, MySQL, MariaDB and SQLite.

    `read` and `write` are part of your transaction. `update` makes its own transaction for each attempt, as a transaction
    that has read once may see the same data again; it refuses a connection with an open transaction.

    >>> import sqlite3
    >>> db = sqlite3.connect(":memory:")
    >>> _ = db.execute("CREATE TABLE account (id INTEGER, balance INTEGER, version INTEGER)")
    >>> _ = db.execute("INSERT INTO account VALUES (7, 100, 1)"); db.commit()
    >>> account = SqlRow(db, "account", {"id": 7}, ["balance"])
    >>> account.update(lambda row: {"balance": row["balance"] - 10})
    {'balance': 90}
    >>> seen = account.read()
    >>> account.write({"balance": 80}, seen.version)
    >>> account.write({"balance": 70}, seen.version)
    Traceback (most recent call last):
    fencelock.errors.VersionConflict: others have changed 'account id=7' since it was read: read it again
    >>> db.close()
    """


def _quoted(dialect: str, name: str) -> str:
    """Return a name in quotes, as it may be a keyword such as `order`. It means the same as without quotes.

    >>> _quoted("postgresql", "Shop.order"), _quoted("mysql", "order")
    ('"shop"."order"', '`order`')
    """
    if dialect == POSTGRESQL:  # it folds unquoted ASCII letters to lower case
        folded = "".join(letter.lower() if letter.isascii() else letter for letter in name)
        return ".".join(f'"{part}"' for part in folded.split("."))
    # No double quotes for SQLite: it would read a missing column in double quotes as a string.
    return ".".join(f"`{part}`" for part in name.split("."))


class _UserFunction:
    """Calls the user's function, and remembers its error, which must not be taken for an error of the database."""

    def __init__(self, fn: Callable[[Row], Any]) -> None:
        self._fn = fn
        self.error: BaseException | None = None

    async def __call__(self, row: Row) -> Any:
        try:
            return await resolve(self._fn(row))
        except BaseException as error:
            self.error = error
            raise


def _is_collision(error: Exception) -> bool:
    return bool(error_codes(error) & COLLISIONS) or "database is locked" in str(error)


def _has_open_transaction(connection: Any) -> bool:
    """Return whether a transaction is open, as far as the driver knows."""
    for name in ("in_atomic_block", "in_transaction", "is_in_transaction"):  # Django; SQLite and SQLAlchemy; asyncpg
        if hasattr(connection, name):
            inside = getattr(connection, name)
            return bool(inside() if callable(inside) else inside)
    if hasattr(connection, "server_status"):
        return bool(connection.server_status & 1)
    info = getattr(connection, "info", None)
    return getattr(info, "transaction_status", 0) != 0
