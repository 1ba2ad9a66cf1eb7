"""Work on a connection of asyncio's that must not be forgotten: a check that nobody awaits has checked nothing."""

from __future__ import annotations

import warnings
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from fencelock.sqlio import AwaitedLink

T = TypeVar("T")


class Promised(Coroutine[Any, Any, T]):
    """Work to be awaited. Dropped before that, it has the connection refuse whatever comes next, and warns.

    A forgotten `await` drops it at once, before the statement that follows: so that one fails, instead of going past.
    """

    def __init__(self, work: Coroutine[Any, Any, T], to: AwaitedLink, what: str) -> None:
        self._work = work
        self._to = to
        self._what = what
        self._begun = False

    def __await__(self) -> Generator[Any, Any, T]:
        """Do it."""
        self._begun = True
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        """Do it step by step, as a task does."""
        self._begun = True
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """Have it end with an error."""
        self._begun = True
        return self._work.throw(*error)

    def close(self) -> None:
        """Give it up on purpose."""
        self._begun = True
        self._work.close()

    def __del__(self) -> None:
        if self._begun:
            return
        self._work.close()
        said = f"{self._what} was never awaited, so nothing was checked"
        try:
            self._to.refuse(f"{said}: write `await`, and begin anew with another connection")
            said += ": its connection refuses whatever comes next"
        except Exception as error:
            said += f", and its connection could not be closed ({error!r}): whatever comes next is not fenced"
        warnings.warn(f"{said}. Write `await`", RuntimeWarning, stacklevel=2)
