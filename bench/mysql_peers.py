"""The contestants on MariaDB: fencelock, the bare statements over PyMySQL, and tooz. Each makes its lock from a URL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

import pymysql

import fencelock
from fencelock import aio

SEQUENCE = "bench_tokens"
"""The sequence from which the bare statements take their tokens."""


def connection(url: str) -> Any:
    parts = urlsplit(url)
    made = pymysql.connect(
        host=parts.hostname, port=parts.port or 3306, user=parts.username, database=parts.path[1:], autocommit=True
    )
    with made.cursor() as cursor:
        cursor.execute(f"CREATE SEQUENCE IF NOT EXISTS {SEQUENCE}")
    return made


class Bare:
    """GET_LOCK, a token, RELEASE_LOCK, and nothing else: no ttl, no renewal, no list of holders."""

    def __init__(self, url: str, *, token: bool = True) -> None:
        self._cursor = connection(url).cursor()
        self._token = token

    def __enter__(self) -> None:
        self._request("SELECT GET_LOCK('bare', 60)")
        if self._token:
            self._request(f"SELECT NEXTVAL({SEQUENCE})")

    def __exit__(self, *_: object) -> None:
        self._request("SELECT RELEASE_LOCK('bare')")

    def _request(self, statement: str) -> Any:
        self._cursor.execute(statement)
        ((value,),) = self._cursor.fetchall()
        if not value:
            raise RuntimeError(f"{statement}: {value}")
        return value


class Raw:
    """The same statements over a raw socket; it only counts the packets of the replies. It shows what the machine allows."""

    def __init__(self, url: str, *, together: bool = False) -> None:
        self._connection = connection(url)  # it logs in
        self._socket = self._connection._sock
        lock, token = "SELECT GET_LOCK('raw', 60)", f"SELECT NEXTVAL({SEQUENCE})"
        self._enter = [self._packets([lock, token])] if together else [self._packets([lock]), self._packets([token])]
        self._exit_block = self._packets(["SELECT RELEASE_LOCK('raw')"])

    @staticmethod
    def _packets(statements: Sequence[str]) -> tuple[bytes, int]:
        words = [b"\3" + statement.encode() for statement in statements]
        return b"".join(len(word).to_bytes(3, "little") + b"\0" + word for word in words), len(words)

    def __enter__(self) -> None:
        for packets in self._enter:
            self._request(*packets)

    def __exit__(self, *_: object) -> None:
        self._request(*self._exit_block)

    def _request(self, data: bytes, replies: int) -> None:
        self._socket.sendall(data)
        received = b""
        # A reply has one column, EOF, one row, EOF: it is complete with the second EOF packet.
        while received.count(b"\xfe\0\0\2\0") < 2 * replies:
            received += self._socket.recv(4096)


def raw(url: str) -> AbstractContextManager[Any]:
    return Raw(url)


def raw_together(url: str) -> AbstractContextManager[Any]:
    return Raw(url, together=True)


def bare(url: str) -> AbstractContextManager[Any]:
    return Bare(url)


def bare_without_token(url: str) -> AbstractContextManager[Any]:
    return Bare(url, token=False)


def ours(url: str) -> AbstractContextManager[Any]:
    return fencelock.connect(url).lock("bench")


ON_DISK = "on_disk"
"""A database whose tables use InnoDB, as they do where an administrator does not allow MEMORY tables."""


def ours_on_disk(url: str) -> AbstractContextManager[Any]:
    return ours(url.rpartition("/")[0] + f"/{ON_DISK}")


def tooz(url: str) -> AbstractContextManager[Any]:
    from tooz import coordination

    coordinator = coordination.get_coordinator(url, b"bench")
    coordinator.start()
    lock: AbstractContextManager[Any] = coordinator.get_lock(b"bench")
    return lock


class Aio:
    """The contestants for asyncio, on one event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._locks: list[Any] = []

    def ours(self, url: str) -> AbstractAsyncContextManager[Any]:
        self._locks.append(aio.connect(url))
        lock: AbstractAsyncContextManager[Any] = self._locks[-1].lock("bench-aio")
        return lock

    def close(self) -> None:
        for locks in self._locks:
            self.loop.run_until_complete(locks.close())
        self.loop.close()
