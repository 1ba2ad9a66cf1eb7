"""Writes the history of a run: operations are recorded when they are called and completed when all is over."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fencelock.sim.engines import SimulatedEngine
from fencelock.sim.history import History, Kind, Leftover, Note, Op, Outcome
from fencelock.sim.locks import SimLease
from fencelock.sim.process import Process
from fencelock.sim.scheduler import Scheduler


class Pending:
    """An operation under way."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        kind: Kind,
        process: Process,
        token: int | None,
        shared: bool,
        limit: int | None,
    ) -> None:
        self._recorder = recorder
        self._process = process
        self._called = Op(
            name, kind, process.label, recorder.scheduler.time, None, Outcome.UNKNOWN, token, shared=shared, limit=limit
        )
        self._returned: float | None = None
        self._outcome = Outcome.UNKNOWN
        self._lease: SimLease | None = None
        self._ticket: int | None = None

    def ended(self, outcome: Outcome, lease: SimLease | None = None) -> None:
        """Take note of how it ended."""
        self._returned = self._recorder.scheduler.time
        self._outcome = outcome
        self._lease = lease
        if lease is not None:
            self._ticket = self._recorder.engine.tickets.get(lease.token)

    def op(self) -> Op:
        """Return what came of it."""
        returned = self._process.died if self._returned is None else self._returned
        op = replace(self._called, returned=returned, outcome=self._outcome)
        lease = self._lease
        if lease is None:
            return op
        token, ticket = lease.token, self._ticket
        return replace(op, token=token, ticket=ticket, valid_from=lease.begun, valid_until=lease.valid_until())


class Recorder:
    """What happened so far."""

    def __init__(self, scheduler: Scheduler, engine: SimulatedEngine, settled: float) -> None:
        self._settled = settled
        """Seconds after which no message is on its way any more."""
        self.scheduler = scheduler
        self.engine = engine
        self.history = History()
        self._pending: list[Pending] = []

    def call(
        self,
        name: str,
        kind: Kind,
        process: Process,
        token: int | None = None,
        *,
        shared: bool = False,
        limit: int | None = None,
    ) -> Pending:
        """Take note that an operation was called."""
        pending = Pending(self, name, kind, process, token, shared, limit)
        self._pending.append(pending)
        return pending

    def given_back(self, lease: SimLease) -> None:
        """Look, when the last message about a lease has arrived, whether the engine still has it."""
        self.scheduler.after(self._settled, partial(self._look, lease, self.scheduler.time))

    def _look(self, lease: SimLease, since: float) -> None:
        if self.engine.has(lease._grant.claim):
            self.history.add(Leftover(lease.name, lease.owner, "claim", self.scheduler.time, since))

    def note(self, who: str, what: str) -> None:
        """Take note of what befell somebody."""
        self.history.add(Note(self.scheduler.time, who, what))

    def finish(self) -> History:
        """Return the history: only now is it known how long each holder believed in its lease."""
        so_far = self.history
        ops = [pending.op() for pending in self._pending]
        # A copy: closing what is left of the processes must not write in it.
        return History(ops, list(so_far.writes), list(so_far.leftovers), list(so_far.notes))
