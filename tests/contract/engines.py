"""The engines that the contract suite runs on. A new engine joins by adding one line to ENGINES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Engine:
    """How the suite gets at an engine."""

    id: str
    url: Callable[[Path], str]
    """Return the URL of an engine that nobody else uses, given a folder of the test's own."""
    processes: bool = True
    """Whether other processes can reach it; the tests that need a second process are for those engines only."""


ENGINES = [
    Engine("memory", lambda folder: f"memory://{folder.parent.name}-{folder.name}", processes=False),
    Engine("sqlite", lambda folder: f"sqlite://{folder}/locks.db"),
]
