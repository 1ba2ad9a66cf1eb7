"""Tokens follow the clock: the base is raised, by any client at any time, and tokens only ever rise."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import fencelock
from fencelock import EngineUnavailable
from fencelock.core.clock import NO_DEADLINE, wall_us
from fencelock.engines.zookeeper import namespace
from fencelock.engines.zookeeper.engine import ZooKeeperEngine
from fencelock.engines.zookeeper.namespace import MAX_LAG_US
from fencelock.engines.zookeeper.paths import ClaimData
from fencelock.model import Claim, Grant, Mode, Waiting
from tests.contract.steps import take
from tests.engines.conftest import Clients
from tests.engines.zookeeper_server import bare, chroot
from tests.servers.zookeeper import ZooKeeper, ZooKeeperCluster
from tests.support.waiting import SOON, eventually

HOUR_US = 3600 * 10**6


class Clock:
    """The wall clock of all clients in this process."""

    def __init__(self) -> None:
        self.now = 1_800_000_000_000_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A wall clock that only the test moves."""
    clock = Clock()
    monkeypatch.setattr(namespace, "wall_us", clock)
    return clock


def engines(server: object, clients: Clients, number: int = 2) -> list[ZooKeeperEngine]:
    """Return clients of one namespace."""
    factory = clients.on(chroot(server))
    found = [factory.engine() for _ in range(number)]
    assert all(isinstance(engine, ZooKeeperEngine) for engine in found)
    return found  # type: ignore[return-value]


async def token(engine: ZooKeeperEngine, name: str = "x") -> int:
    """Acquire and release; return the token."""
    grant = await engine.attempt(Claim(name, 30), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    assert [holder.token for holder in (await engine.inspect(name)).holders] == [grant.token]
    assert await engine.release(grant)
    return grant.token


async def test_tokens_start_at_the_clock_and_are_raised_to_it(
    zookeeper1: ZooKeeper, clients: Clients, clock: Clock
) -> None:
    """A namespace starts at the clock; within a minute of it the base stays, later the next claim raises it."""
    (engine,) = engines(zookeeper1, clients, 1)
    first = await token(engine)
    assert 0 < first - clock.now < 1000
    base = engine._namespace.base
    clock.now += MAX_LAG_US // 2
    assert first < await token(engine) < clock.now
    assert engine._namespace.base == base
    clock.now += MAX_LAG_US
    assert 0 < await token(engine) - clock.now < 1000
    assert engine._namespace.base > base


async def test_clock_that_is_set_back_lowers_nothing(zookeeper1: ZooKeeper, clients: Clients, clock: Clock) -> None:
    """A client whose clock is behind leaves the base where it is: tokens go on from there."""
    first, second = engines(zookeeper1, clients)
    before = await token(first)
    clock.now -= 10 * HOUR_US
    assert before < await token(second) < before + 1000
    clock.now = 0  # an implausible clock
    assert before < await token(second) < before + 1000


async def test_two_raises_between_a_create_and_the_next_read(
    zookeeper1: ZooKeeper, clients: Clients, clock: Clock
) -> None:
    """A client that knows only the base before the last two raises gets a token above all earlier ones."""
    stale, other = engines(zookeeper1, clients)
    tokens = [await token(stale)]
    for _ in range(2):
        clock.now += HOUR_US
        tokens.append(await token(other))
    known = stale._namespace.base
    clock.now -= 2 * HOUR_US  # so that the stale client does not raise it itself
    tokens += [await token(stale), await token(other), await token(stale)]
    assert stale._namespace.base > known
    assert tokens == sorted(set(tokens))


async def test_concurrent_raises(zookeeper1: ZooKeeper, clients: Clients, clock: Clock) -> None:
    """If many clients find the base behind the clock, one raises it; all use the new one, and one node is left."""
    many = engines(zookeeper1, clients, 6)
    tokens = [await token(engine) for engine in many]
    for _ in range(3):
        clock.now += HOUR_US
        shared = [Claim("y", 30, mode=Mode.SHARED) for _ in many]
        attempts = (
            engine.attempt(c, enqueue=False, deadline=NO_DEADLINE) for engine, c in zip(many, shared, strict=True)
        )
        grants = await asyncio.gather(*(clients.run(attempt) for attempt in attempts))
        assert all(isinstance(grant, Grant) and 0 < grant.token - clock.now < 1000 for grant in grants)
        assert len({grant.token for grant in grants if isinstance(grant, Grant)}) == len(many)
        assert len({engine._namespace.base for engine in many}) == 1
        tokens += [await token(engine) for engine in many]
    assert tokens == sorted(set(tokens))
    with bare(zookeeper1) as kazoo:
        assert len(kazoo.get_children(many[0]._namespace.paths.layout)) == 1


async def test_claims_keep_their_token_across_a_raise(zookeeper1: ZooKeeper, clients: Clients, clock: Clock) -> None:
    """Holder, waiter and `inspect` compute the token from the base in the claim's own data, whatever the base is now."""
    first, second = engines(zookeeper1, clients)
    holder = await first.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    late = Claim("x", 30)
    assert isinstance(await second.attempt(late, enqueue=True, deadline=NO_DEADLINE), Waiting)
    clock.now += HOUR_US
    raised = await token(first, "y")
    assert isinstance(holder, Grant)
    for engine in (first, second):
        assert [found.token for found in (await engine.inspect("x")).holders] == [holder.token]
    second._queue.claims[late.id].node = None  # as if the reply to the first attempt had been lost
    assert await first.release(holder)
    grant = await second.attempt(late, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    assert holder.token < grant.token < raised
    assert [found.token for found in (await first.inspect("x")).holders] == [grant.token]


async def test_claim_with_overwritten_data_is_enqueued_again(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A claim that finds its node after a lost reply, with data that others wrote, takes a new node and a new token."""
    (engine,) = engines(zookeeper1, clients, 1)
    claim = Claim("x", 30)
    first = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(first, Grant)
    queued = first.engine_state
    with bare(zookeeper1) as kazoo:
        kazoo.set(queued.path, b"not ours")
    queued.node = None  # as if the reply had been lost
    again = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(again, Grant)
    assert again.token > first.token
    assert [holder.token for holder in (await engine.inspect("x")).holders] == [again.token]


async def test_large_raise_is_logged(
    zookeeper1: ZooKeeper, clients: Clients, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A raise of more than a day is a warning, a smaller one is not; neither counts as a loss of the namespace."""
    (engine,) = engines(zookeeper1, clients, 1)
    await token(engine)
    clock.now += 23 * HOUR_US
    await token(engine)
    assert caplog.text == ""
    clock.now += 48 * HOUR_US
    await token(engine)
    assert "2.0 days behind the clock" in caplog.text
    assert "removed" not in caplog.text


async def test_record_versions_do_not_depend_on_the_base(zookeeper1: ZooKeeper, clients: Clients, clock: Clock) -> None:
    """A record has the same version for all clients before and after a raise, and a write raises it."""
    first, second = engines(zookeeper1, clients)
    before = (await first.records.write("key", b"one", token=1, ttl=3600)).record
    clock.now += HOUR_US
    await token(first)
    after = await second.records.read("key")
    assert before is not None
    assert after is not None
    assert after.version == before.version
    written = await first.records.write("key", b"two", token=1, ttl=3600, expect=after.version)
    assert written.done
    assert written.record is not None
    assert written.record.version > before.version


@pytest.mark.runtime_name("aio")
async def test_tokens_rise_across_a_change_of_the_leader(zookeeper3: ZooKeeperCluster, clients: Clients) -> None:
    """A new leader adds 2^32 to the transaction numbers, and so to the tokens."""
    locks = clients.connect(chroot(zookeeper3))
    before = await take(locks, "x")
    await asyncio.to_thread((await asyncio.to_thread(zookeeper3.leader)).kill)
    found: list[int] = []

    async def taken() -> bool:
        try:
            found.append(await take(locks, "x"))
        except EngineUnavailable:
            return False
        return True

    await eventually(taken, "the ensemble grants again", 60)
    assert 2**32 - 10**9 < found[0] - before < 2**34


# ---------------------------------------------------------------------- a model of all interleavings


class Ensemble(NamedTuple):
    """The state of the model: the last transaction, the base, and what each client has seen and done."""

    zxid: int
    base: int
    known: tuple[int, ...]
    """The base that each client knows."""
    tokens: tuple[int, ...]
    """The tokens in the order in which their claims were created."""


def steps(state: Ensemble, clock: int, *, checked: bool) -> Iterator[Ensemble]:
    """Yield each state that one step of one client can lead to: read the base, raise it, or create a claim."""
    for client, known in enumerate(state.known):

        def knows(base: int, client: int = client) -> tuple[int, ...]:
            return (*state.known[:client], base, *state.known[client + 1 :])

        if known != state.base:
            yield state._replace(known=knows(state.base))
        # Raise: fails unless the base is the known one. The client's view of the last transaction may be old.
        for seen in {state.zxid, max(0, state.zxid - 2)}:
            base = clock - seen
            if known == state.base and base > known:
                yield state._replace(zxid=state.zxid + 1, base=base, known=knows(base))
        if known == state.base or not checked:
            zxid = state.zxid + 1
            yield state._replace(zxid=zxid, tokens=(*state.tokens, known + zxid))


def falls(*, checked: bool) -> bool:
    """Return whether a token is not above an earlier one in some interleaving of two clients with six steps."""
    clocks = (5, 12, 9, 30, 30, 31)  # also set back
    states = {Ensemble(0, 0, (0, 0), ())}
    for clock in clocks:
        states |= set(itertools.chain.from_iterable(steps(state, clock, checked=checked) for state in states))
        if any(list(state.tokens) != sorted(set(state.tokens)) for state in states):
            return True
    return False


def test_no_interleaving_lowers_a_token() -> None:
    """In all interleavings of reads, raises and creates, tokens rise in the order of creation."""
    assert not falls(checked=True)


def test_the_model_finds_the_fault_without_the_check() -> None:
    """Without the check of the base in the creating transaction, a later claim gets a lower token."""
    assert falls(checked=False)


def test_base_that_another_thread_raises_during_an_attempt(
    zookeeper1: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread whose client learns of a new base between two steps of its attempt still gets a token above earlier ones."""
    url = chroot(zookeeper1)
    with fencelock.connect(url) as slow, fencelock.connect(url) as fast:
        assert slow.lock("x", ttl=6).acquire().release()
        encode, wall, later = ClaimData.encode, wall_us, []

        def interrupted_encode(data: ClaimData) -> bytes:
            monkeypatch.setattr(ClaimData, "encode", encode)
            with monkeypatch.context() as patched:
                patched.setattr(namespace, "wall_us", lambda: wall() + 2 * MAX_LAG_US)
                with fast.lock("x", ttl=6, timeout=SOON) as lease:  # raises the base
                    later.append(lease.token)
            slow._client.engine._namespace.base = fast._client.engine._namespace.base  # type: ignore[attr-defined]
            return encode(data)

        monkeypatch.setattr(ClaimData, "encode", interrupted_encode)
        with slow.lock("x", ttl=6, timeout=SOON) as lease:
            assert lease.token > later[0]
