"""Redlock on real nodes: some killed, stopped, wiped, slow, or too many of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from fencelock import EngineUnavailable, InvalidURL, LeaseLost, LockTimeout, LossReason
from fencelock.core.clock import NO_DEADLINE, boottime
from fencelock.engines.redlock.engine import RedlockEngine
from fencelock.model import Claim, Grant, Renewal, new_id
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, is_free, renewed, take, waiting
from tests.engines.conftest import Clients
from tests.engines.redis_server import tell
from tests.servers.proxy import Proxies
from tests.servers.redis import Redis, RedisNodes, RedisTls
from tests.support.waiting import SOON, eventually

Own = Callable[..., RedisNodes]


@pytest.fixture
def nodes(own_redis_nodes: Own) -> RedisNodes:
    """Five nodes, to be broken at will."""
    return own_redis_nodes(5)


@pytest.fixture
def locks(nodes: RedisNodes, clients: Clients) -> LocksView:
    """A client of theirs."""
    return clients.connect(nodes.url)


def holds(node: Redis, name: str = "x") -> bool:
    """Return whether a node has the lock."""
    return bool(tell(node, "EXISTS", f"fencelock:redlock:lock:{name}"))


async def turns(locks: LocksView, number: int = 10) -> list[int]:
    """Take the lock so often; return the tokens."""
    return [await take(locks, "x") for _ in range(number)]


def hang_up_and_stop(node: Redis) -> None:
    """End every connection to a node, and let it answer nothing from then on, while the kernel still takes connections."""
    for kind in ("normal", "pubsub"):
        tell(node, "CLIENT", "KILL", "TYPE", kind)
    node.pause()


BREAK: dict[str, Callable[[Redis], None]] = {
    "killed": lambda node: node.kill(),
    "stopped": lambda node: node.pause(),
    "hung up and stopped": hang_up_and_stop,
    "wiped": lambda node: node.restart(wipe=True),
    "restarted": lambda node: node.restart(),
}


@pytest.mark.parametrize("how", BREAK)
@pytest.mark.parametrize("broken", [1, 2])
async def test_minority(nodes: RedisNodes, locks: LocksView, how: str, broken: int) -> None:
    """One or two nodes of five may be killed, stopped, wiped or restarted: the lock is had, held and renewed all the same."""
    before = await turns(locks, 3)
    async with locks.lock("held", ttl=9) as held:
        await eventually(_on_all(nodes, "held"), "all nodes have the lease")
        for node in nodes.members[:broken]:
            await asyncio.to_thread(BREAK[how], node)
        during = await turns(locks)
        await renewed(held)
    after = await turns(locks, 3)
    tokens = before + during + after
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("how", ["stopped", "hung up and stopped"])
async def test_minority_hangs(nodes: RedisNodes, locks: LocksView, how: str) -> None:
    """Two nodes of five that hang, with or without having hung up before, cost nobody a short lease."""
    async with locks.lock("held", ttl=3) as held:
        await eventually(_on_all(nodes, "held"), "all nodes have the lease")
        for node in nodes.members[:2]:
            await asyncio.to_thread(BREAK[how], node)
        await asyncio.sleep(6)
        held.check()


@pytest.mark.parametrize(("ttl", "delay"), [(0.2, 0.0), (0.4, 0.09), (2.0, 0.15)])
async def test_renewal_beside_a_node_that_hangs(
    nodes: RedisNodes, clients: Clients, proxies: Callable[[RedisNodes], Proxies], ttl: float, delay: float
) -> None:
    """A node that hangs takes a fifth of the ttl from a renewal; nodes that are slow, but answer, have more."""
    through = proxies(nodes)
    took = []
    for turn in range(5):  # a busy machine may keep one of them waiting, and not all
        engine = clients.on("redlock://" + ",".join(proxy.address for proxy in through.members)).engine()
        grant = await engine.attempt(Claim(f"turn {turn}", 60.0), enqueue=False, deadline=NO_DEADLINE)
        assert isinstance(grant, Grant)
        await eventually(_on_all(nodes, f"turn {turn}"), "all nodes have the lease")
        for proxy in through.members:
            proxy.delay(delay, "to_client")
        if delay:
            assert await engine.renew([grant]) == [Renewal.RENEWED]  # from here on it is known how slow they are
        through.members[0].cut()
        begun = boottime()
        answers = await engine.renew([grant._replace(claim=grant.claim._replace(ttl=ttl)), grant])
        took.append(boottime() - begun)
        if answers == [Renewal.RENEWED] * 2 and took[-1] < 0.9 * ttl:
            break
        for proxy in through.members:
            proxy.heal()
    else:
        pytest.fail(f"with a ttl of {ttl:g} s a renewal took {took}")


async def test_many_leases_and_a_node_that_hangs(
    nodes: RedisNodes, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that hangs is waited for once in a renewal, however many batches of leases it has."""
    monkeypatch.setattr("fencelock.engines.redlock.renewal.BATCH", 2)
    engine = clients.on(nodes.url).engine()
    grants = []
    for number in range(40):
        grant = await engine.attempt(Claim(f"held {number}", 60.0), enqueue=False, deadline=NO_DEADLINE)
        assert isinstance(grant, Grant)
        grants.append(grant)
    await eventually(_on_all(nodes, "held 39"), "all nodes have the leases")
    nodes.members[0].pause()
    begun = boottime()
    assert await engine.renew(grants) == [Renewal.RENEWED] * len(grants)
    assert boottime() - begun < 10  # a second for each of the twenty batches: 20


async def test_slow_node(nodes: RedisNodes, clients: Clients, proxies: Callable[[RedisNodes], Proxies]) -> None:
    """A node that is slow by two seconds holds up nobody: a hundred turns are done long before it could answer thrice."""
    through = proxies(nodes)
    locks = clients.connect("redlock://" + ",".join(proxy.address for proxy in through.members))
    await turns(locks, 3)
    through.members[2].delay(2.0)
    tokens = await turns(locks, 100)
    assert tokens == sorted(set(tokens))
    through.heal()
    assert await take(locks, "x") > tokens[-1]


async def test_nobody_waits_for_the_slowest(
    nodes: RedisNodes,
    clients: Clients,
    proxies: Callable[[RedisNodes], Proxies],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who has a majority goes on while the slowest nodes still owe their answers."""
    monkeypatch.setattr("fencelock.engines.redlock.cluster.MAX_TIMEOUT", SOON)
    through = proxies(nodes)
    engine = clients.on("redlock://" + ",".join(proxy.address for proxy in through.members)).engine()
    assert isinstance(engine, RedlockEngine)

    async def reaches_all() -> bool:
        name = f"warm {new_id()}"
        await engine.attempt(Claim(name, 30.0), enqueue=False, deadline=NO_DEADLINE)
        return all(holds(node, name) for node in nodes.members)

    await eventually(reaches_all, "the client is connected to all nodes")
    for proxy in through.members[:2]:
        proxy.delay(3 * SOON)  # longer than the majority takes, also on a busy machine
    grant = await engine.attempt(Claim("x", 90.0), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    for node in list(engine._cluster)[:2]:
        assert any(connection.raw.pending for connection in node.pool._all)


async def test_all_are_asked_at_once(
    nodes: RedisNodes, clients: Clients, proxies: Callable[[RedisNodes], Proxies]
) -> None:
    """Nodes that are all as slow cost as much as one of them, and not all of it one after the other."""
    through = proxies(nodes)
    locks = clients.connect("redlock://" + ",".join(proxy.address for proxy in through.members))
    await turns(locks, 3)
    for proxy in through.members:
        proxy.delay(0.6, "to_client")
    begun = boottime()
    await take(locks, "x")
    assert boottime() - begun < 3  # a majority for an acquire and a release, one by one: 3.6


@pytest.mark.parametrize("how", ["killed", "stopped", "hung up and stopped"])
async def test_majority_is_gone(nodes: RedisNodes, locks: LocksView, how: str) -> None:
    """Three nodes of five down: acquiring and waiting are refused with their names, and a lease is lost on time."""
    await turns(locks, 2)
    other = nodes.members[0].address
    async with background(_hold(locks)) as (holder,):
        await eventually(lambda: _is_held(locks), "it is held")
        for node in nodes.members[:3]:
            await asyncio.to_thread(BREAK[how], node)
        begun = boottime()
        # Fewer than two, if the machine is so busy that another is too slow.
        with pytest.raises(EngineUnavailable, match=r"[012] of 5 Redlock nodes answered, and 3 are needed") as caught:
            await locks.lock("y", timeout=0.2).acquire()
        assert other in str(caught.value)
        assert boottime() - begun < 2.5
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(holder, SOON)
    for node in nodes.members[:3]:
        if how == "killed":
            await asyncio.to_thread(node.restart)
        else:
            node.resume()
    await eventually(lambda: _can_be_had(locks), "the nodes are found again")


async def test_majority_hangs_while_somebody_waits(nodes: RedisNodes, locks: LocksView) -> None:
    """A waiter gets its error about a second after its timeout when a majority hangs; the clean-up takes another."""
    async with locks.lock("x", ttl=60):
        waiter = locks.lock("x", timeout=2)
        async with background(waiter.acquire()) as (acquiring,):
            await waiting(locks, "x")
            for node in nodes.members[:3]:
                await asyncio.to_thread(hang_up_and_stop, node)
            begun = boottime()
            with pytest.raises((EngineUnavailable, LockTimeout)):
                await acquiring
            assert boottime() - begun < 4.4
        for node in nodes.members[:3]:
            node.resume()
        await eventually(lambda: _can_be_had(locks), "the nodes are found again")


async def _hold(locks: LocksView) -> None:
    async with locks.lock("x", ttl=4) as lease:
        while True:
            lease.check()
            await asyncio.sleep(0.05)


async def _is_held(locks: LocksView) -> bool:
    return bool((await locks.inspect("x")).holders)


async def _can_be_had(locks: LocksView) -> bool:
    try:
        return await is_free(locks, "y")
    except EngineUnavailable:
        return False


async def test_nodes_down_from_the_start(nodes: RedisNodes, locks: LocksView) -> None:
    """A client that never saw some nodes works with the rest, and heals those when they come."""
    for node in nodes.members[:2]:
        node.kill()
    async with locks.lock("x", ttl=9) as lease:
        for node in nodes.members[:2]:
            await asyncio.to_thread(node.restart)
        await eventually(_on_all(nodes), "all nodes have the lease")
        lease.check()
    assert not any(holds(node) for node in nodes.members)


@pytest.mark.parametrize("hung", [2, 5])
async def test_nodes_hung_from_the_start(nodes: RedisNodes, clients: Clients, hung: int) -> None:
    """The client connects to all nodes at once: two that accept and never reply delay nobody, with five it fails in time."""
    locks = clients.connect(f"{nodes.url}?socket_timeout=20&socket_connect_timeout=20")
    for node in nodes.members[:hung]:
        node.pause()
    begun = boottime()
    if hung == 2:
        await take(locks, "x")
    else:
        with pytest.raises(EngineUnavailable, match="0 of 5 Redlock nodes"):
            await locks.lock("x", timeout=1).acquire()
    assert boottime() - begun < 6
    for node in nodes.members[:hung]:
        node.resume()


async def test_renewal_restores_a_lease_on_a_node_that_lost_it(nodes: RedisNodes, locks: LocksView) -> None:
    """A node that forgot a lease gets it back at the next renewal, as a majority still has it."""
    async with locks.lock("x", ttl=9) as lease:
        await eventually(_on_all(nodes), "all nodes have the lease")
        tell(nodes.members[0], "FLUSHALL")
        await asyncio.to_thread(nodes.members[1].restart, wipe=True)
        await eventually(_on_all(nodes), "all nodes have the lease again")
        lease.check()


def _on_all(nodes: RedisNodes, name: str = "x") -> Callable[[], Awaitable[object]]:
    async def there() -> bool:
        return all(holds(node, name) for node in nodes.members)

    return there


async def test_majority_forgets(nodes: RedisNodes, locks: LocksView) -> None:
    """A lease that a majority forgot is lost, and healed nowhere; what comes after has a higher token."""
    lease = await locks.lock("x", ttl=6).acquire()
    await eventually(_on_all(nodes), "all nodes have the lease")
    async with asyncio.timeout(SOON):
        while not lease.lost.is_set():  # a renewal between two of them would heal the first
            for node in nodes.members[:3]:
                tell(node, "FLUSHALL")
            await asyncio.sleep(0.05)
    assert lease.reason is LossReason.GONE
    assert not any(holds(node) for node in nodes.members[:3])
    assert await take(locks, "x") > lease.token


async def test_script_flush(nodes: RedisNodes, clients: Clients, locks: LocksView) -> None:
    """Scripts that the nodes forget between any two calls go unnoticed."""
    tokens = []
    for place in range(20):
        tell(nodes.members[place % 5], "SCRIPT", "FLUSH")
        tokens.append(await take(locks, "x"))
    async with clients.connect(nodes.url).lock("x"):
        for node in nodes.members:
            tell(node, "SCRIPT", "FLUSH")
        with pytest.raises(LockTimeout):
            await locks.lock("x", timeout=1).acquire()
        assert len((await locks.inspect("x")).waiters) == 0
    assert tokens == sorted(set(tokens))


async def test_nodes_wake_a_waiter(nodes: RedisNodes, locks: LocksView, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes wake a waiter when the lock is released; it does not wait for its next attempt."""
    for pause in ("FIRST_PAUSE", "MAX_PAUSE"):
        monkeypatch.setattr(f"fencelock.engines.redlock.waiting.{pause}", 600.0)
    waits = []
    for _ in range(5):
        lease = await locks.lock("x").acquire()
        async with background(take(locks, "x")) as (waiter,):
            await waiting(locks, "x")
            begun = time.monotonic()
            await lease.release()
            await waiter
            waits.append(time.monotonic() - begun)
    assert sorted(waits)[2] < 5  # it tries again after a third of its ttl, 10 s


async def test_same_server_twice(nodes: RedisNodes, clients: Clients) -> None:
    """A server that is named twice, by different addresses even, is refused: it would count twice."""
    first, second, third = nodes.members[:3]
    url = f"redlock://{first.address},{second.address},localhost:{first.port},{third.address}"
    with pytest.raises(InvalidURL, match="are the same Redis server"):
        await clients.connect(url).lock("x").acquire(timeout=5)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "1 node survives the loss of 0; 3 nodes would survive 1"),
        (2, "2 nodes survives the loss of 0; 3 nodes would survive 1"),
        (4, "4 nodes survives the loss of 1; 5 nodes would survive 2"),
    ],
)
async def test_warning_for_one_or_an_even_number_of_nodes(
    nodes: RedisNodes, clients: Clients, caplog: pytest.LogCaptureFixture, number: int, words: str
) -> None:
    """One node, or an even number of nodes, causes a warning: more nodes would survive one more failure."""
    with caplog.at_level(logging.WARNING, "fencelock"):
        locks = clients.connect("redlock://" + ",".join(node.address for node in nodes.members[:number]))
    assert words in caplog.text
    assert await take(locks, "x")


async def test_no_warning_for_three_or_five_nodes(
    nodes: RedisNodes, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """Three and five nodes cause no warning."""
    with caplog.at_level(logging.WARNING, "fencelock"):
        for number in (3, 5):
            clients.connect("redlock://" + ",".join(node.address for node in nodes.members[:number]))
    assert not caplog.text


@pytest.mark.parametrize("full", [1, 2])
async def test_full_nodes(nodes: RedisNodes, locks: LocksView, full: int) -> None:
    """One or two nodes of five without memory refuse: the lock is had, held and renewed all the same, and left nowhere."""
    before = await turns(locks, 3)
    async with locks.lock("held", ttl=3) as held:
        await eventually(_on_all(nodes, "held"), "all nodes have the lease")
        for node in nodes.members[:full]:
            tell(node, "CONFIG", "SET", "maxmemory", "1")
        tokens = before + await turns(locks)
        await renewed(held, 2)
    for node in nodes.members[:full]:
        tell(node, "CONFIG", "SET", "maxmemory", "0")
    tokens += await turns(locks, 3)
    assert tokens == sorted(set(tokens))

    async def left_nowhere() -> bool:
        await take(locks, "other")
        return not any(tell(node, "KEYS", "*:lock:*") for node in nodes.members)

    await eventually(left_nowhere, "no node has a lock")


async def test_tls(redis_tls: RedisTls, clients: Clients) -> None:
    """`redlocks://` is Redlock with TLS, and takes the same options as `rediss://`."""
    locks = clients.connect(redis_tls.tls_url.replace("rediss", "redlocks"))
    assert await take(locks, "x") < await take(locks, "x")
    with pytest.raises(EngineUnavailable, match=r"(?i)certificate"):
        await clients.connect(redis_tls.tls_url.replace("rediss", "redlocks").partition("?")[0]).inspect("x")


async def test_nodes_keep_one_number_per_released_name(nodes: RedisNodes, locks: LocksView) -> None:
    """The nodes keep one number for each released name for a while, and remove it below the floor."""
    for number in range(50):
        await take(locks, f"name {number}")
    for node in nodes.members:
        keys = {key.removeprefix(b"fencelock:redlock:") for key in tell(node, "KEYS", "*")}
        assert keys <= {b"seen", b"before", b"layout"}


async def test_tokens_rise_after_nodes_forget_a_name(nodes: RedisNodes, locks: LocksView) -> None:
    """A node forgets the number of a name only below its floor, and tokens still rise."""
    token = await take(locks, "x")
    for round in (1, 2, 3):
        for node in nodes.members:  # as if the minute were over
            tell(node, "HINCRBY", "fencelock:redlock:seen", "\0period", -1)
        assert await take(locks, f"other {round}")
    for node in nodes.members:
        assert int(tell(node, "HGET", "fencelock:redlock:seen", "\0floor")) >= token
        assert not tell(node, "HEXISTS", "fencelock:redlock:seen", "x")
        assert not tell(node, "HEXISTS", "fencelock:redlock:before", "x")
    assert await take(locks, "x") > token


@pytest.fixture(autouse=True)
def _resumed(nodes: RedisNodes) -> Iterator[None]:
    """Leave no node stopped."""
    yield
    for node in nodes.members:
        if node.is_paused:
            node.resume()
