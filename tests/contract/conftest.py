"""Every test here runs for each engine and each runtime. Marks select engines; no test is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.engines import ENGINE_CASES, EngineCase
from tests.contract.factory import MakeClient
from tests.contract.runtimes import RUNTIMES, LocksView
from tests.contract.ttl_scale import TtlScale
from tests.servers.plugin import Session

MARKS = {"server", "processes", "fair", "shared", "limit", "records"}

CLIENT_SIDE = ("memory", "redis")
"""The engines for tests of what the client does by itself: one without a server and one with."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose engines and runtimes by the table and the marks."""
    if "case" in metafunc.fixturenames:
        needed = {mark.name for mark in metafunc.definition.iter_markers()} & MARKS
        engines = [case for case in ENGINE_CASES if all(getattr(case, need) for need in needed)]
        if metafunc.definition.get_closest_marker("client_side"):
            engines = [case for case in engines if case.id in CLIENT_SIDE]
        metafunc.parametrize(
            "case",
            [pytest.param(e, id=e.id, marks=[pytest.mark.engine(e.server)] if e.server else []) for e in engines],
        )
    if "runtime_name" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("runtime_name")
        metafunc.parametrize("runtime_name", mark.args if mark else RUNTIMES)


@pytest.fixture
def url(case: EngineCase, engines: Session, tmp_path: Path) -> str:
    """The URL of an engine of the test's own."""
    return case.url(None if case.server is None else engines.get(case.server), tmp_path)


@pytest.fixture
def ttl_scale(case: EngineCase) -> TtlScale:
    """The factor for ttls on the engine."""
    return TtlScale(case.ttl_scale, case.slack)


@pytest.fixture
def factory(url: str, runtime_name: str, ttl_scale: TtlScale) -> MakeClient:
    """Makes clients, engines and workers of the engine in a runtime."""
    return MakeClient(url, runtime_name, ttl_scale)


@pytest.fixture
def locks(factory: MakeClient) -> LocksView:
    """A client."""
    return factory.connect()
