"""Empty counters: on shared servers, in a folder, or behind a program that is started for one counter."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fences.counters import close, open_counter
from tests.support.processes import Child


@contextmanager
def object_store() -> Iterator[str]:
    """An S3 that obeys If-Match and If-None-Match, with a bucket."""
    import boto3

    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with Child.of_module("moto.server", "-H", "127.0.0.1", "-p", "0", **options) as server:
        assert server.process.stderr is not None
        address = next(line.split()[-1] for line in server.process.stderr if "Running on" in line)
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=address, **keys).create_bucket(Bucket="shop")
        yield address


def empty(kind: str, engines: Any, folder: Path, stack: ExitStack) -> str:
    """Return the address of an empty counter of this kind."""
    if kind in ("sqlite", "file"):
        address = str(folder / "stock")
    elif kind == "object":
        address = stack.enter_context(object_store())
    elif kind == "http":
        server = stack.enter_context(Child.of_module("tests.fences.wsgi_app", str(folder)))
        address = f"http://127.0.0.1:{server.read_line()}"
    else:
        engine = engines.get(kind)
        address = {"postgres": engine.url, "redis": f"redis://{engine.address}/9997"}.get(kind, engine.address)
    counter = open_counter(kind, address, fenced=False)
    if kind in ("postgres", "mariadb", "sqlite"):
        type(counter).prepare(counter.connection)
        counter.connection.close()
    elif kind == "redis":
        counter.client.flushdb()
        counter.client.close()
    elif kind == "etcd":
        counter.client.delete("stock")
        counter.client.delete_prefix("fencelock-fence/")
    elif kind == "zookeeper":
        for path in ("/stock", "/fencelock-fence"):
            counter.client.delete(path, recursive=True)
        close(counter)
    else:
        close(counter)
    return address


def counter_kinds(*names: str) -> list[Any]:
    servers = {"postgres", "mariadb", "redis", "etcd", "zookeeper"}
    return [pytest.param(name, marks=[pytest.mark.engine(name)] if name in servers else []) for name in names]
