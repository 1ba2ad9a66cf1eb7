"""A step that must not run twice, whose reply is lost with its connection: the caller gets an error, and no repetition."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha1
from typing import Any, TypeVar

import pytest

from fencelock.engines.redis import engine as redis
from fencelock.engines.redis.records import RECORD
from fencelock.engines.redis.scripts import Script
from fencelock.engines.redlock import commands as redlock
from fencelock.errors import OutcomeUnknown
from fencelock.runtime.blocking import run_sync
from tests.contract.engines import EngineCase
from tests.contract.factory import MakeClient
from tests.contract.steps import background, waiting
from tests.contract.ttl_scale import TtlScale
from tests.engines.forwarder import Forwarder, forwarding
from tests.servers.cluster import Cluster
from tests.servers.plugin import Session
from tests.servers.server import Server
from tests.support.waiting import eventually

T = TypeVar("T")
Request = Callable[[bytes], bool]

pytestmark = pytest.mark.server


def _contains(words: bytes) -> Request:
    return lambda data: words in data


def _calls(script: Script) -> Request:
    return _contains(sha1(script.text.encode(), usedforsecurity=False).hexdigest().encode())


def _zookeeper_request(kind: int) -> Request:
    """Return a function that finds a request of this type among the frames that a client sends."""

    def found(data: bytes) -> bool:
        while len(data) >= 12:
            size, _, type = struct.unpack("!iii", data[:12])
            if type == kind:
                return True
            data = data[4 + size :]
        return False

    return found


FORCE: dict[str, Request] = {
    "redis": _calls(redis.FORCE),
    "redlock": _calls(redlock.FORCE),
    "postgres": _contains(b"fl_force"),
    "advisory": _contains(b"fl_terminate_holders"),
    "mysql": _contains(b"KILL CONNECTION"),
    "etcd": lambda data: data.count(b"/claims/x/") == 2,  # a compare and a deletion; a read has the prefix once
    "zookeeper": _zookeeper_request(2),  # Delete
}
"""The request of each engine that drops the holders; by then the scripts are loaded and the statements prepared."""
WRITE: dict[str, Request] = {
    "redis": _calls(RECORD),
    "postgres": _contains(b"fl_write"),
    "advisory": _contains(b"fl_write"),
    "mysql": _contains(b"INSERT IGNORE INTO fencelock_records"),
    "etcd": _contains(b"1 =1"),  # the value, behind its token
    "zookeeper": _zookeeper_request(15),  # Create2
}
"""The request of each engine that writes a new record."""


class Network:
    """What is between a client and the servers of an engine."""

    def __init__(self, url: str, forwarders: list[Forwarder]) -> None:
        self.url = url
        self._forwarders = forwarders

    def swallow_replies_to(self, request: Request) -> None:
        for forwarder in self._forwarders:
            forwarder.swallows_reply_to = request

    def reset(self) -> None:
        """Close all connections; new ones work."""
        for forwarder in self._forwarders:
            forwarder.swallows_reply_to = None
            forwarder.hang_up()


@asynccontextmanager
async def network(case: EngineCase, url: str, engines: Session) -> AsyncIterator[Network]:
    assert case.server is not None
    server: Any = engines.get(case.server)
    members: Sequence[Server] = server.members if isinstance(server, Cluster) else [server]
    async with AsyncExitStack() as stack:
        forwarders = [await stack.enter_async_context(forwarding(member)) for member in members]
        for member, forwarder in zip(members, forwarders, strict=True):
            url = url.replace(member.address, forwarder.address)
        yield Network(url, forwarders)


async def run(runtime_name: str, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of an engine: a blocking one in a thread, as the forwarders need the event loop."""
    return await (work if runtime_name == "aio" else asyncio.to_thread(run_sync, work))


async def test_force_release_whose_reply_is_lost_is_not_repeated(
    case: EngineCase, engines: Session, url: str, runtime_name: str, ttl_scale: TtlScale, factory: MakeClient
) -> None:
    """A forced release without a reply raises OutcomeUnknown; a repetition would remove the next holder."""
    locks = factory.connect()
    async with network(case, url, engines) as between:
        remote = MakeClient(between.url, runtime_name, ttl_scale)
        administrator = remote.connect()
        try:
            for _ in range(2):  # PostgreSQL's statements are prepared the second time
                assert await administrator.force_release("another", reason="test") == 0
            first = await locks.lock("x", ttl=60).acquire()
            async with background(locks.lock("x", ttl=60).acquire()) as (second,):
                await waiting(locks, "x")
                between.swallow_replies_to(FORCE[case.id])
                async with background(administrator.force_release("x", reason="test")) as (force,):
                    lease = await second
                    between.reset()
                    with pytest.raises(OutcomeUnknown, match="may or may not") as raised:
                        await force
                assert raised.value.name == "x"
                assert [holder.token for holder in (await locks.inspect("x")).holders] == [lease.token]
                assert await lease.release()
                assert not await first.release()
        finally:
            await remote.finish()


@pytest.mark.records
async def test_write_whose_reply_is_lost_is_not_repeated(
    case: EngineCase, engines: Session, url: str, runtime_name: str, ttl_scale: TtlScale, factory: MakeClient
) -> None:
    """A record write without a reply raises OutcomeUnknown; a repetition would conflict with the first one."""
    records: Any = factory.engine().records  # type: ignore[attr-defined]
    async with network(case, url, engines) as between:
        remote = MakeClient(between.url, runtime_name, ttl_scale)
        writer: Any = remote.engine().records  # type: ignore[attr-defined]
        try:
            for _ in range(2):
                assert (await run(runtime_name, writer.write("another", b"1", token=1, ttl=60))).done
            between.swallow_replies_to(WRITE[case.id])
            write = run(runtime_name, writer.write("x", b"1", token=1, ttl=60, expect=0))
            async with background(write) as (writing,):

                async def written() -> bool:
                    return await run(runtime_name, records.read("x")) is not None

                await eventually(written, "the record is there")
                between.reset()
                if case.id == "etcd":  # the record's lease distinguishes a repeated write from another writer's
                    assert (await writing).done
                else:
                    with pytest.raises(OutcomeUnknown, match="may or may not"):
                        await writing
            found = await run(runtime_name, records.read("x"))
            assert found.value == b"1"
            assert (await run(runtime_name, writer.write("x", b"2", token=1, ttl=60, expect=found.version))).done
        finally:
            await remote.finish()
