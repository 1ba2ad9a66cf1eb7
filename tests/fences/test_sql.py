"""The SQL fence, and the token pair of a command under `fencelock run`."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fencelock
from fencelock import FencelockError, StaleToken
from fencelock.fences import TokenPair, from_environ
from fencelock.fences.sql import SqlFence

LEASE = SimpleNamespace(token=34, id="a")


@pytest.fixture
def database() -> Iterator[sqlite3.Connection]:
    """The application's database."""
    connection = sqlite3.connect(":memory:")
    yield connection
    connection.close()


@pytest.mark.parametrize("thing", [None, "app.db", sqlite3, object()])
def test_not_a_connection(thing: Any) -> None:
    """Anything but a connection is refused, and the message lists what is supported."""
    with pytest.raises(TypeError, match=r"a connection or a cursor is needed, of sqlite3, psycopg, .*, not "):
        SqlFence().check(thing, LEASE, "x")
    with pytest.raises(TypeError, match=r"a connection or a cursor is needed, of sqlite3, psycopg, .*, not "):
        SqlFence().rebase(thing, "x", 5, reason="why")


@pytest.mark.parametrize(
    "lease",
    [
        None,
        34,
        SimpleNamespace(token=34),
        SimpleNamespace(id="a"),
        SimpleNamespace(token="34", id="a"),
        SimpleNamespace(token=True, id="a"),
        SimpleNamespace(token=34, id=None),
    ],
)
def test_not_a_lease(database: sqlite3.Connection, lease: Any) -> None:
    """An object without a token or an id is refused before the first statement."""
    with pytest.raises(TypeError, match=r"token \(int\) and an id \(str\)"):
        SqlFence().check(database, lease, "x")
    assert not database.in_transaction


def test_wrong_types_are_named(database: sqlite3.Connection) -> None:
    """The error shows a token of the wrong type."""
    with pytest.raises(TypeError, match=r"not TokenPair with the token '34' and the id 'a': convert"):
        SqlFence().check(database, TokenPair("34", "a"), "x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^a token is an int such as 34, not '3' \(str\)$"):
        SqlFence().rebase(database, "x", "3", reason="why")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^a token is an int such as 34, not 2.0 \(float\)$"):
        SqlFence().prune(database, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nanoseconds"):
        SqlFence().prune(database, 2**60)


def test_log_of_prune_has_the_min_token_in_force(
    database: sqlite3.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """After prune with a lower min_token, the log has the one in force."""
    with caplog.at_level("INFO", "fencelock.fences"), database:
        SqlFence().prune(database, 5)
        SqlFence().prune(database, 2)
    assert [record.getMessage().partition("; ")[2] for record in caplog.records] == [
        "tokens below 5 are refused from now on"
    ] * 2


def test_prune_in_a_block_leaves_no_transaction_open(tmp_path: Path) -> None:
    """Prune in a block that commits, with or without marks to remove, blocks no other writer."""
    pruner, other = (sqlite3.connect(tmp_path / "app.db", timeout=0) for _ in range(2))
    with other:
        SqlFence().check(other, LEASE, "x")
    for removed in (1, 0):
        with pruner:
            assert SqlFence().prune(pruner, 1000) == removed
        assert not pruner.in_transaction
        with other:
            SqlFence().check(other, SimpleNamespace(token=1000 + removed, id="a"), f"y{removed}")
    pruner.close()
    other.close()


@pytest.mark.parametrize(("token", "id"), [(-1, "a"), (2**53, "a"), (34, ""), (34, "a\0b"), (34, "ä" * 200)])
def test_invalid_tokens_and_ids_are_refused(database: sqlite3.Connection, token: int, id: str) -> None:
    """Tokens and ids that some database could not store exactly are refused."""
    with pytest.raises(ValueError, match=r"a token is a number|the id of a claim is"):
        SqlFence().check(database, SimpleNamespace(token=token, id=id), "x")


def test_lock_is_not_a_lease(database: sqlite3.Connection) -> None:
    """A lock in place of its lease is refused, and the message says where to get the lease."""
    with fencelock.connect("memory://fence-types") as locks, pytest.raises(TypeError, match=r"not Lock: .*acquire"):
        SqlFence().check(database, locks.lock("x"), "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("resource", "error"),
    [
        ("", ValueError),
        ("a\0b", ValueError),
        ("x" * 1025, ValueError),
        (None, TypeError),
        (42, TypeError),
        (b"x", TypeError),
    ],
)
def test_not_a_resource(database: sqlite3.Connection, resource: Any, error: type[Exception]) -> None:
    """A resource is a str that is not empty."""
    with pytest.raises(error, match="resource must"):
        SqlFence().check(database, LEASE, resource)
    with pytest.raises(error, match="resource must"):
        SqlFence().rebase(database, resource, 5, reason="why")


def test_from_environ(database: sqlite3.Connection) -> None:
    """A fence takes the token pair that `fencelock run` put into the environment in place of a lease."""
    mine = from_environ({"FENCELOCK_TOKEN": "34", "FENCELOCK_ID": "a", "FENCELOCK_NAME": "x", "OTHER": "y"})
    assert mine == TokenPair(34, "a", "x")
    with database:
        SqlFence().check(database, mine)
    with pytest.raises(StaleToken), database:
        SqlFence().check(database, from_environ({"FENCELOCK_TOKEN": "33", "FENCELOCK_ID": "b"}), "x")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "^FENCELOCK_TOKEN and FENCELOCK_ID are not set"),
        ({"FENCELOCK_TOKEN": "34"}, "^FENCELOCK_ID is not set"),
        ({"FENCELOCK_TOKEN": "", "FENCELOCK_ID": "a"}, "^FENCELOCK_TOKEN is not set"),
        ({"FENCELOCK_TOKEN": "x", "FENCELOCK_ID": "a"}, "not a number"),
        ({"FENCELOCK_TOKEN": "-3", "FENCELOCK_ID": "a"}, "not a number"),
    ],
)
def test_from_environ_without_fencelock_run(environ: dict[str, str], message: str) -> None:
    """Without `fencelock run` the error says how to start the command."""
    with pytest.raises(FencelockError, match=message):
        from_environ(environ)


def test_from_environ_under_fencelock_run(tmp_path: Path) -> None:
    """The snippet of docs/cli.md works in a command under `fencelock run`."""
    (snippet,) = [
        block.partition("```")[0]
        for block in (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8").split("```python\n")[1:]
        if "from_environ" in block
    ]
    program = (
        "import sqlite3\n"
        f"db = sqlite3.connect({str(tmp_path / 'app.db')!r})\n"
        "db.execute('CREATE TABLE IF NOT EXISTS report (day TEXT)')\n" + snippet
    )
    url = f"sqlite:///{tmp_path}/locks.db"
    command = [sys.executable, "-m", "fencelock", "run", "report", "--url", url, "--", sys.executable, "-c", program]
    for _ in range(2):
        subprocess.run(command, check=True, timeout=60)
    database = sqlite3.connect(tmp_path / "app.db")
    assert database.execute("SELECT count(*) FROM report").fetchone() == (2,)
    assert database.execute("SELECT resource FROM fencelock_fence").fetchall() == [("report",)]
    database.close()
