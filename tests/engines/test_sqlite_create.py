"""Processes that create one database at the same moment."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fencelock
from fencelock.engines.sqlite.opening import LAYOUT, layout_of


class Raced:
    """A connection that another process overtakes after so many statements."""

    def __init__(self, connection: sqlite3.Connection, path: Path, after: int) -> None:
        self._connection = connection
        self._path = path
        self._left = after

    def execute(self, statement: str) -> Any:
        """Run the statement, and let the other process create the database if it is time."""
        rows = self._connection.execute(statement).fetchall()
        self._left -= 1
        if self._left == 0:
            with fencelock.connect(f"sqlite:///{self._path}") as locks:
                locks.inspect("x")
        return iter_of(rows)


def iter_of(rows: list[Any]) -> Any:
    """Return something to fetch the first row from."""
    return type("Rows", (), {"fetchone": lambda self: rows[0]})()


@pytest.mark.parametrize("after", [1, 2, 3])
def test_created_while_it_is_looked_at(tmp_path: Path, after: int) -> None:
    """A database that another process creates between two looks is new or ours, never somebody else's."""
    path = tmp_path / "locks.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        raced: Any = Raced(connection, path, after)
        assert layout_of(raced, str(path)) in (0, LAYOUT)
