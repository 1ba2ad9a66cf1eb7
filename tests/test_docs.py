"""The examples of the README and the docs run unchanged, and the files and commands that the pages name exist."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import fencelock
from scripts import api_page
from tests.documented import (
    ROOT,
    blocks,
    empty_database,
    pages,
    pages_with_examples,
    run,
    run_python,
    servers_of,
    with_servers,
)
from tests.fences.counter_servers import object_store

README = ROOT / "README.md"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TESTED_ELSEWHERE = {"docs/api.md", "docs/cli.md"}
"""Docstrings, and an example that runs under `fencelock run`."""
STORE_KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.mark.parametrize("page", [page for page in pages_with_examples() if page.id not in TESTED_ELSEWHERE])
def test_python_blocks_run(page: Path, engines: Any, tmp_path: Path) -> None:
    """Each Python block of a page runs without a warning; "localhost" stands for a server of the tests."""
    servers = {name: engines.get(name) for name in servers_of(page)}
    if "postgres" in servers:
        empty_database(servers["postgres"])
    environment: dict[str, str] = {}
    with ExitStack() as stack:
        if "boto3" in page.read_text("utf-8"):
            store = stack.enter_context(object_store())
            environment = {**STORE_KEYS, "AWS_ENDPOINT_URL": store, "PYTHONWARNINGS": ""}
        for block in blocks(page):
            run_python(with_servers(block, servers), tmp_path, **environment)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_program_runs(example: Path, tmp_path: Path) -> None:
    """Each program in examples/ runs without a server, ends, and prints what it did."""
    done = run([sys.executable, str(example)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_pages_have_examples() -> None:
    """The README and every page of an engine, a primitive, a fence or a lock-free tool has an example."""
    tested = {page.id for page in pages_with_examples()}
    folders = ("engines", "primitives", "fences", "lockfree")
    for page in [README, *(page for folder in folders for page in (ROOT / "docs" / folder).glob("[!R]*.md"))]:
        assert str(page.relative_to(ROOT)) in tested


def test_why_fences_links_every_fence() -> None:
    """The page "why fences" links the page of every fence."""
    why = (ROOT / "docs/why-fences.md").read_text("utf-8")
    for page in (ROOT / "docs/fences").glob("*.md"):
        assert f"(fences/{page.name})" in why


def test_commands_of_the_readme_run(tmp_path: Path) -> None:
    """Each `fencelock` command of the README succeeds, one after the other, in one folder."""
    lines = [line for block in blocks(README, "sh") for line in block.splitlines() if line.startswith("fencelock ")]
    assert len(lines) >= 4
    for line in lines:
        done = run(shlex.split(line), tmp_path)
        assert done.returncode == 0, f"{line}: {done.stderr}"


def test_make_targets_exist() -> None:
    """Every `make` command that the README and CONTRIBUTING name is a target with a help text."""
    text = README.read_text("utf-8") + (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.M))
    helped = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.M))
    assert {"demo", "test", "lint", "bench"} <= named & helped
    assert named <= helped


def test_links_point_to_existing_files() -> None:
    """Every relative link of a page names a file that exists."""
    for page in pages():
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_api_page() -> None:
    """docs/api.md has every public name, with the text of its docstring: `make docs` writes it."""
    named = {name for names in api_page.CHAPTERS.values() for name in names}
    assert named == set(fencelock.__all__)
    assert api_page.PAGE.read_text("utf-8") == api_page.page(), "make docs"


def test_errors_are_documented() -> None:
    """The page on error handling has every error and every reason of a loss."""
    page = (ROOT / "docs/error-handling.md").read_text("utf-8")
    things = [getattr(fencelock, name) for name in fencelock.__all__]
    errors = {thing.__name__ for thing in things if isinstance(thing, type) and issubclass(thing, Exception)}
    for name in errors | {reason.value for reason in fencelock.LossReason}:
        assert f"`{name}`" in page, name


def test_files_that_the_docs_name_exist() -> None:
    """Every source file that a page names exists, at the end of the path that it gives."""
    folders = ("src", "tests", "bench", "demo", "scripts", "examples")
    files = [f"/{file.relative_to(ROOT)}" for folder in folders for file in (ROOT / folder).rglob("*.*")]
    for page in pages():
        for name in re.findall(r"`([\w/]+\.(?:py|lua|sql))(?:::\w+)?`", page.read_text("utf-8")):
            if "NAME" not in name:  # a placeholder
                assert any(file.endswith(f"/{name}") for file in files), f"{page.name} names {name}"
