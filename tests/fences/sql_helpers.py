"""Helpers for the tests of the SQL fence on real servers: plain statements, and functions in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from fencelock.fences.sql import SqlFence

SERVERS = ("postgres", "mariadb")
FENCE = SqlFence()


class Connect(Protocol):
    """Opens a connection."""

    def __call__(self, **options: Any) -> Any: ...


def run(connection: Any, sql: str, *args: Any) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(sql, args)
        return [] if cursor.description is None else list(cursor.fetchall())


def stock(connection: Any) -> int:
    ((n,),) = run(connection, "SELECT n FROM stock")
    return int(n)


class InThread:
    """A function that runs in a thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.outcome: Any = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._work()
        except BaseException as error:
            self.outcome = error

    def waits(self) -> bool:
        self._thread.join(0.3)
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.outcome
