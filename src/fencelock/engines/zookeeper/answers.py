"""Answers of kazoo's, and what is said for its errors: the one place where they are translated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kazoo.exceptions import (
    AuthFailedError,
    ConnectionLoss,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    OperationTimeoutError,
    RequestTimeoutError,
    SessionExpiredError,
    SessionMovedError,
    UnimplementedError,
    UnknownSessionError,
)

from fencelock.core.runtime import Event
from fencelock.errors import EngineUnavailable, FencelockError, OutcomeUnknown

UNANSWERED = (
    ConnectionLoss,
    OperationTimeoutError,
    RequestTimeoutError,
    SessionExpiredError,
    SessionMovedError,
    UnknownSessionError,
)


class Answer:
    """What an answer is put into, by whoever reads it; the first counts. It rings, if there is somebody to be woken."""

    __slots__ = ("_event", "_then", "done", "error", "value")

    def __init__(self, event: Event | None = None, then: Callable[[Answer], None] | None = None) -> None:
        self._event = event
        self._then = then
        self.done = False
        self.error: Exception | None = None
        self.value: Any = None

    def set(self, value: Any = None) -> None:
        """Take in what was asked for."""
        if not self.done:
            self.value = value
            self._ring()

    def set_exception(self, error: Exception) -> None:
        """Take in that it was refused, or that nobody knows."""
        if not self.done:
            self.error = error
            self._ring()

    def _ring(self) -> None:
        self.done = True
        if self._then is not None:
            self._then(self)
        if self._event is not None:
            self._event.set()

    @property
    def missing(self) -> bool:
        """Whether there is no such node."""
        return isinstance(self.error, NoNodeError)

    @property
    def existed(self) -> bool:
        """Whether the node was there already."""
        return isinstance(self.error, NodeExistsError)

    @property
    def heard(self) -> bool:
        """Whether the server has said anything, if only no."""
        return self.done and not isinstance(self.error, UNANSWERED)

    def get(self) -> Any:
        """Return what was asked for, or raise a FencelockError."""
        if self.error is not None:
            raise translate(self.error) from self.error
        return self.value


def translate(error: Exception) -> FencelockError:
    """Return what is said for an error of kazoo's."""
    if isinstance(error, UNANSWERED):
        return OutcomeUnknown("the connection to ZooKeeper broke, or its session ended, before the answer came")
    if isinstance(error, NoAuthError):
        return EngineUnavailable(
            "ZooKeeper refuses: no rights on this node; log in as whoever made the namespace (user:password@ in the URL)"
        )
    if isinstance(error, AuthFailedError):
        return EngineUnavailable("ZooKeeper refuses the login")
    if isinstance(error, UnimplementedError):
        return EngineUnavailable("this ZooKeeper does not know containers; 3.5 or later is needed")
    return EngineUnavailable(f"ZooKeeper refuses: {type(error).__name__.removesuffix('Error')} {error}".rstrip())
