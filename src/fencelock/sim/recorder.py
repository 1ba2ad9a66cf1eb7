"""Writes the history of a run: calls are recorded when they are made and completed when the run is over."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf
from typing import Any, Generic, TypeVar

from fencelock.core.group import BaseGroup
from fencelock.model import Claim
from fencelock.sim.check import DEAD
from fencelock.sim.engines import SimulatedEngine
from fencelock.sim.history import (
    PLURALS,
    Build,
    Group,
    History,
    JobRun,
    Kind,
    Leftover,
    Note,
    Op,
    Outcome,
    Record,
)
from fencelock.sim.locks import SimLease
from fencelock.sim.process import Process
from fencelock.sim.scheduler import Scheduler

R = TypeVar("R", bound=Record)


class Pending(Generic[R]):
    """A record that is not complete: a call that has not returned, or work that has not ended."""

    def __init__(self, recorder: Recorder, process: Process, record: R) -> None:
        self._recorder = recorder
        self._process = process
        self._record = record
        self._lease: SimLease | None = None
        self._groups: list[BaseGroup] = []

    def update(self, **changes: Any) -> None:
        """Record how it went on."""
        self._record = replace(self._record, **changes)

    def returned(self, outcome: Outcome, lease: SimLease | None = None, **changes: Any) -> None:
        """Record the outcome of a call, and the lease of an acquire."""
        if lease is not None:
            self._lease = lease
            changes |= {"token": lease.token, "ticket": self._recorder.engine.tickets.get((lease.name, lease.token))}
        self.update(returned=self._recorder.scheduler.time, outcome=outcome, **changes)

    def track(self, group: BaseGroup) -> BaseGroup:
        """Note a group of leases that a multi-lock has begun to acquire."""
        self._groups.append(group)
        return group

    def record(self) -> Record:
        """Return the record as it is at the end of a run: only then is it known how long each lease was valid.

        Work that has not ended was over when its process died.
        """
        record, died, lease = self._record, self._process.died, self._lease
        match record:
            case Op(returned=None):
                return replace(record, returned=died)
            case Op() if lease is not None:
                ends = lease.valid_until()
                return replace(record, valid_from=lease.begun, valid_until=ends, downgraded=lease.downgraded)
            case Group():
                members = chain.from_iterable(group._members for group in self._groups)
                return replace(record, leases=tuple((lease.name, lease.token) for lease in members))
            case JobRun(end=end) | Build(end=end) if end == inf:
                return replace(record, end=self._recorder.scheduler.time if died is None else died)
        return record


class Recorder:
    """The history so far."""

    def __init__(self, scheduler: Scheduler, engine: SimulatedEngine, settled: float) -> None:
        self._settled = settled
        """Seconds after which every message that was sent has arrived."""
        self.scheduler = scheduler
        self.engine = engine
        self.history = History()
        self._pending: list[Pending[Any]] = []
        self._builds = 0

    def begun(self, process: Process, record: R) -> Pending[R]:
        """Record that a call was made, or that work has begun."""
        pending = Pending(self, process, record)
        self._pending.append(pending)
        return pending

    def call(self, process: Process, kind: Kind, claim: Claim, token: int | None = None) -> Pending[Op]:
        """Record that an operation was called."""
        now, unknown = self.scheduler.time, Outcome.UNKNOWN
        op = Op(claim.name, kind, process.label, now, None, unknown, token, shared=claim.shared, limit=claim.limit)
        return self.begun(process, replace(op, value=claim.value))

    def next_build(self) -> int:
        """Return the number of a new build of a cached value."""
        self._builds += 1
        return self._builds

    def released(self, lease: SimLease, since: float | None = None) -> None:
        """Look, when the clean-up of a lease is confirmed and its last message has arrived, whether the engine has it."""
        since = self.scheduler.time if since is None else since
        self.scheduler.after(self._settled, partial(self._look_for, lease, since))

    def _look_for(self, lease: SimLease, since: float) -> None:
        if lease._process.dead or not self.engine.has(lease._grant.claim):
            return
        if lease.id in lease._client.renewer.leftovers:
            self.released(lease, since)
        else:
            self.history.add(Leftover(lease.name, lease.owner, "claim", self.scheduler.time, since))

    def died(self, process: Process, ttl: float) -> None:
        """Look, when the claims of a dead process must have expired, whether the engine still has one.

        A waiter may be granted the lock just before it expires, so this takes two ttls.
        """
        self.scheduler.after(2.02 * ttl + self._settled, partial(self._look_for_dead, process))

    def _look_for_dead(self, process: Process) -> None:
        now = self.scheduler.time
        for left in self.engine.leftovers(now):
            if left.owner == process.label:
                self.history.add(replace(left, role=DEAD, since=process.died))

    def note(self, who: str, what: str) -> None:
        """Record a fault or a loss."""
        self.history.add(Note(self.scheduler.time, who, what))

    def finish(self) -> History:
        """Return the history, as a copy: closing the processes must not change it."""
        history = History()
        for plural in PLURALS.values():
            getattr(history, plural).extend(getattr(self.history, plural))
        for record in chain((pending.record() for pending in self._pending), self.engine.log):
            history.add(record)
        return history
