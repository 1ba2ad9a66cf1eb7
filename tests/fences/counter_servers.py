"""Where empty stocks are: on servers that all tests share, in a folder, or behind a program that is started for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fences.counters import close, open_counter

ROOT = Path(__file__).parents[2]


class Process:
    """A program that gets its commands line by line."""

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, "-m", *argv]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self.first = self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")

    def ask(self, word: str) -> str:
        self.tell(word)
        return self.answer()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def object_store() -> Iterator[str]:
    """An S3 that obeys If-Match and If-None-Match, with a bucket."""
    import boto3

    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        address = next(line.split()[-1] for line in process.stderr if "Running on" in line)
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=address, **keys).create_bucket(Bucket="shop")
        yield address
    finally:
        process.kill()
        process.communicate()


def empty(kind: str, engines: Any, folder: Path, stack: ExitStack) -> str:
    """Return the address of an empty counter of this kind."""
    if kind in ("sqlite", "file"):
        address = str(folder / "stock")
    elif kind == "object":
        address = stack.enter_context(object_store())
    elif kind == "http":
        web = Process("tests.fences.wsgi_app", str(folder))
        stack.callback(web.close)
        address = f"http://127.0.0.1:{web.first}"
    else:
        engine = engines.get(kind)
        address = {"postgres": engine.url, "redis": f"redis://{engine.address}/9997"}.get(kind, engine.address)
    stock = open_counter(kind, address, fenced=False)
    if kind in ("postgres", "mariadb", "sqlite"):
        type(stock).prepare(stock.connection)
        stock.connection.close()
    elif kind == "redis":
        stock.client.flushdb()
        stock.client.close()
    elif kind == "etcd":
        stock.client.delete("stock")
        stock.client.delete_prefix("fencelock-fence/")
    elif kind == "zookeeper":
        for path in ("/stock", "/fencelock-fence"):
            stock.client.delete(path, recursive=True)
        close(stock)
    else:
        close(stock)
    return address


def counter_kinds(*names: str) -> list[Any]:
    servers = {"postgres", "mariadb", "redis", "etcd", "zookeeper"}
    return [pytest.param(name, marks=[pytest.mark.engine(name)] if name in servers else []) for name in names]
