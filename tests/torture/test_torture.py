"""A short run of the torture test; `make torture` runs for minutes."""

from __future__ import annotations

from pathlib import Path

from fencelock.sim.check import Invariants, check, resource
from tests.torture.director import TTL, Torture


def test_fenced_workers_lose_nothing(tmp_path: Path) -> None:
    """While workers are stopped and killed at random, exclusion holds, tokens rise, and no accepted write is lost."""
    torture = Torture(f"sqlite:///{tmp_path}/locks.db", tmp_path, fenced=True, seed=1)

    def enough() -> bool:
        return len(torture.killed) >= 5 and len(torture.history.notes) >= 40 and len(torture.accepted()) >= 100

    history = torture.run(seconds=80, enough=enough)
    assert enough()
    assert any(note.what.startswith("stopped") for note in history.notes)
    assert check(history, Invariants(order=False, clean=False, ttl=TTL)) == []
    assert history.writes[-1].value == len(history.writes)


def test_without_the_fence_the_checker_catches_the_loss(tmp_path: Path) -> None:
    """Without the fence a stopped worker overwrites a newer value sooner or later, and the checker reports it."""
    torture = Torture(f"sqlite:///{tmp_path}/locks.db", tmp_path, fenced=False, seed=2)
    history = torture.run(seconds=60, enough=lambda: bool(list(resource(torture.accepted()))))
    assert {violation.check for violation in check(history, Invariants(order=False, clean=False, ttl=TTL))} == {
        "resource"
    }
