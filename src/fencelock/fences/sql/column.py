"""The SQL fence without its own table: the token is in a column of the row that it protects."""

from __future__ import annotations

import re
from typing import NamedTuple

from fencelock.errors import FencelockError, InvalidArgument, InvalidType, StaleToken
from fencelock.fences import Fenced
from fencelock.fences.core import HINT, credentials_of, resource_of, token_pair_of

_PLACEHOLDERS = {"qmark": "?", "format": "%s", "named": ":{}", "pyformat": "%({})s"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")


class Clause(NamedTuple):
    """Two parts of an UPDATE, and their arguments: in order for positional placeholders, or by name."""

    set: str
    where: str
    set_args: tuple[int | str, ...]
    where_args: tuple[int | str, ...]
    named: dict[str, int | str]


class FenceColumn:
    """Makes clauses for an UPDATE, so that the UPDATE of a stale holder changes nothing.

    The row has two columns: one for the token (`BIGINT NOT NULL DEFAULT 0`) and one for the claim's id
    (`VARCHAR(255) NOT NULL DEFAULT ''`; on MySQL `VARBINARY(255)`, as a collation may treat two ids as equal). Run the
    UPDATE once before the first read, with nothing else to set, and again with every write: without the first one an older
    holder could write between the newer one's read and its write.

    >>> import sqlite3, types
    >>> lease = types.SimpleNamespace(token=34, id="b", name="apple")
    >>> db = sqlite3.connect(":memory:")
    >>> _ = db.execute("CREATE TABLE stock (sku TEXT, n INTEGER, fence INTEGER DEFAULT 0, fence_id TEXT DEFAULT '')")
    >>> _ = db.execute("INSERT INTO stock (sku, n) VALUES ('apple', 100)")
    >>> column = FenceColumn("fence", "fence_id", paramstyle="qmark")
    >>> clause = column.clause(lease)
    >>> clause.set, clause.where
    ('fence = ?, fence_id = ?', "(fence IS NULL OR fence < ? OR (fence = ? AND fence_id IN (?, '')))")
    >>> enter = f"UPDATE stock SET {clause.set} WHERE sku = ? AND {clause.where}"
    >>> column.check(lease, db.execute(enter, (*clause.set_args, "apple", *clause.where_args)).rowcount)
    >>> n, = db.execute("SELECT n FROM stock WHERE sku = 'apple'").fetchone()
    >>> write = f"UPDATE stock SET n = ?, {clause.set} WHERE sku = ? AND {clause.where}"
    >>> column.check(lease, db.execute(write, (n - 5, *clause.set_args, "apple", *clause.where_args)).rowcount)
    >>> FenceColumn("fence", "fence_id", paramstyle="pyformat").clause(lease).set
    'fence = %(fence_token)s, fence_id = %(fence_owner)s'
    >>> db.close()
    """

    def __init__(self, token: str = "fence", id: str = "fence_id", *, paramstyle: str) -> None:
        for name in (token, id):
            if not _NAME.fullmatch(name):
                raise InvalidArgument(
                    f"{name!r:.60} is not the name of a column: it becomes part of the statement unchanged"
                )
        if paramstyle not in _PLACEHOLDERS:
            raise InvalidArgument(
                f"paramstyle must be qmark, format, named or pyformat, as the driver's own; not {paramstyle!r}"
            )
        self._token = token
        self._id = id
        self._placeholder = _PLACEHOLDERS[paramstyle]

    def clause(self, lease: Fenced) -> Clause:
        """Return the parts after SET and after WHERE, with their arguments."""
        pair = credentials_of(lease)
        token, owner = self._placeholder.format("fence_token"), self._placeholder.format("fence_owner")
        same = f"{self._token} = {token} AND {self._id} IN ({owner}, '')"
        return Clause(
            f"{self._token.rpartition('.')[2]} = {token}, {self._id.rpartition('.')[2]} = {owner}",
            f"({self._token} IS NULL OR {self._token} < {token} OR ({same}))",
            (pair.token, pair.id),
            (pair.token, pair.token, pair.id),
            {"fence_token": pair.token, "fence_owner": pair.id},
        )

    def check(self, lease: Fenced, rowcount: int, resource: str | None = None) -> None:
        """Raise StaleToken if the UPDATE found no row: a newer holder has written it, or the row is missing.

        `rowcount` is the cursor's, of an UPDATE that names one row by its key. Every number but 0 and 1 is refused, too: a
        newer holder may have written some of several rows.

        MySQL has to count the rows that were found, not those that were changed: `client_flag=CLIENT.FOUND_ROWS`, which
        SQLAlchemy and Django set.
        """
        pair = token_pair_of(lease)  # without its clock: the UPDATE has been executed, and its count decides
        name = resource_of(pair, resource)
        given: object = rowcount  # not every caller has types checked
        if given is None or (type(given) is int and given < 0):
            raise FencelockError(
                f"the driver does not say how many rows of {name!r} the UPDATE has found, so it is unknown whether the token "
                "was accepted. Roll back, and use the count of one single UPDATE",
                name,
            )
        if type(given) is not int:
            raise InvalidType(
                f"the number of rows that the UPDATE of {name!r} has found is needed, as cursor.rowcount gives it, not "
                f"{type(given).__name__}: it is unknown whether the token was accepted, so roll back"
            )
        if given > 1:
            raise FencelockError(
                f"the UPDATE has found {given} rows of {name!r}, and may have skipped rows that a newer holder has written: "
                "roll back, and update one row at a time, by its key",
                name,
            )
        if given == 0:
            raise StaleToken(
                f"{name!r} refused token {pair.token}: the UPDATE found no row, so a newer holder has written it, or the row "
                "is missing, or MySQL counts changed rows (it needs client_flag=CLIENT.FOUND_ROWS). Stop, look whether the "
                f"row exists, and acquire the lock again. {HINT}",
                name,
                token=pair.token,
            )
