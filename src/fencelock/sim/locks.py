"""Client and lease of the simulated runtime: they record each call, and how long each lease was valid."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from fencelock.core.acquire import ShouldStop
from fencelock.core.client import Client, OnLost
from fencelock.core.engine import Engine
from fencelock.core.group import BaseGroup
from fencelock.core.lease import BaseLease
from fencelock.core.lease_state import HoldOptions
from fencelock.errors import EngineUnavailable
from fencelock.model import Claim, Grant, LossReason
from fencelock.sim.history import Kind, Outcome
from fencelock.sim.process import Process
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.task import Cancelled

if TYPE_CHECKING:
    from fencelock.sim.recorder import Recorder

H = TypeVar("H", bound="BaseLease | BaseGroup")


class SimLease(BaseLease):
    """A lease that records when its holder had to stop."""

    __slots__ = ("_ended", "_recorder", "begun", "downgraded")

    def __init__(self, recorder: Recorder, client: Client[SimLease], grant: Grant, options: HoldOptions) -> None:
        super().__init__(client, grant, options)
        self._recorder = recorder
        self._ended: float | None = None
        self.downgraded: float | None = None
        self.begun = self._process.scheduler.time

    @property
    def _process(self) -> Process:
        return cast("SimRuntime", self._client.runtime).process

    def valid_until(self) -> float:
        """Return when `is_lost` would first have returned True, or the lease was released, or its process died."""
        process = self._process
        ends = [process.clock.true(self.deadline), self._ended, process.died]
        return min(end for end in ends if end is not None)

    async def _downgrade(self) -> None:
        """Downgrade; from the call on, the holder may only read."""
        claim = self._grant.claim
        self.downgraded = self._process.scheduler.time
        op = self._recorder.call(self._process, Kind.DOWNGRADE, claim)
        try:
            await super()._downgrade()
        except BaseException:
            op.ended(Outcome.UNKNOWN)
            raise
        op.ended(Outcome.OK, token=self._recorder.engine.token(claim))

    async def _release(self) -> bool:
        """Release; the holder has stopped before."""
        self._end()
        op = self._recorder.call(self._process, Kind.RELEASE, self._grant.claim, self.token)
        try:
            ours = await super()._release()
        except Cancelled:
            op.ended(Outcome.OK)  # the caller does not learn the outcome, but the lease must have been released
            self._recorder.released(self)
            raise
        except EngineUnavailable:
            op.ended(Outcome.UNKNOWN)
            raise
        op.ended(Outcome.OK if ours else Outcome.FAILED)
        if ours:
            self._recorder.released(self)
        return ours

    def _withdraw(self) -> Claim | None:
        self._end()
        op = self._recorder.call(self._process, Kind.RELEASE, self._grant.claim, self.token)
        claim = super()._withdraw()
        op.ended(Outcome.FAILED if claim is None else Outcome.OK)
        if claim is not None:
            self._recorder.released(self)
        return claim

    def _lose(self, reason: LossReason) -> None:
        self._end()
        super()._lose(reason)

    def _end(self) -> None:
        if self._ended is None:
            self._ended = self._process.scheduler.time


class SimClient(Client[SimLease]):
    """A client that records every acquire, of every primitive."""

    def __init__(
        self,
        runtime: SimRuntime,
        engine: Engine,
        recorder: Recorder,
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        super().__init__(runtime, engine, partial(SimLease, recorder), ttl=ttl, owner=owner, on_lost=on_lost)
        self._recorder = recorder
        self._process = runtime.process

    async def acquire(
        self, claim: Claim, timeout: float | None, options: HoldOptions, should_stop: ShouldStop | None = None
    ) -> SimLease | None:
        """Record the call and its outcome."""
        op = self._recorder.call(self._process, Kind.TRY if timeout == 0 else Kind.ACQUIRE, claim)
        try:
            lease = await super().acquire(claim, timeout, options, should_stop)
        except BaseException as error:
            op.ended(Outcome.UNKNOWN if isinstance(error, EngineUnavailable) else Outcome.FAILED)
            raise
        op.ended(Outcome.FAILED if lease is None else Outcome.OK, lease)
        return lease


class Held(Generic[H]):
    """The `with` block of a lease or a group."""

    def __init__(self, held: H) -> None:
        self._held = held

    async def __aenter__(self) -> H:
        self._held._enter_block()
        return self._held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._held._exit_block(error)
