"""Every test here runs for each engine and each colour. Marks narrow that; nothing is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.colours import COLOURS, LocksView
from tests.contract.engines import ENGINES, Engine
from tests.contract.pace import Pace
from tests.contract.subject import Subject
from tests.engines.plugin import Session

MARKS = {"server", "processes", "fair", "shared", "limit", "records"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose engines and colours by the table and the marks."""
    if "engine" in metafunc.fixturenames:
        needed = {mark.name for mark in metafunc.definition.iter_markers()} & MARKS
        engines = [engine for engine in ENGINES if all(getattr(engine, need) for need in needed)]
        metafunc.parametrize(
            "engine",
            [pytest.param(e, id=e.id, marks=[pytest.mark.engine(e.server)] if e.server else []) for e in engines],
        )
    if "colour" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("colour")
        metafunc.parametrize("colour", mark.args if mark else COLOURS)


@pytest.fixture
def url(engine: Engine, engines: Session, tmp_path: Path) -> str:
    """The URL of an engine of the test's own."""
    return engine.url(None if engine.server is None else engines.get(engine.server), tmp_path)


@pytest.fixture
def pace(engine: Engine) -> Pace:
    """What a test's times mean on the engine."""
    return Pace(engine.pace, engine.slack)


@pytest.fixture
def subject(url: str, colour: str, pace: Pace) -> Subject:
    """The engine in a colour."""
    return Subject(url, colour, pace)


@pytest.fixture
def locks(subject: Subject) -> LocksView:
    """A client."""
    return subject.connect()
