"""A database of each kind for all tests of this folder; each test uses its own keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fencelock.model import new_id
from tests.lockfree.databases import KINDS, NAMES, Database, children
from tests.servers.mariadb import MariaDB
from tests.servers.plugin import Session
from tests.servers.postgres import Postgres
from tests.support.processes import Child

SERVERS = {"postgresql": "postgres", "mariadb": "mariadb"}


def _marked(name: str, *values: Any) -> Any:
    marks = [pytest.mark.engine(SERVERS[name])] if name in SERVERS else []
    return pytest.param(*values, marks=marks, id="-".join(map(str, values)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that need a database on each of them, and tests that need a connection with each kind."""
    given = {mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")}
    if given & {"on", "kind"}:
        return
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize(("on", "kind"), [_marked(name, name, kind) for name, kind in KINDS])
    elif "on" in metafunc.fixturenames:
        metafunc.parametrize("on", [_marked(name, name) for name in NAMES])


def _own(engines: Session, name: str) -> str:
    """Return the URL of a database for these tests, on the shared server."""
    server = engines.get(SERVERS[name])
    assert isinstance(server, Postgres | MariaDB)
    server.query("CREATE DATABASE lockfree")
    return server.url.rpartition("/")[0] + "/lockfree"


@pytest.fixture(scope="session")
def databases(engines: Session, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Database]:
    """Returns the database of a kind, created at first use."""
    made: dict[str, Database] = {}
    folder: Path = tmp_path_factory.mktemp("lockfree")

    def give(name: str) -> Database:
        if name not in made:
            made[name] = Database(name, f"sqlite:///{folder}/app.db" if name == "sqlite" else _own(engines, name))
        return made[name]

    return give


@pytest.fixture
def database(databases: Callable[[str], Database], on: str) -> Database:
    """The database."""
    return databases(on)


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return new_id()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts processes, and kills them at the end of the test."""
    with children() as make:
        yield make
