"""Base classes of what a `with` block closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closable(ABC):
    """Something that is closed at the end of a `with`."""

    @abstractmethod
    def close(self) -> None:
        """End it and leave nothing behind."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Startable(Closable):
    """Something that is also started at the beginning of a `with`."""

    @abstractmethod
    def start(self) -> None:
        """Start it and wait until it serves; nothing happens to what already runs."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self
