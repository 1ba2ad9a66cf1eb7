"""Writes the history of a run: calls are recorded when they are made and completed when the run is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf
from typing import Any

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
    Reservation,
)
from fencelock.sim.locks import SimLease
from fencelock.sim.process import Process
from fencelock.sim.scheduler import Scheduler


class PendingOp:
    """A call that has not returned."""

    def __init__(self, recorder: Recorder, process: Process, kind: Kind, claim: Claim, token: int | None) -> None:
        self._recorder = recorder
        self._process = process
        now, unknown = recorder.scheduler.time, Outcome.UNKNOWN
        self._op = Op(
            claim.name,
            kind,
            process.label,
            now,
            None,
            unknown,
            token,
            shared=claim.shared,
            limit=claim.limit,
            value=claim.value,
        )
        self._lease: SimLease | None = None

    def ended(self, outcome: Outcome, lease: SimLease | None = None, token: int | None = None) -> None:
        """Record the outcome, and the lease of an acquire or the token of a downgrade."""
        op = self._op = replace(self._op, returned=self._recorder.scheduler.time, outcome=outcome)
        if lease is not None:
            self._lease = lease
            self._op = replace(
                op, token=lease.token, ticket=self._recorder.engine.tickets.get((lease.name, lease.token))
            )
        elif token is not None:
            self._op = replace(op, token=token)

    def op(self) -> Op:
        """Return the record. Only at the end of a run is it known how long each lease was valid."""
        lease, op = self._lease, self._op
        if op.returned is None:
            op = replace(op, returned=self._process.died)
        if lease is None:
            return op
        return replace(op, valid_from=lease.begun, valid_until=lease.valid_until(), downgraded=lease.downgraded)


class PendingGroup:
    """A multi-lock that is being acquired, or held."""

    def __init__(self, recorder: Recorder, process: Process, names: Sequence[str]) -> None:
        self._recorder = recorder
        self._made: list[BaseGroup] = []
        self._group = Group(tuple(names), process.label, recorder.scheduler.time, None, Outcome.UNKNOWN, ())

    def track(self, group: BaseGroup) -> BaseGroup:
        """Note a group of leases that the multi-lock has begun to acquire."""
        self._made.append(group)
        return group

    def ended(self, outcome: Outcome) -> None:
        """Record the outcome of the acquire."""
        self._group = replace(self._group, returned=self._recorder.scheduler.time, outcome=outcome)

    def released(self) -> None:
        """Record that the release has returned."""
        self._group = replace(self._group, released=self._recorder.scheduler.time)

    def group(self) -> Group:
        """Return the record."""
        leases = tuple((lease.name, lease.token) for group in self._made for lease in group._members)
        return replace(self._group, leases=leases)


class Pending:
    """Work that has begun: a JobRun, a Build or a Reservation."""

    def __init__(self, recorder: Recorder, process: Process, record: JobRun | Build | Reservation) -> None:
        self._recorder = recorder
        self._process = process
        self._record = record

    def update(self, **changes: Any) -> None:
        """Record how it went on."""
        self._record = replace(self._record, **changes)

    def ended(self) -> None:
        """Record that it ends now."""
        self.update(end=self._recorder.scheduler.time)

    def record(self) -> JobRun | Build | Reservation:
        """Return the record. Work that has not ended was over when its process died."""
        if isinstance(self._record, Reservation) or self._record.end < inf:
            return self._record
        died = self._process.died
        return replace(self._record, end=self._recorder.scheduler.time if died is None else died)


class Recorder:
    """The history so far."""

    def __init__(self, scheduler: Scheduler, engine: SimulatedEngine, settled: float) -> None:
        self._settled = settled
        """Seconds after which every message that was sent has arrived."""
        self.scheduler = scheduler
        self.engine = engine
        self.history = History()
        self._ops: list[PendingOp] = []
        self._groups: list[PendingGroup] = []
        self._begun: list[Pending] = []
        self._builds = 0

    def call(self, process: Process, kind: Kind, claim: Claim, token: int | None = None) -> PendingOp:
        """Record that an operation was called."""
        self._ops.append(PendingOp(self, process, kind, claim, token))
        return self._ops[-1]

    def group(self, process: Process, names: Sequence[str]) -> PendingGroup:
        """Record that a multi-lock is being acquired."""
        self._groups.append(PendingGroup(self, process, names))
        return self._groups[-1]

    def next_build(self) -> int:
        """Return the number of a new build of a cached value."""
        self._builds += 1
        return self._builds

    def begun(self, process: Process, record: JobRun | Build | Reservation) -> Pending:
        """Record that work has begun."""
        self._begun.append(Pending(self, process, record))
        return self._begun[-1]

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
        pending = [pending.op() for pending in self._ops], [pending.group() for pending in self._groups]
        for record in chain(*pending, (work.record() for work in self._begun), self.engine.log):
            history.add(record)
        return history
