"""The blocking API of leader election."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fencelock.api.sync_lock import Lease, Lock
from fencelock.core.validation import check_function
from fencelock.core.watch import StopSignal, check_stop
from fencelock.primitives.api_hints import NoBlock
from fencelock.primitives.election import BaseElection, Candidate, Leader
from fencelock.runtime.blocking import each, run_sync


class Election(NoBlock):
    """One leader among many candidates. A term is a lease: its token is the number of the term.

    >>> from fencelock import connect
    >>> with connect("memory://election") as locks:
    ...     election = locks.election("scheduler", value="http://web-7:8080")
    ...     with election.campaign() as term:
    ...         election.leader().value
    'http://web-7:8080'
    """

    __slots__ = ("_election",)

    def __init__(self, election: BaseElection[Lease]) -> None:
        self._election = election

    @property
    def name(self) -> str:
        """The name of the election, which is also the name of its lock."""
        return self._election.name

    def campaign(self, timeout: float | None = None) -> Lock:
        """Return a lock: its lease is the term. By default it waits until this candidate leads."""
        return Lock(self._election.campaign(timeout))

    def leader(self) -> Leader | None:
        """Return who leads now, or None."""
        return run_sync(self._election.leader())

    def candidates(self) -> list[Candidate]:
        """Return the leader and then the candidates that wait, in order of service if the engine is fair."""
        return run_sync(self._election.candidates())

    def observe(self, stop: StopSignal | None = None) -> Iterator[Leader | None]:
        """Iterate over who leads: the current leader or None, then every change, within a second.

        A term that lasted less than that may be skipped. An earlier term never comes after a later one. The iteration ends
        when `stop` is set or the client is closed; an outage of the engine is logged, and the iteration goes on after it.
        """
        return each(self._election.observe(check_stop(stop)))

    def resign(self) -> bool:
        """Release the term of this client, if it leads; return whether it did."""
        return run_sync(self._election.resign())

    def healthy(self, grace: float) -> bool:
        """Return False if this client leads and could not renew its term for `grace` seconds; for liveness probes."""
        return self._election.healthy(grace)

    def run(self, work: Callable[[Lease], object], stop: StopSignal | None = None) -> None:
        """Campaign, call `work(term)` while leading, and campaign again, until `stop` is set.

        While `work` runs, the term is renewed; it should stop when `term.lost` is set. The lock is released only after
        `work` has returned, and `stop` never interrupts it. If `work` raises, this candidate resigns and the error comes
        out; LeaseLost of the term itself only begins the next campaign. An engine that cannot be reached is logged, and
        the candidate tries again.
        """
        check_function(work, "work", "term")

        async def call(term: Lease) -> None:
            work(term)

        run_sync(self._election.run(call, check_stop(stop)))

    def __repr__(self) -> str:
        return f"<Election {self.name!r}>"
