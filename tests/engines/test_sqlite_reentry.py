"""A signal handler or a finalizer that uses the client in the middle of a transaction of its own thread."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fencelock
from fencelock.engines.sqlite import opening, queue
from fencelock.model import advance_queue


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[fencelock.Locks]:
    """A client."""
    with fencelock.connect(f"sqlite:///{tmp_path}/locks.db") as locks:
        yield locks


def test_handler_that_inspects(locks: fencelock.Locks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look from a signal handler, while the queue is being read, does not make the queue seem empty."""

    def interrupted(queue: Iterable[Any], now: float) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return advance_queue(queue, now)

    seen: list[object] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(locks.inspect("other")))
    try:
        with fencelock.connect(f"sqlite:///{tmp_path}/locks.db") as others, others.lock("x"):
            monkeypatch.setattr(queue, "advance_queue", interrupted)
            assert locks.lock("x").try_acquire() is None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen


def test_handler_while_opening(locks: fencelock.Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that comes while the database is being opened does not work on half of a connection."""
    layout_of = opening.layout_of
    refused: list[fencelock.EngineUnavailable] = []

    def interrupted(connection: Any, path: str) -> int:
        with pytest.raises(fencelock.EngineUnavailable, match="this very thread") as caught:
            locks.inspect("x")
        refused.append(caught.value)
        return layout_of(connection, path)

    monkeypatch.setattr(opening, "layout_of", interrupted)
    with locks.lock("x"):
        assert refused
