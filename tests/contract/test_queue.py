"""Order of service, names in use, and the admission rule: the engine compared with `blockers`."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from unittest.mock import ANY

import pytest

from fencelock import GuaranteeUnavailable, NotHeld
from fencelock.core.clock import NO_DEADLINE
from fencelock.core.engine import Engine
from fencelock.model import Claim, Grant, Mode, Renewal, Waiting, blockers
from tests.contract.engines import EngineCase
from tests.contract.factory import MakeClient
from tests.contract.runtimes import LocksView
from tests.contract.steps import waiting
from tests.contract.ttl_scale import TtlScale
from tests.support.waiting import SOON, eventually


async def test_traits_match_the_engine_table(case: EngineCase, locks: LocksView) -> None:
    """The traits of an engine are those that the table of this suite expects."""
    assert (locks.traits.fair, locks.traits.readers, locks.traits.permits) == (case.fair, case.shared, case.limit)


async def test_engine_without_readers_and_permits_refuses_such_claims(factory: MakeClient) -> None:
    """An engine without readers or permits refuses their claims and stores nothing."""
    engine = factory.engine()
    for claim, can, what in (
        (reader(), engine.traits.readers, "readers"),
        (permit(3), engine.traits.permits, "permits"),
    ):
        if can:
            assert isinstance(await engine.attempt(claim, enqueue=False, deadline=NO_DEADLINE), Grant)
            await engine.abandon(claim)
        else:
            with pytest.raises(GuaranteeUnavailable, match=what):
                await engine.attempt(claim, enqueue=False, deadline=NO_DEADLINE)
    assert (await engine.inspect("x")).holders == ()


@pytest.mark.fair
async def test_waiters_are_served_in_order(locks: LocksView) -> None:
    """Waiters get the lock in the order of arrival."""
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
async def test_try_acquire_never_overtakes_waiters(locks: LocksView) -> None:
    """try_acquire of a new client never gets the lock before the waiters, not even at the moment of a release."""
    lease = await locks.lock("x").acquire()
    waiter = asyncio.create_task(locks.lock("x").acquire())
    await waiting(locks, "x")
    await lease.release()
    assert await locks.lock("x").try_acquire() is None
    second = await waiter
    assert second.token > lease.token
    await second.release()


async def test_waiters_that_time_out_do_not_block_the_next(locks: LocksView) -> None:
    """Waiters whose timeout has ended do not block those behind them."""
    async with locks.lock("x"):
        impatient = [asyncio.create_task(locks.lock("x").acquire(timeout=1.5)) for _ in range(3)]
        await waiting(locks, "x", 3)
        patient = asyncio.create_task(locks.lock("x").acquire(timeout=SOON))
        await waiting(locks, "x", 4)
        outcomes = await asyncio.gather(*impatient, return_exceptions=True)
        assert {type(outcome).__name__ for outcome in outcomes} == {"LockTimeout"}
        assert len((await locks.inspect("x")).waiters) == 1
    await (await patient).release()


async def test_16_tasks_of_one_client_exclude_each_other(factory: MakeClient) -> None:
    """16 threads or tasks of one client that compete for few names are never two at once in a block of one name."""
    locks = factory.connect()
    inside = {f"n{number}": 0 for number in range(3)}
    entered = 0

    async def work(number: int) -> None:
        nonlocal entered
        rng = random.Random(number)
        last: dict[str, int] = {}
        for _ in range(15):
            name = f"n{rng.randrange(3)}"
            async with locks.lock(name, timeout=60) as lease:
                inside[name] += 1
                assert inside[name] == 1
                assert lease.token > last.get(name, 0)
                last[name] = lease.token
                entered += 1
                if rng.random() < 0.3:
                    await asyncio.sleep(0.001)
                inside[name] -= 1

    await asyncio.gather(*(work(number) for number in range(16)))
    assert entered == 16 * 15


async def test_shared_lock_object(factory: MakeClient) -> None:
    """One lock object used as a block by many threads or tasks at once gives each its own lease."""
    lock = factory.connect().lock("x", timeout=60)
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


async def test_names_lists_names_in_use(locks: LocksView) -> None:
    """`names` lists names with a holder or a waiter; a prefix is taken literally."""
    leases = [await locks.lock(name).acquire() for name in NAMES]
    assert [name async for name in locks.names()] == sorted(NAMES)
    for prefix in ["a", "a%", "a_", "a*", "ä", "日本", "🔒", "'", "a\\", "z", "%", "_"]:
        found = [name async for name in locks.names(prefix=prefix)]
        assert found == sorted(name for name in NAMES if name.startswith(prefix)), prefix
    for lease in leases:
        await lease.release()
    assert [name async for name in locks.names()] == []


async def test_names_omits_expired_holders(locks: LocksView, ttl_scale: TtlScale) -> None:
    """`names` does not list a name whose only holder has expired."""
    lease = await locks.lock("x", ttl=0.5, renew=False).acquire()
    assert [name async for name in locks.names()] == ["x"]
    await ttl_scale.outlast(lease.ttl)
    assert lease.lost.is_set()
    assert [name async for name in locks.names()] == []
    assert (await locks.inspect("x")).holders == ()


# ---------------------------------------------------------------------------- readers and permits, on the engine itself


async def attempt(engine: Engine, claim: Claim) -> Grant | Waiting:
    return await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)


def reader(name: str = "x", owner: str = "") -> Claim:
    return Claim(name, 60, owner, Mode.SHARED)


def permit(limit: int, name: str = "x", owner: str = "") -> Claim:
    return Claim(name, 60, owner, Mode.PERMIT, limit)


@pytest.mark.shared
async def test_readers_share_and_do_not_overtake_a_writer(factory: MakeClient) -> None:
    """Readers hold the name together and a writer alone; a reader does not overtake a waiting writer."""
    engine = factory.engine()
    readers = [await engine.attempt(reader(), enqueue=True, deadline=NO_DEADLINE) for _ in range(3)]
    assert all(isinstance(grant, Grant) for grant in readers)
    writer = Claim("x", 60)
    assert isinstance(await engine.attempt(writer, enqueue=True, deadline=NO_DEADLINE), Waiting)
    late = reader()
    assert isinstance(await engine.attempt(late, enqueue=True, deadline=NO_DEADLINE), Waiting)
    for grant in readers[:-1]:
        assert isinstance(grant, Grant)
        await engine.release(grant)
    assert isinstance(await engine.attempt(writer, enqueue=True, deadline=NO_DEADLINE), Waiting)
    last = readers[-1]
    assert isinstance(last, Grant)
    await engine.release(last)
    writing = await engine.attempt(writer, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(writing, Grant)
    assert isinstance(await engine.attempt(late, enqueue=True, deadline=NO_DEADLINE), Waiting)
    await engine.release(writing)
    assert isinstance(await engine.attempt(late, enqueue=True, deadline=NO_DEADLINE), Grant)


@pytest.mark.limit
async def test_permits_are_limited(factory: MakeClient) -> None:
    """As many claims as the limit hold permits, and each release admits one more."""
    engine = factory.engine()
    claims = [permit(3) for _ in range(5)]
    outcomes = [await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE) for claim in claims]
    assert [isinstance(outcome, Grant) for outcome in outcomes] == [True, True, True, False, False]
    second = outcomes[1]
    assert isinstance(second, Grant)
    await engine.release(second)
    assert isinstance(await engine.attempt(claims[3], enqueue=True, deadline=NO_DEADLINE), Grant)
    assert isinstance(await engine.attempt(claims[4], enqueue=True, deadline=NO_DEADLINE), Waiting)
    snapshot = await engine.inspect("x")
    assert [holder.limit for holder in snapshot.holders] == [3, 3, 3]
    assert all(holder.mode is Mode.PERMIT for holder in snapshot.holders)


@pytest.mark.limit
async def test_contenders_with_different_limits_respect_their_own(factory: MakeClient) -> None:
    """Beside three holders a claim with limit 5 is admitted, and a claim with limit 3 behind it is not."""
    engine = factory.engine()
    for _ in range(3):
        assert isinstance(await attempt(engine, permit(3)), Grant)
    larger, smaller, last = permit(5), permit(3), permit(5)
    assert isinstance(await attempt(engine, larger), Grant)
    assert isinstance(await attempt(engine, smaller), Waiting)
    assert isinstance(await attempt(engine, last), Waiting), "nobody overtakes a permit that waits"
    assert (await engine.inspect("x")).limits == (3, 5)


@pytest.mark.limit
async def test_any_departure_admits_the_next_permit(factory: MakeClient) -> None:
    """Of eight claims with limit 3, each release admits exactly one more."""
    engine = factory.engine()
    claims = [permit(3) for _ in range(8)]
    outcomes = [await attempt(engine, claim) for claim in claims]
    holding = [outcome for outcome in outcomes if isinstance(outcome, Grant)]
    for claim in claims[3:]:
        await engine.release(holding.pop(len(holding) // 2))
        granted = await attempt(engine, claim)
        assert isinstance(granted, Grant)
        holding.append(granted)
        assert len((await engine.inspect("x")).holders) == 3


@pytest.mark.shared
async def test_downgrade_admits_the_readers_behind_it(factory: MakeClient) -> None:
    """A writer that becomes a reader keeps its token; readers directly behind it are admitted, a queued writer is not."""
    engine = factory.engine()
    writing = await attempt(engine, Claim("x", 60, "w"))
    assert isinstance(writing, Grant)
    readers, writer, late = [reader(), reader()], Claim("x", 60), reader()
    for claim in (*readers, writer, late):
        assert isinstance(await attempt(engine, claim), Waiting)
    reading = await engine.downgrade(writing)
    assert (reading.token, reading.claim.mode, reading.claim.id) == (writing.token, Mode.SHARED, writing.claim.id)
    assert await engine.downgrade(writing) == reading._replace(since=ANY)
    assert all([isinstance(await attempt(engine, claim), Grant) for claim in readers])
    assert isinstance(await attempt(engine, writer), Waiting)
    assert isinstance(await attempt(engine, late), Waiting)
    snapshot = await engine.inspect("x")
    assert [holder.mode for holder in snapshot.holders] == [Mode.SHARED] * 3
    assert writing.token in [holder.token for holder in snapshot.holders]
    assert await engine.renew([reading]) == [Renewal.RENEWED]
    assert await engine.release(reading) is True
    for claim in readers:
        await engine.abandon(claim)
    assert isinstance(await attempt(engine, writer), Grant)


@pytest.mark.shared
async def test_attempt_that_arrives_after_the_downgrade_leaves_a_reader(factory: MakeClient) -> None:
    """A repeated attempt of a writer that reaches the engine after its downgrade leaves it a reader, beside the others."""
    engine = factory.engine()
    claim, other = Claim("x", 60, "w"), reader()
    writing = await attempt(engine, claim)
    assert isinstance(writing, Grant)
    reading = await engine.downgrade(writing)
    beside = await attempt(engine, other)
    assert isinstance(beside, Grant)
    late = await attempt(engine, claim)
    assert isinstance(late, Grant)
    assert late.token == writing.token
    assert [holder.mode for holder in (await engine.inspect("x")).holders] == [Mode.SHARED] * 2
    assert await engine.renew([beside]) == [Renewal.RENEWED]
    assert await engine.release(reading) is True
    assert isinstance(await attempt(engine, Claim("x", 60)), Waiting)


@pytest.mark.shared
async def test_downgrade_of_a_removed_holder_raises_not_held(factory: MakeClient) -> None:
    """A holder that was removed gets NotHeld from the downgrade, and does not come back as a reader."""
    engine = factory.engine()
    writing = await attempt(engine, Claim("x", 60))
    assert isinstance(writing, Grant)
    await engine.force_release("x")
    with pytest.raises(NotHeld, match="'x'"):
        await engine.downgrade(writing)
    assert (await engine.inspect("x")).holders == ()


@pytest.mark.shared
async def test_abandon_removes_a_downgraded_claim(factory: MakeClient) -> None:
    """`abandon` with the original, exclusive claim removes the downgraded claim."""
    engine = factory.engine()
    claim = Claim("x", 60)
    writing = await attempt(engine, claim)
    assert isinstance(writing, Grant)
    await engine.downgrade(writing)
    await engine.abandon(claim)
    assert (await engine.inspect("x")).holders == ()


VALUES = ["", "http://web-7:8080", "a:b\nc\td", 'it\'s */ "quoted" \\ 100 %', "日本 🔒", "x" * 1024]


async def test_values_come_back_unchanged(factory: MakeClient) -> None:
    """The value of a claim is shown for holders and for waiters exactly as it was given."""
    engine = factory.engine()
    for number, value in enumerate(VALUES):
        name = f"x{number}"
        assert isinstance(await attempt(engine, Claim(name, 60, "a", value=value)), Grant)
        assert isinstance(await attempt(engine, Claim(name, 60, "b", value=value)), Waiting)

        async def enqueued(name: str = name) -> bool:  # a session that has to wait enqueues a moment later
            return bool((await engine.inspect(name)).waiters)

        await eventually(enqueued, "the second claim waits")
        snapshot = await engine.inspect(name)
        assert [(holder.owner, holder.value) for holder in snapshot.holders] == [("a", value)]
        assert [(waiter.owner, waiter.value) for waiter in snapshot.waiters] == [("b", value)]


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
    """The engine's queue agrees with `blockers`: a claim that it admits, given all claims ahead, holds the name."""

    def __init__(self) -> None:
        self.queue: list[Member] = []

    def advance_queue(self) -> None:
        for member in self.queue:
            if member.token is None and not blockers(self.queue, member):
                member.token = 0

    def holders(self) -> list[str]:
        return [member.claim.owner for member in self.queue if member.token is not None]

    def waiters(self) -> list[str]:
        return [member.claim.owner for member in self.queue if member.token is None]


@pytest.mark.limit
@pytest.mark.parametrize("seed", range(4))
async def test_engine_admits_the_claims_that_blockers_allows(factory: MakeClient, seed: int) -> None:
    """On random histories the engine holds and queues exactly the claims that `blockers` allows, and tokens only increase."""
    rng = random.Random(seed)
    engine, other = factory.engine(), factory.engine()
    model = Model()
    kinds: list[list[int | None]] = [[None], [2], [1, 3], [None, 1, 2, 3]]
    limits = rng.choice(kinds)
    granted: dict[str, Grant] = {}
    highest = 0
    for step in range(120):
        case: Engine = rng.choice([engine, other])
        what = rng.random()
        if what < 0.5 or not model.queue:
            owner = f"c{step}"
            claim = Claim("x", 60, owner)
            if rng.random() < 0.6:
                limit = rng.choice(limits)
                claim = Claim("x", 60, owner, Mode.of(True, limit), limit)
            enqueue = rng.random() < 0.8
            member = Member(claim, case)
            model.queue.append(member)
            model.advance_queue()
            outcome = await case.attempt(claim, enqueue=enqueue, deadline=NO_DEADLINE)
            assert isinstance(outcome, Grant) == (member.token is not None)
            if isinstance(outcome, Grant):
                granted[claim.id] = outcome
                assert outcome.token > highest
                highest = outcome.token
            elif not enqueue:
                model.queue.remove(member)
        elif what < 0.75:
            member = rng.choice(model.queue)
            model.queue.remove(member)
            if member.claim.id in granted and rng.random() < 0.7:
                assert await case.release(granted.pop(member.claim.id)) is True
            else:
                await case.abandon(member.claim)
                granted.pop(member.claim.id, None)
        elif what < 0.8:
            dropped = [member for member in model.queue if member.token is not None]
            model.queue = [member for member in model.queue if member.token is None]
            assert await case.force_release("x") == len(dropped)
        else:
            member = rng.choice(model.queue)
            if case.traits.session:
                case = member.case  # a claim belongs to its client's session; another session cannot keep it
            outcome = await case.attempt(
                member.claim, enqueue=True, deadline=NO_DEADLINE
            )  # keeps its place in the queue
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
