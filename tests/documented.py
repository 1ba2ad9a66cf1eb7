"""The runner for the examples of the README and of all pages in docs/, and for the programs in examples/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import psycopg
import pytest

from fencelock.lockfree.schema import create_tables
from tests.servers.postgres import Postgres

ROOT = Path(__file__).parent.parent
SECONDS = 60
DATABASE = "documented"
SERVERS = {
    r"redis://localhost|redis\.Redis\(": "redis",
    r"redlock://h1": "redis_nodes",
    r"etcd://localhost|etcd3gw\.client\(": "etcd1",
    r"localhost:2181": "zookeeper1",
    r"postgresql://localhost": "postgres",
    r"mysql://root@localhost": "mariadb",
}
"""A pattern for the address that an example connects to, and the test server that replaces it."""
NO_OPEN_TRANSACTION = """

import sqlite3
from contextlib import suppress

with suppress(NameError, sqlite3.ProgrammingError):  # without a database, or with a closed one
    assert not (isinstance(db, sqlite3.Connection) and db.in_transaction), "the example leaves a transaction open"
"""


def pages() -> list[Path]:
    """Return the README and every page in docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str = "python") -> list[str]:
    """Return the code blocks of a page in one language; those in a list are indented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", page.read_text("utf-8"), re.M | re.S)
    return [dedent(block) for _, block in found]


def servers_of(page: Path) -> list[str]:
    """Return the servers that the examples of a page need."""
    code = "\n".join(blocks(page))
    return [server for pattern, server in SERVERS.items() if re.search(pattern, code)]


def pages_with_examples() -> list[Any]:
    """Return the pages that have examples, as parameters of a test that is marked with the servers which they need."""
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.engine(*servers_of(page))])
        for page in pages()
        if blocks(page)
    ]


def with_servers(block: str, servers: Mapping[str, Any]) -> str:
    """Return an example with the addresses of the tests' servers instead of "localhost"."""
    for name, server in servers.items():
        match name:
            case "redis":
                block = block.replace("localhost:6379", server.address).replace("port=6379", f"port={server.port}")
            case "redis_nodes":
                block = re.sub(r"redlock://h1[^/]*/0", server.url, block)
            case "etcd1":
                block = block.replace("localhost:2379", server.address).replace("port=2379", f"port={server.port}")
            case "zookeeper1":
                block = block.replace("localhost:2181", server.address)
            case "postgres":
                block = re.sub(r"postgresql://localhost/\w+", database_url(server), block)
            case "mariadb":
                block = block.replace("mysql://root@localhost/app", server.url)
    return block.replace('host="localhost"', 'host="127.0.0.1"')


def empty_database(server: Postgres) -> None:
    """Create the database of the examples again, empty but for the tables of the lock-free tools."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
        connection.execute(f"CREATE DATABASE {DATABASE}")
    with psycopg.connect(database_url(server)) as connection:
        create_tables(connection)


def database_url(server: Postgres) -> str:
    """Return the URL of the examples' database."""
    return f"{server.url.rpartition('/')[0]}/{DATABASE}"


def run(argv: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in its own folder; warnings are errors."""
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FENCELOCK_URL": f"sqlite:///{folder}/locks.db",
        "TMPDIR": str(folder),
        "PYTHONWARNINGS": "error",
        **environment,
    }
    return subprocess.run(argv, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS)


def run_python(code: str, folder: Path, **environment: str) -> str:
    """Run an example as a script, assert that it succeeds, and return what it printed."""
    script = folder / "example.py"
    script.write_text(code + NO_OPEN_TRANSACTION, "utf-8")
    done = run([sys.executable, str(script)], folder, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
