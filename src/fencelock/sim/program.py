"""What simulated clients do: take a lock, change the resource under it, give it back, and again."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from fencelock.core.client import Client
from fencelock.core.lease_state import HoldOptions
from fencelock.errors import EngineUnavailable, LeaseLost, LockTimeout, OutcomeUnknown, StaleToken
from fencelock.model import Claim, Mode
from fencelock.primitives.lock import LockFactory
from fencelock.sim.history import Kind, Outcome
from fencelock.sim.locks import Held, SimLease
from fencelock.sim.recorder import Recorder
from fencelock.sim.resource import Resource
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import Scenario
from fencelock.sim.task import Cancelled


@dataclass(frozen=True, slots=True)
class Job:
    """One use of a lock."""

    name: str
    ttl: float
    timeout: float | None
    """0 tries once, None waits for ever."""
    renew: bool
    max_hold: float | None
    shared: bool
    """Whether it is a reader, or takes one of so many permits."""
    limit: int | None
    block: bool
    """Whether it is held in a `with` block, whose body is interrupted on loss."""
    rounds: int
    """How often the resource is read, changed and written back."""
    think: float
    """Seconds between reading and writing, at most."""
    linger: float
    """Seconds that it goes on working under the lease, at most."""
    careful: bool
    """Whether it looks at the lease before it writes."""
    renews: bool
    """Whether it renews by hand as well."""
    rest: float
    """Seconds before it starts."""


def any_job(chance: Random, scenario: Scenario, limit: int | None) -> Job:
    """Return some job; `limit` is the number of permits, if the run is about permits."""
    ttl = chance.choice(scenario.ttls)
    shared = limit is not None or (scenario.sharing and chance.random() < 0.6)
    return Job(
        name=chance.choice(scenario.names),
        ttl=ttl,
        timeout=chance.choice((None, None, None, 0.0, ttl / 2, ttl * 3)),
        renew=not scenario.lapses or chance.random() < 0.7,
        max_hold=ttl * chance.random() + 0.1 if scenario.lapses and chance.random() < 0.1 else None,
        shared=shared,
        limit=limit,
        block=chance.random() < 0.5,
        rounds=0 if shared else chance.choice((0, 1, 1, 2)),
        think=chance.choice((0.0, 0.02, ttl / 4, ttl * 1.5)),
        linger=ttl * chance.choice(scenario.lingers),
        careful=chance.random() < 0.5,
        renews=chance.random() < 0.2,
        rest=chance.choice((0.0, 0.01, 0.1, 0.5)) * chance.random(),
    )


class Worker:
    """A task of a process that does one job after the other."""

    def __init__(
        self, client: Client[SimLease], runtime: SimRuntime, resources: dict[str, Resource], recorder: Recorder
    ) -> None:
        self._client = client
        self._runtime = runtime
        self._resources = resources
        self._recorder = recorder

    async def work(self, jobs: list[Job]) -> None:
        """Do the jobs; a cancellation ends one of them, not the worker."""
        for job in jobs:
            try:
                await self._runtime.sleep(job.rest)
                await self._do(job)
            except Cancelled:
                task = self._runtime.process.current
                assert task is not None
                task.uncancel()

    async def _do(self, job: Job) -> None:
        lease = await self._acquire(job)
        if lease is None:
            return
        try:
            if job.block:
                async with Held(lease):
                    await self._change(job, lease)
            else:
                try:
                    await self._change(job, lease)
                finally:
                    await lease._release()
        except (LeaseLost, StaleToken, EngineUnavailable):
            pass  # told, and nothing more is written under this lease

    async def _acquire(self, job: Job) -> SimLease | None:
        kind = Kind.TRY if job.timeout == 0.0 else Kind.ACQUIRE
        op = self._recorder.call(job.name, kind, self._runtime.process, shared=job.shared, limit=job.limit)
        try:
            lease = await self._ask(job)
        except (LockTimeout, Cancelled) as error:
            op.ended(Outcome.FAILED)
            if isinstance(error, Cancelled):
                raise
            return None
        except EngineUnavailable:
            op.ended(Outcome.UNKNOWN)
            return None
        op.ended(Outcome.FAILED if lease is None else Outcome.OK, lease)
        return lease

    async def _ask(self, job: Job) -> SimLease | None:
        if job.shared:
            claim = Claim(job.name, job.ttl, self._client.owner, Mode.of(True, job.limit), job.limit)
            return await self._client.acquire(claim, job.timeout, HoldOptions(job.renew, job.max_hold))
        lock = LockFactory(self._client, job.name, ttl=job.ttl, renew=job.renew, max_hold=job.max_hold)
        return await (lock.try_acquire() if job.timeout == 0.0 else lock.acquire(job.timeout))

    async def _change(self, job: Job, lease: SimLease) -> None:
        resource, process = self._resources[job.name], self._runtime.process
        if job.renews:
            await lease._renew_now()
        for _ in range(job.rounds):
            saw = await resource.read(process, lease)
            await self._runtime.sleep(job.think * self._runtime.random())
            if job.careful:
                lease.check()
            try:
                await resource.write(process, lease, saw)
            except OutcomeUnknown:
                break  # it may yet arrive, so nothing else may be written under this lease
        await self._runtime.sleep(job.linger * self._runtime.random())
