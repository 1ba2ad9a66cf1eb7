"""Eight processes, stopped and killed at random, add to one value: a short run; `make torture` does 10,000 on each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fences.counter_servers import counter_kinds
from tests.fences.increments import mistakes

GOAL = 100


@pytest.mark.parametrize("kind", counter_kinds("postgres", "mariadb", "sqlite", "redis"))
def test_no_increment_is_lost_or_repeated(kind: str, address: str, tmp_path: Path) -> None:
    """Every increment that the resource has accepted was made from the one before it."""
    command = [sys.executable, "-m", "tests.fences.increments", kind, address, str(tmp_path), str(GOAL), "1"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 0


@pytest.mark.parametrize(
    ("log", "final", "said"),
    [
        ([(1, 0, 1), (2, 0, 1)], 1, "0 became 1 after 1"),
        ([(1, 0, 1), (2, 1, 3)], 3, "1 became 3"),
        ([(2, 0, 1), (1, 1, 2)], 2, "an older token"),
        ([(1, 0, 1), (2, 1, 2)], 1, "the value is 1 after 2"),
    ],
)
def test_checker_reports_mistakes(log: list[tuple[int, int, int]], final: int, said: str) -> None:
    """The checker finds a lost update, a wrong update, tokens in the wrong order and a wrong final value."""
    assert any(said in mistake for mistake in mistakes(log, final))
    assert mistakes([(1, 0, 1), (1, 1, 2), (3, 2, 3)], 3) == []
