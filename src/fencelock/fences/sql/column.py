"""The column form of the SQL fence: the token is kept in the row that it guards, for teams without a second table."""

from __future__ import annotations

import re
from typing import NamedTuple

from fencelock.errors import FencelockError, InvalidArgument, InvalidType, StaleToken
from fencelock.fences import Fenced
from fencelock.fences.core import bearer, resource_of

_PLACES = {"qmark": "?", "format": "%s", "numeric_dollar": "", "named": ":{}", "pyformat": "%({})s"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")


class Clause(NamedTuple):
    """Two pieces of an UPDATE, and their arguments: in order for places, or by name."""

    set: str
    where: str
    set_args: tuple[int | str, ...]
    where_args: tuple[int | str, ...]
    named: dict[str, int | str]


class FenceColumn:
    """Makes the clauses of an UPDATE that a stale holder's changes nothing.

    Two columns of the row: one for the token (`BIGINT NOT NULL DEFAULT 0`) and one for the owner's id
    (`VARCHAR(255) NOT NULL DEFAULT ''`; on MySQL `VARBINARY(255)`, as a collation may take two owners for one). Run the
    UPDATE once before the first read, with nothing else to set, and with every write: a token that is only compared when it
    writes lets an older one write between its read and its write.

    >>> import sqlite3, types
    >>> lease = types.SimpleNamespace(token=34, id="b", name="apple")
    >>> db = sqlite3.connect(":memory:")
    >>> _ = db.execute("CREATE TABLE stock (sku TEXT, n INTEGER, fence INTEGER DEFAULT 0, fence_id TEXT DEFAULT '')")
    >>> _ = db.execute("INSERT INTO stock (sku, n) VALUES ('apple', 100)")
    >>> column = FenceColumn("fence", "fence_id", paramstyle="qmark")
    >>> mine = column.clause(lease)
    >>> mine.set, mine.where
    ('fence = ?, fence_id = ?', "(fence IS NULL OR fence < ? OR (fence = ? AND fence_id IN (?, '')))")
    >>> enter = f"UPDATE stock SET {mine.set} WHERE sku = ? AND {mine.where}"
    >>> column.check(db.execute(enter, (*mine.set_args, "apple", *mine.where_args)).rowcount, lease)
    >>> n, = db.execute("SELECT n FROM stock WHERE sku = 'apple'").fetchone()
    >>> write = f"UPDATE stock SET n = ?, {mine.set} WHERE sku = ? AND {mine.where}"
    >>> column.check(db.execute(write, (n - 5, *mine.set_args, "apple", *mine.where_args)).rowcount, lease)
    >>> FenceColumn("fence", "fence_id", paramstyle="pyformat").clause(lease).set
    'fence = %(fence_token)s, fence_id = %(fence_owner)s'
    >>> db.close()
    """

    def __init__(self, token: str = "fence", id: str = "fence_id", *, paramstyle: str) -> None:
        for name in (token, id):
            if not _NAME.fullmatch(name):
                raise InvalidArgument(
                    f"{name!r:.60} is not the name of a column: it becomes part of the statement as it stands"
                )
        if paramstyle not in _PLACES or paramstyle == "numeric_dollar":
            raise InvalidArgument(
                f"paramstyle must be qmark, format, named or pyformat, as the driver's own; not {paramstyle!r}"
            )
        self._token = token
        self._id = id
        self._place = _PLACES[paramstyle]

    def clause(self, lease: Fenced) -> Clause:
        """Return what to put after SET and after WHERE, with its arguments."""
        mine = bearer(lease)
        token, owner = self._place.format("fence_token"), self._place.format("fence_owner")
        same = f"{self._token} = {token} AND {self._id} IN ({owner}, '')"
        return Clause(
            f"{self._token.rpartition('.')[2]} = {token}, {self._id.rpartition('.')[2]} = {owner}",
            f"({self._token} IS NULL OR {self._token} < {token} OR ({same}))",
            (mine.token, mine.id),
            (mine.token, mine.token, mine.id),
            {"fence_token": mine.token, "fence_owner": mine.id},
        )

    def check(self, rowcount: int, lease: Fenced, resource: str | None = None) -> None:
        """Raise StaleToken if the UPDATE found no row: a newer holder has been there, or the row is missing.

        `rowcount` is the cursor's, of an UPDATE that names one row by its key: anything but 0 and 1 is refused, too, as
        some of several rows may be a newer holder's.

        MySQL has to count the rows that were found, not those that were changed: `client_flag=CLIENT.FOUND_ROWS`, which
        SQLAlchemy and Django set by themselves.
        """
        mine = bearer(lease)
        name = resource_of(mine, resource)
        given: object = rowcount  # not everybody has types checked
        if given is None or (type(given) is int and given < 0):
            raise FencelockError(
                f"the driver does not say how many rows of {name!r} the UPDATE has found: so nobody knows whether the "
                "token was let in. Roll back, and ask it for the count of one single UPDATE",
                name,
            )
        if type(given) is not int:
            raise InvalidType(
                f"the number of rows that the UPDATE of {name!r} has found is needed, as cursor.rowcount gives it, not "
                f"{type(given).__name__}: nobody knows whether the token was let in, so roll back"
            )
        if given > 1:
            raise FencelockError(
                f"the UPDATE has found {given} rows of {name!r}, and perhaps left out others that a newer holder has "
                "written: roll back, and update one row at a time, by its key",
                name,
            )
        if given == 0:
            raise StaleToken(
                f"{name!r} refused token {mine.token}: the UPDATE found no row, so a newer holder has been here, or the row "
                "is missing, or MySQL counts what was changed (it needs client_flag=CLIENT.FOUND_ROWS). Stop, look whether "
                "the row is there, and acquire anew",
                name,
                token=mine.token,
            )
