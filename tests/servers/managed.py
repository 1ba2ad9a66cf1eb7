"""Base classes of objects that a `with` block starts and closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closable(ABC):
    """An object that is closed at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """End it, and remove its processes and files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Startable(Closable):
    """An object that is also started at the beginning of a `with` block."""

    @abstractmethod
    def start(self) -> None:
        """Start it and wait until it serves; do nothing if it runs."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self
