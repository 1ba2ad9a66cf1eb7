"""The code on the pages of the fences runs as it stands, with servers of ours for "localhost"."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines.postgres_server import connected, empty
from tests.fences.counter_servers import object_store
from tests.servers.postgres import Postgres

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*sorted((DOCS / "fences").glob("*.md")), DOCS / "moving-to-another-engine.md"]
SERVERS = {"sql": "postgres", "redis": "redis", "etcd": "etcd", "zookeeper": "zookeeper"}


def pages() -> list[Any]:
    return [
        pytest.param(page, id=page.stem, marks=[pytest.mark.engine(SERVERS[page.stem])] if page.stem in SERVERS else [])
        for page in PAGES
    ]


@pytest.mark.parametrize("page", pages())
def test_python_blocks_of_the_page_run(page: Path, engines: Any, tmp_path: Path) -> None:
    """Each Python block of a page runs without a warning."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    assert blocks
    environment = {**os.environ, "FENCELOCK_URL": f"sqlite:///{tmp_path}/locks.db", "PYTHONWARNINGS": "error"}
    with ExitStack() as stack:
        server = engines.get(SERVERS[page.stem]) if page.stem in SERVERS else None
        if isinstance(server, Postgres):
            empty(server)  # tests before this one may have left a schema of another release
            _drop_tables(server)  # or tables of these names
            stack.callback(_drop_tables, server)  # a min_token would refuse the small tokens of other tests
        if page.stem == "objects":
            keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
            environment |= {**keys, "AWS_ENDPOINT_URL": stack.enter_context(object_store()), "PYTHONWARNINGS": ""}
        for block in blocks:
            if server is not None:
                block = block.replace("postgresql://localhost/shop", server.url)
                block = re.sub(r'host="localhost", port=\d+', f'host="{server.host}", port={server.port}', block)
                block = block.replace("localhost:2181", server.address)
            done = subprocess.run(
                [sys.executable, "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr


def _drop_tables(server: Postgres) -> None:
    with connected(server) as connection:
        connection.execute("DROP TABLE IF EXISTS stock, fencelock_fence")


def test_every_fence_has_a_page() -> None:
    """The page on why lists every fence's page."""
    why = (DOCS / "why-fences.md").read_text("utf-8")
    for page in (DOCS / "fences").glob("*.md"):
        assert f"(fences/{page.name})" in why
