"""The code on the pages of docs/lockfree runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lockfree.databases import Database
from tests.servers.redis import Redis

PAGES = sorted((Path(__file__).parents[2] / "docs" / "lockfree").glob("*.md"))


def blocks(page: Path) -> list[str]:
    """Return the blocks of Python on a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_of_the_page_run(
    page: Path,
    redis_node: Redis,
    databases: Callable[[str], Database],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each block of Python runs by itself and leaves no transaction open; "localhost" is a server of ours."""
    monkeypatch.chdir(tmp_path)
    postgres = databases("postgresql")
    for block in blocks(page):
        block = block.replace("postgresql://localhost/shop", postgres.url)
        block = block.replace("redis.Redis(port=6379)", f"redis.Redis.from_url({redis_node.url!r})")
        namespace: dict[str, Any] = {"__name__": "page"}
        exec(compile(block, str(page), "exec"), namespace)
        if "db" in namespace:
            assert not namespace["db"].in_transaction  # which would keep others from writing
            namespace["db"].close()


def test_there_are_blocks() -> None:
    """Every page but the one that leads to the others shows how it is used."""
    assert {page.stem for page in PAGES if blocks(page)} == {page.stem for page in PAGES} - {"README"}
