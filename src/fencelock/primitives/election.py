"""Leader election: candidates queue for one lock, and its holder leads. A term is a lease; its token is the term's number."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, NamedTuple, Unpack

from fencelock.core.acquire import ShouldStop
from fencelock.core.client import Client, L
from fencelock.core.log import INFO, WARNING, log
from fencelock.core.validation import check_name, check_seconds, check_value
from fencelock.core.watch import StopSignal
from fencelock.errors import EngineUnavailable, LeaseLost
from fencelock.model import LossReason, Snapshot
from fencelock.primitives.lock import BaseLock, WaitOptions

RETRY_SECONDS = 1.0
"""The longest pause between two campaigns while the engine cannot be reached."""


class Leader(NamedTuple):
    """The candidate that leads."""

    owner: str
    """The label of its client."""
    value: str
    """What it gave as `value`."""
    token: int
    """The number of its term."""


class Candidate(NamedTuple):
    """A candidate that leads or waits."""

    owner: str
    """The label of its client."""
    value: str
    """What it gave as `value`."""


class BaseElection(Generic[L]):
    """The election of both APIs, as coroutines."""

    def __init__(self, client: Client[L], name: str, value: str, **options: Unpack[WaitOptions]) -> None:
        self._client = client
        self.name = check_name(name)
        self._value = check_value(value, name)
        self._options = options
        self._terms: list[L] = []
        """The terms of this client that are not released."""
        self.campaign(None)  # check the options now

    def campaign(self, timeout: float | None) -> BaseLock[L]:
        """Return the lock whose lease is the term."""
        options: WaitOptions = {**self._options, "timeout": timeout}
        return BaseLock(self._client, self.name, value=self._value, on_granted=self._began, **options)

    def _began(self, term: L) -> None:
        """Remember a term of this client, for `resign` and `healthy`."""
        self._terms = [*(held for held in self._terms if not held._over), term]

    async def leader(self) -> Leader | None:
        """Return who leads now, or None."""
        return leader_of(await self._client.inspect(self.name))

    async def candidates(self) -> list[Candidate]:
        """Return the leader and, in order of service if the engine is fair, the candidates that wait."""
        snapshot = await self._client.inspect(self.name)
        leaders = [Candidate(holder.owner, holder.value) for holder in snapshot.holders]
        return leaders + [Candidate(waiter.owner, waiter.value) for waiter in snapshot.waiters]

    async def observe(self, stop: StopSignal | None) -> AsyncIterator[Leader | None]:
        """Yield who leads, or None, and then every change; never an earlier term after a later one."""
        last: Leader | None = None
        highest, first = 0, True
        async for snapshot in self._client.watch(self.name, stop):
            leader = leader_of(snapshot)
            if leader is not None and leader.token < highest:
                continue  # an old state, read from a member that lags
            highest = max(highest, 0 if leader is None else leader.token)
            if first or leader != last:
                first, last = False, leader
                yield leader

    async def resign(self) -> bool:
        """Release the term of this client, if it leads; return whether it did."""
        released = False
        for term in self._terms:
            released = await term._release() or released
        return released

    def healthy(self, grace: float) -> bool:
        """Return False if this client leads and has been unable to renew its term for `grace` seconds."""
        seconds = check_seconds(grace, "grace", self.name, zero=True) or 0.0
        now = self._client.runtime.now()
        terms = [term for term in self._terms if not term._released and term.reason is not LossReason.FORKED]
        return not any(term._unrenewed_for(now) >= seconds for term in terms)

    async def run(self, work: Callable[[L], Awaitable[object]], stop: StopSignal | None) -> None:
        """Campaign and call `work(term)` while leading, again and again, until `stop` is set.

        The lock is released only after `work` has returned. A lost term only begins the next campaign; an error of `work`
        resigns and comes out.
        """

        def should_stop() -> bool:
            return stop is not None and stop.is_set()

        while (term := await self.stand(should_stop)) is not None:
            await self._lead(term, work)

    async def stand(self, should_stop: ShouldStop | None) -> L | None:
        """Campaign until this candidate leads, or return None once `should_stop` says so.

        An engine that cannot be reached is logged and tried again.
        """
        pause = 0.0
        while should_stop is None or not should_stop():
            try:
                return await self.campaign(None).acquire_unless(should_stop)
            except EngineUnavailable as error:
                if not pause:
                    message = f"cannot campaign for {self.name!r}; it is tried again: {error}"
                    log("election", WARNING, message, lock=self.name, owner=self._client.owner)
                pause = min(RETRY_SECONDS, pause * 2 or 0.05)
                await self._client.runtime.sleep(pause * (0.5 + self._client.runtime.random() / 2))
        return None

    async def _lead(self, term: L, work: Callable[[L], Awaitable[object]]) -> None:
        client, failure = self._client, None
        self._log(f"{client.owner} leads {self.name!r} (term {term.token})", term)
        term._blocks.enter(term, client.runtime.current_task())
        try:
            await work(term)
        except BaseException as error:
            failure = error
        resigned = term._released
        try:
            await term._exit_block(failure)  # this raises LeaseLost after a loss, unless the work itself failed
            if failure is not None:
                raise failure
        except LeaseLost as lost:
            if lost.name != term.name or (term.reason is None and not resigned):
                raise
        self._log(f"{client.owner} no longer leads {self.name!r} (term {term.token})", term)

    def _log(self, message: str, term: L) -> None:
        log("election", INFO, message, lock=self.name, token=term.token, owner=term.owner)


def leader_of(snapshot: Snapshot) -> Leader | None:
    """Return the leader in a snapshot, or None."""
    if not snapshot.holders:
        return None
    holder = max(snapshot.holders, key=lambda holder: holder.token)
    return Leader(holder.owner, holder.value, holder.token)
