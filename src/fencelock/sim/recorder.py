"""Writes the history of a run: operations are recorded when they are called and completed when all is over."""

from __future__ import annotations

from functools import partial

from fencelock.sim.engine import SimStore
from fencelock.sim.history import History, Kind, Left, Note, Op, Outcome
from fencelock.sim.locks import SimLease
from fencelock.sim.process import Process
from fencelock.sim.scheduler import Scheduler


class Pending:
    """An operation under way."""

    __slots__ = ("_recorder", "called", "kind", "lease", "name", "outcome", "process", "returned", "ticket", "token")

    def __init__(self, recorder: Recorder, name: str, kind: Kind, process: Process, token: int | None) -> None:
        self._recorder = recorder
        self.name = name
        self.kind = kind
        self.process = process
        self.called = recorder.scheduler.time
        self.returned: float | None = None
        self.outcome = Outcome.UNKNOWN
        self.lease: SimLease | None = None
        self.token = token
        self.ticket: int | None = None

    def ended(self, outcome: Outcome, lease: SimLease | None = None) -> None:
        """Take note of how it ended."""
        self.returned = self._recorder.scheduler.time
        self.outcome = outcome
        self.lease = lease
        if lease is not None:
            self.ticket = self._recorder.store.tickets.get(lease.id)

    def op(self) -> Op:
        """Return what came of it."""
        returned = self.process.died if self.returned is None else self.returned
        token, begun, until = self.token, None, None
        if self.lease is not None:
            token, begun, until = self.lease.token, self.lease.begun, self.lease.valid_until()
        label = self.process.label
        return Op(self.name, self.kind, label, self.called, returned, self.outcome, token, self.ticket, begun, until)


class Recorder:
    """What happened so far."""

    def __init__(self, scheduler: Scheduler, store: SimStore, settled: float) -> None:
        self._settled = settled
        """Seconds after which no message is on its way any more."""
        self.scheduler = scheduler
        self.store = store
        self.history = History()
        self._pending: list[Pending] = []

    def call(self, name: str, kind: Kind, process: Process, token: int | None = None) -> Pending:
        """Take note that an operation was called."""
        pending = Pending(self, name, kind, process, token)
        self._pending.append(pending)
        return pending

    def given_back(self, lease: SimLease) -> None:
        """Look, when the last message about a lease has arrived, whether the engine still has it."""
        self.scheduler.after(self._settled, partial(self._look, lease, self.scheduler.time))

    def _look(self, lease: SimLease, since: float) -> None:
        if self.store.has(lease.grant.claim):
            self.history.add(Left(lease.name, lease.owner, "claim", self.scheduler.time, since))

    def note(self, who: str, what: str) -> None:
        """Take note of what befell somebody."""
        self.history.add(Note(self.scheduler.time, who, what))

    def finish(self) -> History:
        """Return the history: only now is it known how long each holder believed in its lease."""
        so_far = self.history
        ops = [pending.op() for pending in self._pending]
        # A copy: closing what is left of the processes must not write in it.
        return History(ops, list(so_far.writes), list(so_far.left), list(so_far.notes))
