"""The README's code blocks are run as they stand, in a folder of the test's own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import fencelock
from scripts import api_page
from tests.engines.postgres_server import empty
from tests.servers.etcd import Etcd
from tests.servers.mariadb import MariaDB
from tests.servers.postgres import Postgres
from tests.servers.redis import Redis

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
REDIS_PAGE, POSTGRES_PAGE, MYSQL_PAGE, ETCD_PAGE = (
    (ROOT / f"docs/engines/{name}.md").read_text("utf-8") for name in ("redis", "postgres", "mysql", "etcd")
)


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FENCELOCK_URL": f"sqlite:///{folder}/locks.db",
        "PYTHONWARNINGS": "error",
    }
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def run_block(block: str, folder: Path) -> None:
    """Run a block as a script, and assert that it succeeds."""
    script = folder / "block.py"
    script.write_text(block, "utf-8")
    done = run([sys.executable, str(script)], folder)
    assert done.returncode == 0, done.stderr


def test_there_are_blocks_to_run() -> None:
    """The README shows a lock in each colour, the fence and the command line."""
    assert len(blocks("python")) >= 3
    assert any("fencelock run" in block for block in blocks("sh"))


@pytest.mark.parametrize("block", blocks("python") + blocks("python", REDIS_PAGE))
def test_python_block(block: str, redis_node: Redis, tmp_path: Path) -> None:
    """Each Python block of the README, and of Redis's page, runs without a warning; "localhost" is a server of ours."""
    block = block.replace("localhost:6379", redis_node.address).replace("port=6379", f"port={redis_node.port}")
    run_block(block, tmp_path)


@pytest.mark.parametrize("block", blocks("python", POSTGRES_PAGE))
def test_postgres_block(block: str, postgres: Postgres, tmp_path: Path) -> None:
    """Each Python block of PostgreSQL's page runs without a warning."""
    run_block(block.replace("postgresql://localhost/app", empty(postgres).url), tmp_path)


@pytest.mark.parametrize("block", blocks("python", MYSQL_PAGE))
def test_mysql_block(block: str, mariadb: MariaDB, tmp_path: Path) -> None:
    """Each Python block of MySQL's page runs without a warning."""
    run_block(block.replace("mysql://root@localhost/app", mariadb.url), tmp_path)


@pytest.mark.parametrize("block", blocks("python", ETCD_PAGE))
def test_etcd_block(block: str, etcd1: Etcd, tmp_path: Path) -> None:
    """The example of etcd's page runs; "localhost" is a server of ours."""
    run_block(block.replace("localhost:2379", etcd1.address), tmp_path)


def test_command_line_block(tmp_path: Path) -> None:
    """Each `fencelock` command of the README works, one after the other, in one folder."""
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("fencelock ")]
    assert len(lines) >= 4
    for line in lines:
        done = run(shlex.split(line.removesuffix("&")), tmp_path)
        assert done.returncode == 0, f"{line}: {done.stderr}"


def test_make_targets_exist() -> None:
    """Every `make` command that the README and CONTRIBUTING name is a target, with a line of help."""
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", README + (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M))
    helped = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.M))
    assert {"demo", "test", "lint", "bench"} <= named & helped
    assert named <= helped


def test_links_lead_somewhere() -> None:
    """Every relative link in the README and in docs/ names a file that is there."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_api_page() -> None:
    """docs/api.md has every public name, as the docstrings tell it: `make docs` writes it anew."""
    named = {name for names in api_page.CHAPTERS.values() for name in names}
    assert named == set(fencelock.__all__)
    assert api_page.PAGE.read_text("utf-8") == api_page.page(), "make docs"


def test_files_that_the_docs_name_exist() -> None:
    """Every source file that the README or a page names is there, at the end of the path that it gives."""
    folders = ("src", "tests", "bench", "demo", "scripts")
    files = [f"/{file.relative_to(ROOT)}" for folder in folders for file in (ROOT / folder).rglob("*.*")]
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"`([\w/]+\.(?:py|lua|sql))(?:::\w+)?`", page.read_text("utf-8")):
            assert any(file.endswith(f"/{name}") for file in files), f"{page.name} names {name}"
