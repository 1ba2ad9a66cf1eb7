"""Broken variants of fencelock: each has one mistake that real lock libraries make, and that the checker must find.

Each is a context manager that breaks the production code in this process. To see one fail:
`python -m fencelock.sim --seeds 500 --variant tests.sim.variants:release_without_owner`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from fencelock import model
from fencelock.core import acquire, block, lease_state
from fencelock.core.clock import Deadline
from fencelock.core.engine import Engine
from fencelock.core.group import BaseGroup
from fencelock.core.lease import BaseLease
from fencelock.core.leftovers import Leftovers
from fencelock.core.runtime import Runtime
from fencelock.core.watch import StopSignal
from fencelock.engines import memory
from fencelock.engines.memory import AttemptReply, MemoryEngine, MemoryStore, QueuedClaim
from fencelock.errors import EngineUnavailable
from fencelock.fences import Fenced
from fencelock.fences.memory import MemoryFence
from fencelock.model import Claim, Grant, Mode, Renewal, Snapshot, Waiting
from fencelock.primitives import election
from fencelock.primitives.election import BaseElection, Leader, leader_of
from fencelock.sim import program
from fencelock.sim.locks import SimLease
from fencelock.sim.memory_engine import SimMemoryEngine
from fencelock.sim.resource import Resource


@contextmanager
def release_without_owner() -> Iterator[None]:
    """A release frees the name, whatever claim holds it: a repeated release frees the successor."""

    def release(self: MemoryStore, claim: Claim) -> bool:
        held = [entry for entry in self._queues.get(claim.name, ()) if entry.token is not None]
        for entry in held:
            self._remove(entry.claim)
        return bool(held)

    with patch.object(MemoryStore, "release", release):
        yield


@contextmanager
def deadline_from_reply() -> Iterator[None]:
    """The ttl counts from the reply, as if it had taken no time."""
    attempt = MemoryEngine.attempt

    async def late(self: MemoryEngine, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        return (await attempt(self, claim, enqueue=enqueue, deadline=deadline))._replace(since=self._runtime.now())

    with patch.object(MemoryEngine, "attempt", late):
        yield


@contextmanager
def renewal_from_reply() -> Iterator[None]:
    """A renewal counts from its reply, not from when it was sent."""
    renewed = BaseLease._apply_renewal

    def late(self: BaseLease, answer: Renewal, sent: float, why: str | None = None) -> None:
        renewed(self, answer, self._client.runtime.now(), why)

    with patch.object(BaseLease, "_apply_renewal", late):
        yield


@contextmanager
def no_drift_margin() -> Iterator[None]:
    """The deadline has no margin for clocks of different rates."""
    with (
        patch.object(model, "clock_margin", lambda ttl: 0.0),
        patch.object(lease_state, "clock_margin", lambda ttl: 0.0),
    ):
        yield


@contextmanager
def unknown_is_renewed() -> Iterator[None]:
    """A renewal without a reply counts as a success."""
    renew = MemoryEngine.renew

    async def hopeful(self: MemoryEngine, grants: Sequence[Grant]) -> list[Renewal]:
        try:
            return await renew(self, grants)
        except EngineUnavailable:
            return [Renewal.RENEWED] * len(grants)

    with patch.object(MemoryEngine, "renew", hopeful):
        yield


@contextmanager
def cancel_without_abandon() -> Iterator[None]:
    """The claim of a cancelled waiter stays in the queue."""
    with _no_clean_up_in(acquire.acquire):
        yield


@contextmanager
def _no_clean_up_in(caller: Callable[..., object]) -> Iterator[None]:
    """The claim of a cancelled caller stays on the engine, and is not a leftover."""
    abandon_shielded = Leftovers.abandon_shielded

    async def forgetful(self: Leftovers, *claims: Claim) -> None:
        awaiting = sys._getframe(1)
        if awaiting.f_code is not caller.__code__:
            await abandon_shielded(self, *claims)

    with patch.object(Leftovers, "abandon_shielded", forgetful):
        yield


@contextmanager
def abandon_without_tombstone() -> Iterator[None]:
    """An abandon does not stop an attempt that arrives after it."""

    def abandon(self: MemoryStore, claim: Claim) -> None:
        self._remove(claim)

    with patch.object(MemoryStore, "abandon", abandon):
        yield


@contextmanager
def release_without_abandon() -> Iterator[None]:
    """A cancelled release is not completed."""
    with _no_clean_up_in(BaseLease._release):
        yield


@contextmanager
def attempt_in_flight_is_forgotten() -> Iterator[None]:
    """An attempt that arrives after the release of its claim acquires the lock for no caller (found by this simulation)."""

    with patch.object(Grant, "attempt_in_flight", property(lambda self: False)):
        yield


@contextmanager
def deadline_from_wake_up() -> Iterator[None]:
    """A grant to a waiter counts from when the waiter noticed it; the waiter may have been paused until then."""
    wait = MemoryEngine.wait

    async def late(self: MemoryEngine, waiting: Waiting, timeout: float) -> Grant | None:
        outcome = await wait(self, waiting, timeout)
        return outcome._replace(since=self._runtime.now()) if isinstance(outcome, Grant) else outcome

    with patch.object(MemoryEngine, "wait", late):
        yield


@contextmanager
def fence_after_read() -> Iterator[None]:
    """The fence is checked only when writing, after the value that the write depends on was read."""

    def read_step(self: Resource, _: Fenced) -> int:
        return self._value

    with patch.object(Resource, "read_step", read_step):
        yield


@contextmanager
def fence_takes_equal_tokens() -> Iterator[None]:
    """The fence compares tokens but not the ids of the claims."""
    check = MemoryFence._advance

    def lenient(self: MemoryFence, lease: Fenced, resource: str) -> str:
        mark = self._marks.get(resource)
        if mark is not None and mark.token == lease.token:
            self._marks[resource] = mark._replace(id=lease.id)
        return check(self, lease, resource)

    with patch.object(MemoryFence, "_advance", lenient):
        yield


@contextmanager
def last_come_first_served() -> Iterator[None]:
    """The engine grants the lock to the claim that came last."""
    advance_queue = MemoryStore._advance

    def backwards(self: MemoryStore, name: str, now: float) -> Any:
        entries = self._queues.get(name, [])
        waiting = [entry for entry in entries if entry.token is None]
        entries[:] = [entry for entry in entries if entry.token is not None] + waiting[::-1]
        answer = advance_queue(self, name, now)
        entries[:] = [entry for entry in entries if entry not in waiting] + [e for e in waiting if e in entries]
        return answer

    with patch.object(MemoryStore, "_advance", backwards):
        yield


@contextmanager
def one_permit_too_many() -> Iterator[None]:
    """One permit more than the limit is admitted."""
    rule = model.blockers

    def generous(queue: Sequence[model.Contender], me: model.Contender) -> tuple[str, ...]:
        ahead = [place.id for place in queue]
        at = ahead.index(me.id) if me.id in ahead else len(ahead)
        return () if me.limit is not None and at == me.limit else rule(queue, me)

    with patch.object(model, "blockers", generous):
        yield


@contextmanager
def writers_ignore_readers() -> Iterator[None]:
    """A writer waits for writers only."""
    rule = model.blockers

    def rude(queue: Sequence[model.Contender], me: model.Contender) -> tuple[str, ...]:
        return rule(queue if me.shared else [place for place in queue if not place.shared], me)

    with patch.object(model, "blockers", rude):
        yield


@contextmanager
def tokens_from_the_wall() -> Iterator[None]:
    """Tokens are the wall clock, which can be set back."""
    with patch.object(MemoryStore, "_mint", lambda self: self._wall()):
        yield


@contextmanager
def waiters_are_not_woken() -> Iterator[None]:
    """A waiter is not woken when it is granted the lock."""
    with patch.object(SimMemoryEngine, "_remote_callback", lambda self, wake: lambda: None):
        yield


@contextmanager
def wakeups_are_missed() -> Iterator[None]:
    """A waiter asks for its wake-up after it was enqueued, in a second request; a grant in between does not wake it."""
    attempt, wait = MemoryStore.attempt, MemoryEngine.wait

    def enqueue_only(self: MemoryStore, claim: Claim, enqueue: bool, _: object = None) -> AttemptReply:
        return attempt(self, claim, enqueue, None)

    async def register_and_wait(self: MemoryEngine, waiting: Waiting, timeout: float) -> Grant | None:
        claim = waiting.claim
        if (event := self._events.get(claim.id)) is not None:
            wake = self._remote_callback(event.set)

            def register() -> None:
                if (entry := self._store._find(claim)) is not None:
                    entry.wake = wake

            await self._call(register)
        return await wait(self, waiting, timeout)

    with patch.object(MemoryStore, "attempt", enqueue_only), patch.object(MemoryEngine, "wait", register_and_wait):
        yield


@contextmanager
def limit_of_the_others() -> Iterator[None]:
    """A permit counts the highest limit in the queue, not its own."""
    rule = model.blockers

    def generous(queue: Sequence[model.Contender], me: model.Contender) -> tuple[str, ...]:
        limits = [entry.limit for entry in [*queue, me] if entry.limit is not None]
        if me.limit is None or len(queue) >= max(limits):
            return rule(queue, me)
        return ()

    with patch.object(model, "blockers", generous):
        yield


@contextmanager
def readers_overtake_writers() -> Iterator[None]:
    """A reader is admitted beside other readers although a writer waits ahead of it."""

    def advance(queue: Sequence[QueuedClaim], now: float) -> model.QueueUpdate[QueuedClaim]:
        update = model.advance_queue(queue, now)
        ahead = [entry for entry in queue if entry.token is not None or entry in update.admitted]
        if ahead and all(entry.shared for entry in ahead):
            readers = [entry for entry in queue if entry.shared and entry.token is None and entry.expires > now]
            update.admitted += [entry for entry in readers if entry not in update.admitted]
        return update

    with patch.object(memory, "advance_queue", advance):
        yield


@contextmanager
def readers_share_one_ttl() -> Iterator[None]:
    """The renewal of one reader restarts the ttl of all readers of the name, dead ones too."""
    renew = MemoryStore.renew

    def renew_all(self: MemoryStore, claims: Sequence[Claim]) -> list[Renewal]:
        answers = renew(self, claims)
        for claim in claims:
            for entry in self._queues.get(claim.name, ()):
                if claim.shared and entry.token is not None:
                    entry.expires = max(entry.expires, self._now() + claim.ttl)
        return answers

    with patch.object(MemoryStore, "renew", renew_all):
        yield


@contextmanager
def dead_reader_is_renewed() -> Iterator[None]:
    """The renewal of a reader that has expired puts it back, and the client believes it."""
    renew = MemoryStore.renew

    def revive(self: MemoryStore, claims: Sequence[Claim]) -> list[Renewal]:
        answers = renew(self, claims)
        return [Renewal.RENEWED if claim.shared else answer for claim, answer in zip(claims, answers, strict=True)]

    renewed = BaseLease._apply_renewal

    def believe(self: BaseLease, answer: Renewal, sent: float, why: str | None = None) -> None:
        if answer is Renewal.RENEWED and not self._over:
            self._extend(self._client.runtime.now(), self.ttl)
        else:
            renewed(self, answer, sent, why)

    with patch.object(MemoryStore, "renew", revive), patch.object(BaseLease, "_apply_renewal", believe):
        yield


@contextmanager
def expired_waiter_is_granted() -> Iterator[None]:
    """The queue keeps waiters whose ttl is over, and grants them the lock when their turn comes."""

    def advance(queue: Sequence[QueuedClaim], now: float) -> model.QueueUpdate[QueuedClaim]:
        for entry in queue:
            if entry.token is None:
                entry.expires = max(entry.expires, now + 1e-6)
        return model.advance_queue(queue, now)

    with patch.object(memory, "advance_queue", advance):
        yield


@contextmanager
def late_grant_is_believed() -> Iterator[None]:
    """A waiter that was stopped believes the grant that it finds afterwards, without a renewal."""

    async def believe(runtime: Runtime, engine: Engine, grant: Grant, answer_by: Deadline) -> Grant:
        return grant._replace(since=runtime.now())

    with patch.object(acquire, "_freshen", believe):
        yield


@contextmanager
def downgrade_mints_a_token() -> Iterator[None]:
    """A downgrade gives the lease a new token."""
    downgrade = MemoryStore.downgrade

    def mint(self: MemoryStore, claim: Claim) -> bool:
        done = downgrade(self, claim)
        for entry in self._queues.get(claim.name, ()):
            if done and entry.id == claim.id:
                entry.token = self._mint()
        return done

    with patch.object(MemoryStore, "downgrade", mint):
        yield


@contextmanager
def downgrade_in_two_steps() -> Iterator[None]:
    """A downgrade releases the lock and takes it again as a reader; in between, the next waiter gets it."""
    downgrade = MemoryStore.downgrade

    def two_steps(self: MemoryStore, claim: Claim) -> bool:
        mine = next((entry for entry in self._queues.get(claim.name, ()) if entry.id == claim.id), None)
        if mine is None or not downgrade(self, claim):
            return False
        self._remove(claim)
        self._queues.setdefault(claim.name, []).append(mine)
        return True

    with patch.object(MemoryStore, "downgrade", two_steps):
        yield


@contextmanager
def multi_in_the_callers_order() -> Iterator[None]:
    """A multi-lock acquires in the order in which its caller names the locks."""

    def unsorted(names: Sequence[str], read: Sequence[str], write: Sequence[str]) -> dict[str, Mode]:
        return dict.fromkeys(read, Mode.SHARED) | dict.fromkeys((*names, *write), Mode.EXCLUSIVE)

    with patch.object(program, "modes_of", unsorted):
        yield


@contextmanager
def failed_multi_keeps_its_leases() -> Iterator[None]:
    """A multi-lock that is cancelled or times out half-way leaves the locks that it already has."""
    with patch.object(SimLease, "_withdraw", lambda self: None):
        yield


@contextmanager
def cancelled_release_of_a_group_stops() -> Iterator[None]:
    """A group whose release is cancelled keeps the leases that were not released yet (found by this simulation)."""

    async def release(self: BaseGroup) -> bool:
        return all([await lease._release() for lease in reversed(self._members)])

    # The end of a block would give up what the release left.
    with patch.object(BaseGroup, "_release", release), patch.object(block, "give_up", lambda _: None):
        yield


@contextmanager
def election_does_not_wait_for_the_work() -> Iterator[None]:
    """The candidate resigns although the work of its term still runs."""

    async def lead(self: BaseElection[SimLease], term: SimLease, work: Callable[[SimLease], Any]) -> None:
        async def run() -> None:
            with suppress(Exception):
                await work(term)

        runtime = self._client.runtime
        runtime.spawn(run(), "work")
        try:
            await runtime.sleep(0.3)
        finally:
            await term._release()

    with patch.object(BaseElection, "_lead", lead):
        yield


@contextmanager
def observer_without_token_filter() -> Iterator[None]:
    """An observer yields every state that it reads, also an older one."""

    async def observe(self: BaseElection[SimLease], stop: StopSignal | None) -> AsyncIterator[Leader | None]:
        async for snapshot in self._client.watches.watch(self.name, stop):
            yield leader_of(snapshot)

    with patch.object(BaseElection, "observe", observe):
        yield


@contextmanager
def value_of_the_next_candidate() -> Iterator[None]:
    """An observer sees the leader with the value of the first candidate that waits."""

    def wrong(snapshot: Snapshot) -> Leader | None:
        leader = leader_of(snapshot)
        if leader is None or not snapshot.waiters:
            return leader
        return leader._replace(value=snapshot.waiters[0].value)

    with patch.object(election, "leader_of", wrong):
        yield


@dataclass(frozen=True, slots=True)
class Variant:
    """A mistake, the scenario that shows it, and the check that must find it."""

    broken: Callable[[], AbstractContextManager[None]]
    scenario: str
    check: str
    within: int
    """The number of seeds that it may take."""
    primitive: str = "lock"

    @property
    def name(self) -> str:
        return self.broken.__name__


VARIANTS = (
    Variant(release_without_owner, "lossy", "exclusion", 50),
    Variant(deadline_from_reply, "stops", "exclusion", 800),
    Variant(renewal_from_reply, "kept", "exclusion", 800),
    Variant(deadline_from_wake_up, "stops", "exclusion", 150),
    Variant(no_drift_margin, "drift", "exclusion", 150),
    Variant(unknown_is_renewed, "outage", "exclusion", 150),
    Variant(cancel_without_abandon, "calm", "wake-ups", 50),
    Variant(waiters_are_not_woken, "calm", "wake-ups", 50),
    Variant(wakeups_are_missed, "calm", "wake-ups", 150),
    Variant(abandon_without_tombstone, "late", "orphans", 200),
    Variant(release_without_abandon, "late", "orphans", 400),
    Variant(attempt_in_flight_is_forgotten, "late", "orphans", 400),
    Variant(fence_after_read, "wiped", "resource", 150),
    Variant(fence_takes_equal_tokens, "reborn", "resource", 400),
    Variant(last_come_first_served, "calm", "order", 50),
    Variant(tokens_from_the_wall, "calm", "tokens", 50),
    Variant(writers_ignore_readers, "calm", "exclusion", 50, "rwlock"),
    Variant(readers_overtake_writers, "calm", "order", 50, "rwlock"),
    Variant(readers_share_one_ttl, "stops", "orphans", 300, "rwlock"),
    Variant(dead_reader_is_renewed, "stops", "exclusion", 300, "rwlock"),
    Variant(downgrade_mints_a_token, "calm", "downgrade", 50, "rwlock"),
    Variant(downgrade_in_two_steps, "calm", "exclusion", 50, "rwlock"),
    Variant(one_permit_too_many, "calm", "exclusion", 50, "semaphore"),
    Variant(limit_of_the_others, "calm", "exclusion", 50, "semaphore"),
    Variant(expired_waiter_is_granted, "stops", "orphans", 150),
    Variant(late_grant_is_believed, "stops", "exclusion", 150),
    Variant(multi_in_the_callers_order, "calm", "end", 100, "multi"),
    Variant(failed_multi_keeps_its_leases, "calm", "group", 100, "multi"),
    Variant(cancelled_release_of_a_group_stops, "calm", "group", 100, "multi"),
    Variant(election_does_not_wait_for_the_work, "calm", "term", 50, "election"),
    Variant(observer_without_token_filter, "calm", "observer", 50, "election"),
    Variant(value_of_the_next_candidate, "calm", "observer", 50, "election"),
)
