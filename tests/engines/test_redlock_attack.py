"""What goes wrong between a client and several real Redis nodes at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import pytest
import redis

import fencelock
from fencelock import EngineUnavailable, InvalidURL, aio
from tests.contract.runtimes import LocksView
from tests.contract.steps import background
from tests.engines.conftest import Clients
from tests.engines.redis_server import connections, tell
from tests.servers.proxy import Proxies, Proxy
from tests.servers.redis import Redis
from tests.support.waiting import SOON, eventually_blocking

Nodes = Sequence[Redis]
LOCK = "fencelock:redlock:lock:x"


@pytest.fixture
def nodes(redis_nodes: Callable[[int], Nodes]) -> Nodes:
    """The nodes that all tests share, empty, and with nobody connected."""
    nodes = redis_nodes(5)
    eventually_blocking(lambda: not any(map(connections, nodes)), "the connections of earlier tests are closed")
    for node in nodes:
        tell(node, "FLUSHALL")
    return nodes


@pytest.fixture
def between(nodes: Nodes) -> Iterator[Proxies]:
    """A proxy before each node."""
    with Proxies(nodes) as proxies:
        yield proxies


def url_of(members: Nodes | Sequence[Proxy]) -> str:
    """Return the URL that names all of them."""
    return f"redlock://{','.join(member.address for member in members)}"


async def connect_to_all(locks: LocksView, nodes: Nodes) -> None:
    """Connect a client to all nodes: the first locks may leave out a node that was slow to accept."""
    lease = await locks.lock("warm", ttl=30).acquire()
    for _ in range(100):
        if all(tell(node, "EXISTS", "fencelock:redlock:lock:warm") for node in nodes):
            break
        await asyncio.sleep(0.05)
        await lease.renew()
    else:
        pytest.fail("a node was not connected to")
    assert await lease.release()


def hang_up(nodes: Nodes) -> None:
    """Let every node end every connection."""
    for node in nodes:
        for kind in ("normal", "pubsub"):
            tell(node, "CLIENT", "KILL", "TYPE", kind)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the nodes more than a second: a busy machine may need that to open five connections."""
    monkeypatch.setattr("fencelock.engines.redlock.cluster.MAX_TIMEOUT", SOON)
    for module in ("cluster", "node"):
        monkeypatch.setattr(f"fencelock.engines.redlock.{module}.CONNECT_TIMEOUT", SOON)


@pytest.mark.usefixtures("patient")
async def test_hung_up_on_by_all_nodes(nodes: Nodes, clients: Clients) -> None:
    """Whatever is asked first after all nodes ended all connections works the first time, and no error comes out."""
    locks = clients.connect(url_of(nodes))
    lease = await locks.lock("held", ttl=60).acquire()
    hang_up(nodes)
    other = await locks.lock("x", ttl=60).acquire(timeout=SOON)
    hang_up(nodes)
    await lease.renew()
    hang_up(nodes)
    assert len((await locks.inspect("held")).holders) == 1
    hang_up(nodes)
    assert await locks.force_release("x", reason="test") == 1
    hang_up(nodes)
    assert [name async for name in locks.names()] == ["held"]
    hang_up(nodes)
    assert await lease.release()
    assert not await other.release()


async def left_nowhere(locks: LocksView, nodes: Nodes) -> None:
    """Wait until no node has the lock, while the client makes other requests: undos that were lost are sent before those."""
    for _ in range(100):
        if not any(tell(node, "EXISTS", LOCK) for node in nodes):
            return
        with contextlib.suppress(EngineUnavailable):
            await (await locks.lock("y").acquire()).release()
        await asyncio.sleep(0.05)
    pytest.fail("the lock is still on a node that is in use again")


@pytest.mark.usefixtures("patient")
async def test_answers_lost_with_their_connections(nodes: Nodes, between: Proxies, clients: Clients) -> None:
    """Nodes that took the lock for a claim and whose answers were lost with the connections are not left taken."""
    locks = clients.connect(url_of(between.members))
    await connect_to_all(locks, nodes)
    for member in between.members:
        member.cut("to_client")

    async def take() -> bool:
        lease = await locks.lock("x", ttl=90).acquire(timeout=SOON)
        return await lease.release()

    async with background(take()) as (taking,):
        await asyncio.to_thread(eventually_blocking, lambda: all(tell(node, "EXISTS", LOCK) for node in nodes))
        for member in between.members:
            member.disconnect()
            member.heal()
        assert await taking
    await left_nowhere(locks, nodes)


@pytest.mark.parametrize("password", ["s3,cr3t", "s3,cr3t:x", "3,s3cr3t", "s3cr3t,", "1,2,s3cr3t"])
@pytest.mark.parametrize("user", ["", "app"])
def test_comma_in_a_password(user: str, password: str) -> None:
    """A password with a comma that was not escaped is refused, and no part of it is quoted or taken for a node."""
    with pytest.raises(InvalidURL, match=r"%2C|addresses of its nodes") as caught:
        fencelock.connect(f"redlock://{user}:{password}@h1:1,h2:2,h3:3")
    text = "".join(traceback.format_exception(caught.value))
    assert not [part for part in password.split(",") if len(part) > 1 and part in text]


@pytest.mark.parametrize("mark", "/?#")
@pytest.mark.parametrize("scheme", ["redis", "redlock"])
def test_password_that_begins_like_a_port(scheme: str, mark: str) -> None:
    """Half a password that could be a port is not taken for one, whatever mark in it was not escaped."""
    with pytest.raises(InvalidURL) as caught:
        fencelock.connect(f"{scheme}://app:4711{mark}s3cr3t@h1:1,h2:2,h3:3/0")
    assert "4711" not in str(caught.value)


async def test_answers_that_nobody_waited_for(nodes: Nodes, between: Proxies, clients: Clients) -> None:
    """Nodes whose answers were not needed are not taken for silent ones when they are asked again, much later."""
    locks = clients.connect(url_of(between.members))
    await connect_to_all(locks, nodes)
    await asyncio.sleep(0.1)
    for member in between.members[:2]:
        member.delay(0.02)
    lease = await locks.lock("x", ttl=5.5, renew=False).acquire()
    for _ in range(2):
        await asyncio.sleep(0.7)  # longer than a node has for its answer
        before = [tell(node, "PEXPIRETIME", LOCK) for node in nodes]
        await lease.renew()
        after = [tell(node, "PEXPIRETIME", LOCK) for node in nodes]
        assert all(there < then for there, then in zip(before, after, strict=True)), (before, after)
    assert await lease.release()


async def test_a_majority_that_is_back(nodes: Nodes, between: Proxies, clients: Clients) -> None:
    """When nodes that were out of reach are back, the first who asks has the lock, however long ago that was."""
    locks = clients.connect(url_of(between.members))
    await connect_to_all(locks, nodes)
    for member in between.members[:3]:
        member.refuse()
        member.disconnect()
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            await locks.lock("x").try_acquire()
        await asyncio.sleep(0.7)
    between.heal()
    lease = await locks.lock("x").try_acquire()
    assert lease is not None
    assert await lease.release()


async def test_busy_loop(nodes: Nodes) -> None:
    """Nodes whose answers a busy event loop has not read yet are not taken for silent ones."""
    async with aio.connect(url_of(nodes)) as locks:
        assert await (await locks.lock("warm").acquire()).release()
        first = asyncio.create_task(locks.lock("a", ttl=5).acquire())
        await asyncio.sleep(0)
        time.sleep(0.7)  # noqa: ASYNC251  longer than a node has for its answer
        second = await locks.lock("b", ttl=5).try_acquire()
        assert second is not None
        assert await second.release()
        assert await (await first).release()


async def test_refused_by_most_nodes(nodes: Nodes, clients: Clients) -> None:
    """A waiter that could not enqueue, as too few nodes work, is queued on no node."""
    locks = clients.connect(url_of(nodes))
    for node in nodes[:3]:
        tell(node, "CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(EngineUnavailable):
            await locks.lock("x").acquire(timeout=SOON)
    finally:
        for node in nodes[:3]:
            tell(node, "CONFIG", "SET", "maxmemory", "0")
    eventually_blocking(lambda: not [key for node in nodes for key in tell(node, "KEYS", "*:queue:*")])


async def test_release_whose_answers_are_lost_with_their_connections(
    nodes: Nodes, between: Proxies, clients: Clients
) -> None:
    """A holder is not told of a loss because nodes that were asked again had let go the first time."""
    told: list[fencelock.LossReason] = []
    locks = clients.connect(url_of(between.members), on_lost=lambda lease, reason: told.append(reason))
    lease = await locks.lock("x", ttl=60).acquire()
    for member in between.members[:3]:
        member.cut("to_client")

    async def release() -> bool:
        return bool(await lease.release())

    async with background(release()) as (releasing,):
        await asyncio.to_thread(eventually_blocking, lambda: not any(tell(node, "EXISTS", LOCK) for node in nodes))
        for member in between.members[:3]:
            member.disconnect()
            member.heal()
        await releasing
    assert lease.reason is None
    assert not told


async def test_undo_lost_with_its_connection(nodes: Nodes, between: Proxies, clients: Clients) -> None:
    """What a release asked of nodes that were not waited for is asked again if it was lost with their connections."""
    locks = clients.connect(url_of(between.members))
    await connect_to_all(locks, nodes)
    lease = await locks.lock("x", ttl=30).acquire()
    await asyncio.to_thread(eventually_blocking, lambda: all(tell(node, "EXISTS", LOCK) for node in nodes))
    await asyncio.sleep(0.1)  # all have answered
    for member in between.members[:2]:
        member.drop("to_server")
    assert await lease.release()
    for member in between.members[:2]:
        member.disconnect()
        member.heal()
    await left_nowhere(locks, nodes)


@pytest.mark.usefixtures("patient")
async def test_close_sends_an_undo_that_was_lost_with_its_connection(
    nodes: Nodes, between: Proxies, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that is closed right after a release leaves nothing on nodes whose connections broke meanwhile."""
    for limit in ("engine.MIN_TIMEOUT", "engine.ABANDON_CONNECT_TIMEOUT", "cluster.STRAGGLER_TIMEOUT"):
        monkeypatch.setattr(f"fencelock.engines.redlock.{limit}", SOON)  # close() waits for a short time only
    locks = clients.connect(url_of(between.members))
    await connect_to_all(locks, nodes)
    lease = await locks.lock("x", ttl=30).acquire()
    await asyncio.to_thread(eventually_blocking, lambda: all(tell(node, "EXISTS", LOCK) for node in nodes))
    await asyncio.sleep(0.1)  # all have answered
    for member in between.members[:2]:
        member.drop("to_server")
    assert await lease.release()
    for member in between.members[:2]:
        member.disconnect()
        member.heal()
    await locks.close()
    assert not any(tell(node, "EXISTS", LOCK) for node in nodes)


def test_slash_in_an_option() -> None:
    """A path among the options is not taken for the database."""
    with fencelock.connect("redlock://h1:1,h2:2,h3:3?client_name=a/b", namespace="x") as locks:
        assert repr(locks).endswith("h3:3?client_name=a/b>")
    with pytest.raises(InvalidURL, match="the database stands once"):
        fencelock.connect("redlock://h1:1/0,h2:2/0,h3:3/0?client_name=a/b")


@pytest.fixture
def busy(nodes: Nodes) -> Iterator[Callable[[Nodes], None]]:
    """Have nodes run somebody's endless script, which `tell(node, "SCRIPT", "KILL")` ends."""
    threads = []

    def keep_busy(members: Nodes) -> None:
        for node in members:
            tell(node, "CONFIG", "SET", "busy-reply-threshold", "50")
            threads.append(threading.Thread(target=_endless, args=(node,)))
            threads[-1].start()
        eventually_blocking(lambda: all(map(_is_busy, members)))

    yield keep_busy
    for node in nodes:
        if _is_busy(node):
            tell(node, "SCRIPT", "KILL")
        tell(node, "CONFIG", "SET", "busy-reply-threshold", "5000")
    for thread in threads:
        thread.join()


def _endless(node: Redis) -> None:
    with pytest.raises(redis.ResponseError):
        tell(node, "EVAL", "while true do end", 0)


def _is_busy(node: Redis) -> bool:
    try:
        tell(node, "PING")
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")
    return False


@pytest.mark.parametrize("number", [2, 3])
async def test_release_that_nodes_refuse(
    nodes: Nodes, clients: Clients, busy: Callable[[Nodes], None], number: int
) -> None:
    """What nodes refuse to give back, as they are busy with a script, they are asked for again once they are not."""
    locks = clients.connect(url_of(nodes))
    await connect_to_all(locks, nodes)
    lease = await locks.lock("x", ttl=60).acquire()
    await asyncio.to_thread(eventually_blocking, lambda: all(tell(node, "EXISTS", LOCK) for node in nodes))
    await asyncio.to_thread(busy, nodes[:number])
    if number == 2:
        assert await lease.release()
        assert await (await locks.lock("y").acquire()).release()
    else:
        with pytest.raises(EngineUnavailable, match="BUSY"):
            await lease.release()
    for node in nodes[:number]:
        tell(node, "SCRIPT", "KILL")
    await left_nowhere(locks, nodes)


async def test_replica(nodes: Nodes, clients: Clients) -> None:
    """The client reconnects to a node that became a replica: its address may belong to another server by now."""
    locks = clients.connect(url_of(nodes))
    await connect_to_all(locks, nodes)
    before = {each["id"] for each in connections(nodes[0])}
    tell(nodes[0], "REPLICAOF", "127.0.0.1", "1")
    try:
        for _ in range(100):
            assert await (await locks.lock("x").acquire()).release()
            if not before & {each["id"] for each in connections(nodes[0])}:
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("the connection is still used")
    finally:
        tell(nodes[0], "REPLICAOF", "NO", "ONE")
