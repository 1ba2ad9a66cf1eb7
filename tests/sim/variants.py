"""Broken variants of fencelock: each has one mistake that real lock libraries make, and must be caught.

Each is a context manager that breaks the production code in this process. To see one fail:
`python -m fencelock.sim --seeds 500 --variant tests.sim.variants:release_without_owner`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from fencelock import model
from fencelock.core import acquire, lease
from fencelock.core.clock import Deadline
from fencelock.core.lease import BaseLease
from fencelock.core.leftovers import Leftovers
from fencelock.engines.memory import MemoryEngine, MemoryStore
from fencelock.errors import EngineUnavailable
from fencelock.fences import Fenced
from fencelock.fences.memory import MemoryFence
from fencelock.model import Claim, Grant, Renewal, Waiting
from fencelock.sim.memory_engine import SimMemoryEngine
from fencelock.sim.resource import Resource


@contextmanager
def release_without_owner() -> Iterator[None]:
    """A release frees whoever holds the name: the second try of a release frees the successor."""

    def release(self: MemoryStore, claim: Claim) -> bool:
        held = [entry for entry in self._queues.get(claim.name, ()) if entry.token is not None]
        freed = [self._remove(entry.claim) for entry in held]
        return any(freed)

    with patch.object(MemoryStore, "release", release):
        yield


@contextmanager
def deadline_from_reply() -> Iterator[None]:
    """The ttl counts from when the answer came, as if it had taken no time."""
    attempt = MemoryEngine.attempt

    async def late(self: MemoryEngine, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        return (await attempt(self, claim, enqueue=enqueue, deadline=deadline))._replace(since=self._runtime.now())

    with patch.object(MemoryEngine, "attempt", late):
        yield


@contextmanager
def renewal_from_reply() -> Iterator[None]:
    """A renewal moves the deadline from when it was answered, not from when it was sent."""
    renewed = BaseLease._renewed

    def late(self: BaseLease, answer: Renewal, sent: float, why: str | None = None) -> None:
        renewed(self, answer, self._client.runtime.now(), why)

    with patch.object(BaseLease, "_renewed", late):
        yield


@contextmanager
def no_drift_margin() -> Iterator[None]:
    """All clocks are taken to run at the same rate."""
    with patch.object(model, "clock_margin", lambda ttl: 0.0), patch.object(lease, "clock_margin", lambda ttl: 0.0):
        yield


@contextmanager
def unknown_is_renewed() -> Iterator[None]:
    """A renewal that was not answered counts as one that succeeded."""
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
    """A waiter that is cancelled just goes, and its claim stays in line."""
    with _no_clean_up_in(acquire.acquire):
        yield


@contextmanager
def _no_clean_up_in(caller: Callable[..., object]) -> Iterator[None]:
    """What a cancelled caller began stays on the engine, and nobody remembers it."""
    clean_up = Leftovers.clean_up

    async def forgetful(self: Leftovers, claim: Claim) -> None:
        awaiting = sys._getframe(1)
        if awaiting.f_code is not caller.__code__:
            await clean_up(self, claim)

    with patch.object(Leftovers, "clean_up", forgetful):
        yield


@contextmanager
def abandon_without_tombstone() -> Iterator[None]:
    """An abandon does not stop the attempt that it overtook."""

    def abandon(self: MemoryStore, claim: Claim) -> None:
        self._remove(claim)

    with patch.object(MemoryStore, "abandon", abandon):
        yield


@contextmanager
def release_without_abandon() -> Iterator[None]:
    """A release that is cancelled just stops trying."""
    with _no_clean_up_in(BaseLease._release):
        yield


@contextmanager
def stragglers_are_forgotten() -> Iterator[None]:
    """An attempt that arrives after the release of its claim takes the lock for nobody (found by this simulation)."""

    with patch.object(Grant, "attempt_in_flight", property(lambda self: False)):
        yield


@contextmanager
def deadline_from_wake_up() -> Iterator[None]:
    """A lock that was handed over counts from when the waiter noticed, who may have been stopped until then."""
    wait = MemoryEngine.wait

    async def late(self: MemoryEngine, waiting: Waiting, timeout: float) -> Grant | None:
        outcome = await wait(self, waiting, timeout)
        return outcome._replace(since=self._runtime.now()) if isinstance(outcome, Grant) else outcome

    with patch.object(MemoryEngine, "wait", late):
        yield


@contextmanager
def fence_after_read() -> Iterator[None]:
    """The fence is looked at when writing only, after the value that the write depends on was read."""

    def read_step(self: Resource, _: Fenced) -> int:
        return self._value

    with patch.object(Resource, "read_step", read_step):
        yield


@contextmanager
def fence_takes_equal_tokens() -> Iterator[None]:
    """The fence compares tokens and forgets the owners."""
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
    """The engine serves whoever came last."""
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
    """Permits are counted from nought."""
    admit = model.admit

    def generous(queue: Sequence[model.Contender], me: model.Contender) -> model.Admitted | model.Blocked:
        ahead = [place.id for place in queue]
        at = ahead.index(me.id) if me.id in ahead else len(ahead)
        return model.ADMITTED if me.limit is not None and at == me.limit else admit(queue, me)

    with patch.object(model, "admit", generous):
        yield


@contextmanager
def writers_ignore_readers() -> Iterator[None]:
    """A writer waits for writers only."""
    admit = model.admit

    def rude(queue: Sequence[model.Contender], me: model.Contender) -> model.Admitted | model.Blocked:
        return admit(queue if me.shared else [place for place in queue if not place.shared], me)

    with patch.object(model, "admit", rude):
        yield


@contextmanager
def tokens_from_the_wall() -> Iterator[None]:
    """Tokens are what the wall clock says, which people set back."""
    with patch.object(MemoryStore, "_mint", lambda self: self._wall()):
        yield


@contextmanager
def nobody_is_woken() -> Iterator[None]:
    """A waiter is not woken when it is handed the lock."""
    with patch.object(SimMemoryEngine, "_remote_callback", lambda self, wake: lambda: None):
        yield


@contextmanager
def wakeups_are_missed() -> Iterator[None]:
    """A claim that was handed the lock before it listened is not woken (a mistake that this simulation found)."""

    def on_grant(self: MemoryStore, claim: Claim, wake: Callable[[], None]) -> None:
        self._wakeups[claim.id] = wake

    with patch.object(MemoryStore, "on_grant", on_grant):
        yield


@dataclass(frozen=True, slots=True)
class Variant:
    """A mistake, the scenario that brings it out, and the check that must catch it."""

    broken: Callable[[], AbstractContextManager[None]]
    scenario: str
    check: str
    within: int
    """Seeds that it may take."""

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
    Variant(one_permit_too_many, "shared", "exclusion", 50),
    Variant(writers_ignore_readers, "shared", "exclusion", 50),
    Variant(cancel_without_abandon, "calm", "wake-ups", 50),
    Variant(nobody_is_woken, "calm", "wake-ups", 50),
    Variant(wakeups_are_missed, "calm", "wake-ups", 150),
    Variant(abandon_without_tombstone, "late", "orphans", 200),
    Variant(release_without_abandon, "late", "orphans", 400),
    Variant(stragglers_are_forgotten, "late", "orphans", 400),
    Variant(fence_after_read, "wiped", "resource", 150),
    Variant(fence_takes_equal_tokens, "reborn", "resource", 400),
    Variant(last_come_first_served, "calm", "order", 50),
    Variant(tokens_from_the_wall, "calm", "tokens", 50),
)
