"""The façade of the simulated world: delegation, and a record of what each holder believed, in true time."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, cast

from fencelock.core.client import Client
from fencelock.core.lease import BaseLease
from fencelock.core.lease_state import HoldOptions
from fencelock.errors import EngineUnavailable
from fencelock.model import Grant, LossReason
from fencelock.sim.history import Kind, Outcome
from fencelock.sim.process import Process
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.task import Cancelled

if TYPE_CHECKING:
    from fencelock.sim.recorder import Recorder


class SimLease(BaseLease):
    """A lease that remembers when its holder stopped to believe in it."""

    __slots__ = ("_ended", "_recorder", "begun")

    def __init__(self, recorder: Recorder, client: Client[SimLease], options: HoldOptions) -> None:
        super().__init__(client, options)
        self._recorder = recorder
        self._ended: float | None = None

    def _begin(self, grant: Grant) -> None:
        super()._begin(grant)
        self.begun = self._process.scheduler.time

    @property
    def _process(self) -> Process:
        return cast("SimRuntime", self._client.runtime).process

    def valid_until(self) -> float:
        """Return when `is_lost` would first have answered True, or the lease was released, or its process died."""
        process = self._process
        ends = [process.clock.true(self.deadline), self._ended, process.died]
        return min(end for end in ends if end is not None)

    async def _release(self) -> bool:
        """Release; the caller has stopped to work under the lease."""
        self._end()
        op = self._recorder.call(self.name, Kind.RELEASE, self._process, self.token)
        try:
            ours = await super()._release()
        except Cancelled:
            op.ended(Outcome.OK)  # nobody learns of it, but it must have been released
            self._recorder.given_back(self)
            raise
        except EngineUnavailable:
            op.ended(Outcome.UNKNOWN)
            raise
        op.ended(Outcome.OK if ours else Outcome.FAILED)
        if ours and self.id not in self._client.renewer.leftovers:  # else the engine has not confirmed its clean-up
            self._recorder.given_back(self)
        return ours

    def _lose(self, reason: LossReason) -> None:
        """Record when it was lost."""
        self._end()
        super()._lose(reason)

    def _end(self) -> None:
        if self._ended is None:
            self._ended = self._process.scheduler.time


class Held:
    """The `with` block of a lease."""

    def __init__(self, lease: SimLease) -> None:
        self._lease = lease

    async def __aenter__(self) -> SimLease:
        self._lease._enter_block()
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._lease._exit_block(error)
