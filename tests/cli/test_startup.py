"""What a start imports. How long it takes is for `make bench`: machines are noisy, and no test asserts on a time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

SCRIPT = str(Path(sys.executable).with_name("fencelock"))
HEAVY = {
    "asyncio", "concurrent.futures", "dataclasses", "email", "importlib.resources", "inspect", "json", "logging",
    "pathlib", "random", "shutil", "socket", "subprocess", "tempfile", "traceback", "urllib.parse",
    "fencelock.aio", "fencelock.api", "fencelock.engines.memory", "fencelock.fences",
}  # fmt: skip


@pytest.fixture
def compiled(cli: Cli, tmp_path: Path) -> dict[str, str]:
    """An environment in which bytecode is compiled, whatever PYTHONDONTWRITEBYTECODE says outside."""
    environment = {**cli.env, "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def test_imports_no_more_than_it_needs(cli: Cli, compiled: dict[str, str]) -> None:
    """`fencelock run` on a free lock imports nothing heavy."""
    assert cli("run", "x", "--", "true").returncode == 0
    command = [sys.executable, "-X", "importtime", SCRIPT, "run", "x", "--", "true"]
    report = subprocess.run(command, env=compiled, capture_output=True, text=True, check=True).stderr
    imported = set(re.findall(r"\| +(\S+)$", report, re.MULTILINE))
    assert "sqlite3" in imported
    assert imported & HEAVY == set()
