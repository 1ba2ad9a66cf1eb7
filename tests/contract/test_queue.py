"""Order of service, names in use, and the one rule of admission: what the engine does against what `admit` says."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from fencelock import GuaranteeUnavailable, LimitMismatch
from fencelock.core.engine import Engine
from fencelock.model import Admitted, Claim, Grant, Waiting, admit
from tests.contract.engines import EngineCase
from tests.contract.runtimes import LocksView
from tests.contract.subject import SOON, Subject, waiting
from tests.contract.ttl_scale import TtlScale


async def test_traits(case: EngineCase, locks: LocksView) -> None:
    """What this suite expects of an engine is what the engine says of itself."""
    assert (locks.traits.fair, locks.traits.shared, locks.traits.limit) == (case.fair, case.shared, case.limit)


async def test_shared_claims_are_refused_where_there_are_none(subject: Subject) -> None:
    """An engine without readers and permits says so, and takes nothing."""
    engine = subject.engine()
    for claim, can, what in (
        (reader(), engine.traits.shared, "readers"),
        (permit(3), engine.traits.limit, "permits"),
    ):
        if can:
            assert isinstance(await engine.attempt(claim, queue=False), Grant)
            await engine.abandon(claim)
        else:
            with pytest.raises(GuaranteeUnavailable, match=what):
                await engine.attempt(claim, queue=False)
    assert (await engine.inspect("x")).holders == ()


@pytest.mark.fair
async def test_first_come_first_served(locks: LocksView) -> None:
    """Waiters are served in the order in which they came."""
    served: list[int] = []

    async def work(number: int) -> None:
        async with locks.lock("x", timeout=SOON):
            served.append(number)

    async with locks.lock("x"):
        tasks = []
        for number in range(12):
            tasks.append(asyncio.create_task(work(number)))
            await waiting(locks, "x", number + 1)
    await asyncio.gather(*tasks)
    assert served == list(range(12))


@pytest.mark.fair
async def test_nobody_overtakes(locks: LocksView) -> None:
    """A newcomer's try does not get past those who wait, not even at the moment of a release."""
    lease = await locks.lock("x").acquire()
    waiter = asyncio.create_task(locks.lock("x").acquire())
    await waiting(locks, "x")
    await lease.release()
    assert await locks.lock("x").try_acquire() is None
    second = await waiter
    assert second.token > lease.token
    await second.release()


async def test_waiters_that_give_up(locks: LocksView) -> None:
    """Waiters whose time is over are out of the way of those behind them."""
    async with locks.lock("x"):
        impatient = [asyncio.create_task(locks.lock("x").acquire(timeout=1.5)) for _ in range(3)]
        await waiting(locks, "x", 3)
        patient = asyncio.create_task(locks.lock("x").acquire(timeout=SOON))
        await waiting(locks, "x", 4)
        outcomes = await asyncio.gather(*impatient, return_exceptions=True)
        assert {type(outcome).__name__ for outcome in outcomes} == {"LockTimeout"}
        assert len((await locks.inspect("x")).waiters) == 1
    await (await patient).release()


async def test_shared_client(subject: Subject) -> None:
    """16 threads or tasks of one client, on few names, are never two at once in a block."""
    locks = subject.connect()
    inside = {f"n{number}": 0 for number in range(3)}
    entered = 0

    async def work(number: int) -> None:
        nonlocal entered
        chance = random.Random(number)
        last: dict[str, int] = {}
        for _ in range(15):
            name = f"n{chance.randrange(3)}"
            async with locks.lock(name, timeout=60) as lease:
                inside[name] += 1
                assert inside[name] == 1
                assert lease.token > last.get(name, 0)
                last[name] = lease.token
                entered += 1
                if chance.random() < 0.3:
                    await asyncio.sleep(0.001)
                inside[name] -= 1

    await asyncio.gather(*(work(number) for number in range(16)))
    assert entered == 16 * 15


async def test_shared_lock_object(subject: Subject) -> None:
    """One lock object used as a block by many threads or tasks at once gives each its own lease."""
    lock = subject.connect().lock("x", timeout=60)
    tokens: list[int] = []

    async def work() -> None:
        for _ in range(10):
            async with lock as lease:
                tokens.append(lease.token)
                await asyncio.sleep(0)
                assert lease.token == tokens[-1]

    await asyncio.gather(*(work() for _ in range(8)))
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 80


NAMES = ["a", "A", "a%", "a_", "ab", "a*", "b", "ä", "a\u0308", "日本", "日本語", "🔒", "🔒🔒", "a/b", "a\\b", "'a'"]


async def test_names(locks: LocksView) -> None:
    """`names` lists what has a holder or a waiter; a prefix is taken literally."""
    leases = [await locks.lock(name).acquire() for name in NAMES]
    assert [name async for name in locks.names()] == sorted(NAMES)
    for prefix in ["a", "a%", "a_", "a*", "ä", "日本", "🔒", "'", "a\\", "z", "%", "_"]:
        found = [name async for name in locks.names(prefix=prefix)]
        assert found == sorted(name for name in NAMES if name.startswith(prefix)), prefix
    for lease in leases:
        await lease.release()
    assert [name async for name in locks.names()] == []


async def test_names_of_the_dead(locks: LocksView, pace: TtlScale) -> None:
    """A name whose holder ran out is not in use any more."""
    lease = await locks.lock("x", ttl=0.5, renew=False).acquire()
    assert [name async for name in locks.names()] == ["x"]
    await pace.outlast(lease.ttl)
    assert lease.lost.is_set()
    assert [name async for name in locks.names()] == []
    assert (await locks.inspect("x")).holders == ()


# ---------------------------------------------------------------------------- readers and permits, on the engine itself


def reader(name: str = "x", owner: str = "") -> Claim:
    return Claim(name, 60, owner, shared=True)


def permit(limit: int, name: str = "x", owner: str = "") -> Claim:
    return Claim(name, 60, owner, shared=True, limit=limit)


@pytest.mark.shared
async def test_readers_share(subject: Subject) -> None:
    """Readers hold the name together, a writer alone, and a reader does not overtake a writer that waits."""
    engine = subject.engine()
    readers = [await engine.attempt(reader(), queue=True) for _ in range(3)]
    assert all(isinstance(grant, Grant) for grant in readers)
    writer = Claim("x", 60)
    assert isinstance(await engine.attempt(writer, queue=True), Waiting)
    late = reader()
    assert isinstance(await engine.attempt(late, queue=True), Waiting)
    for grant in readers[:-1]:
        assert isinstance(grant, Grant)
        await engine.release(grant)
    assert isinstance(await engine.attempt(writer, queue=True), Waiting)
    last = readers[-1]
    assert isinstance(last, Grant)
    await engine.release(last)
    writing = await engine.attempt(writer, queue=True)
    assert isinstance(writing, Grant)
    assert isinstance(await engine.attempt(late, queue=True), Waiting)
    await engine.release(writing)
    assert isinstance(await engine.attempt(late, queue=True), Grant)


@pytest.mark.limit
async def test_permits(subject: Subject) -> None:
    """As many permits are out as the limit says, and one comes free when any of them is given back."""
    engine = subject.engine()
    claims = [permit(3) for _ in range(5)]
    outcomes = [await engine.attempt(claim, queue=True) for claim in claims]
    assert [isinstance(outcome, Grant) for outcome in outcomes] == [True, True, True, False, False]
    second = outcomes[1]
    assert isinstance(second, Grant)
    await engine.release(second)
    assert isinstance(await engine.attempt(claims[3], queue=True), Grant)
    assert isinstance(await engine.attempt(claims[4], queue=True), Waiting)
    snapshot = await engine.inspect("x")
    assert [holder.limit for holder in snapshot.holders] == [3, 3, 3]
    assert all(holder.shared for holder in snapshot.holders)


@pytest.mark.limit
@pytest.mark.parametrize("other", [permit(5), reader()], ids=["permits", "readers"])
async def test_limit_that_contradicts(subject: Subject, other: Claim) -> None:
    """Who uses a name with another limit is told, with both numbers, and leaves nothing behind."""
    engine = subject.engine()
    grant = await engine.attempt(permit(3), queue=True)
    assert isinstance(grant, Grant)
    with pytest.raises(LimitMismatch, match="3 permits") as caught:
        await engine.attempt(other, queue=True)
    assert caught.value.name == "x"
    snapshot = await engine.inspect("x")
    assert (len(snapshot.holders), len(snapshot.waiters)) == (1, 0)
    await engine.release(grant)
    assert isinstance(await engine.attempt(other, queue=True), Grant)


@dataclass
class Member:
    claim: Claim
    case: Engine
    token: int | None = None

    @property
    def id(self) -> str:
        return self.claim.id

    @property
    def shared(self) -> bool:
        return self.claim.shared

    @property
    def limit(self) -> int | None:
        return self.claim.limit


class Model:
    """The queue as the words of `admit` have it: whoever is admitted, given all who came before, holds the name."""

    def __init__(self) -> None:
        self.queue: list[Member] = []

    def advance_queue(self) -> None:
        for member in self.queue:
            if member.token is None and isinstance(admit(self.queue, member), Admitted):
                member.token = 0

    def holders(self) -> list[str]:
        return [member.claim.owner for member in self.queue if member.token is not None]

    def waiters(self) -> list[str]:
        return [member.claim.owner for member in self.queue if member.token is None]


@pytest.mark.limit
@pytest.mark.parametrize("seed", range(4))
async def test_engine_against_admit(subject: Subject, seed: int) -> None:
    """On random histories the engine holds and queues exactly whom `admit` says, with tokens that only rise."""
    chance = random.Random(seed)
    engine, other = subject.engine(), subject.engine()
    model = Model()
    limit = chance.choice([None, None, 1, 2, 3])
    granted: dict[str, Grant] = {}
    highest = 0
    for step in range(120):
        case: Engine = chance.choice([engine, other])
        what = chance.random()
        if what < 0.5 or not model.queue:
            owner = f"c{step}"
            claim = Claim("x", 60, owner, shared=chance.random() < 0.6, limit=None)
            if claim.shared:
                claim = Claim("x", 60, owner, shared=True, limit=limit)
            queue = chance.random() < 0.8
            member = Member(claim, case)
            model.queue.append(member)
            model.advance_queue()
            outcome = await case.attempt(claim, queue=queue)
            assert isinstance(outcome, Grant) == (member.token is not None)
            if isinstance(outcome, Grant):
                granted[claim.id] = outcome
                assert outcome.token > highest
                highest = outcome.token
            elif not queue:
                model.queue.remove(member)
        elif what < 0.75:
            member = chance.choice(model.queue)
            model.queue.remove(member)
            if member.claim.id in granted and chance.random() < 0.7:
                assert await case.release(granted.pop(member.claim.id)) is True
            else:
                await case.abandon(member.claim)
                granted.pop(member.claim.id, None)
        elif what < 0.8:
            dropped = [member for member in model.queue if member.token is not None]
            model.queue = [member for member in model.queue if member.token is None]
            assert await case.force_release("x") == len(dropped)
        else:
            member = chance.choice(model.queue)
            if case.traits.session:
                case = member.case  # a claim hangs on its client's session, and nobody else's can keep it
            outcome = await case.attempt(member.claim, queue=True)  # a sign of life; the place in line stays
            assert isinstance(outcome, Grant) == (member.token is not None)
            if isinstance(outcome, Grant):
                known = granted.setdefault(member.claim.id, outcome)
                assert known.token == outcome.token
        model.advance_queue()
        snapshot = await case.inspect("x")
        assert [holder.owner for holder in snapshot.holders] == model.holders()
        assert [waiter.owner for waiter in snapshot.waiters] == model.waiters()
        tokens = [holder.token for holder in snapshot.holders]
        assert len(set(tokens)) == len(tokens)
        highest = max([highest, *tokens])
    for member in model.queue:
        await engine.abandon(member.claim)
    snapshot = await engine.inspect("x")
    assert (snapshot.holders, snapshot.waiters) == ((), ())
