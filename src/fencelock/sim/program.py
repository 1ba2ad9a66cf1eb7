"""What simulated clients do: acquire a lock, change the resource under it, release it; or lead and observe an election."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, cast

from fencelock.core.group import BaseGroup
from fencelock.errors import (
    BuildFailed,
    EngineUnavailable,
    LeaseLost,
    LockTimeout,
    OutcomeUnknown,
    RateLimited,
    StaleToken,
)
from fencelock.model import Mode
from fencelock.primitives.election import BaseElection
from fencelock.primitives.lock import BaseLock
from fencelock.primitives.multi import BaseMultiLock, modes_of
from fencelock.sim.history import Group, Observation, Outcome, Term
from fencelock.sim.locks import Held, SimClient, SimLease
from fencelock.sim.recorder import Pending, Recorder
from fencelock.sim.resource import Resource
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import Scenario
from fencelock.sim.task import Cancelled


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a lock or a multi-lock."""

    writes: tuple[str, ...]
    reads: tuple[str, ...]
    limit: int | None
    """The number of permits: then the name to read is a semaphore."""
    ttl: float
    timeout: float | None
    """0 tries once, None waits without an end."""
    renew: bool
    max_hold: float | None
    block: bool
    """Whether a `with` block holds it, whose body is cancelled on loss."""
    rounds: int
    """How often the resource is read, changed and written back."""
    think: float
    """Seconds between reading and writing, at most."""
    linger: float
    """Seconds that the holder works under the lease afterwards, at most."""
    careful: bool
    """Whether the holder checks the lease before it writes."""
    renews: bool
    """Whether the holder also renews by itself."""
    downgrades: bool
    """Whether a writer becomes a reader after its changes."""
    delay: float
    """Seconds before it starts."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """One candidate of an election, for `seconds`."""

    name: str
    value: str
    ttl: float
    seconds: float
    runs: bool
    """Whether it uses `run`; otherwise it campaigns once."""
    timeout: float | None
    rounds: int
    think: float
    linger: float
    stubborn: float
    """Seconds for which the work goes on after it was cancelled, at most."""
    fails: bool
    """Whether the work raises an error at its end."""
    delay: float


@dataclass(frozen=True, slots=True)
class Observe:
    """One observer of an election, for `seconds`."""

    name: str
    observer: str
    seconds: float
    delay: float


Check = Callable[[], None]


def random_use(rng: Random, scenario: Scenario, limit: int | None) -> Use:
    """Return a random use of the scenario's primitive; `limit` is that of the process's semaphore."""
    primitive, ttl = scenario.primitive, rng.choice(scenario.ttls)
    names = tuple(rng.sample(scenario.names, rng.randint(1, len(scenario.names)) if primitive == "multi" else 1))
    share = {"rwlock": 0.6, "semaphore": 1.0, "multi": 0.25}.get(primitive, 0.0)
    reads = tuple(name for name in names if rng.random() < share)
    writes = tuple(name for name in names if name not in reads)
    return Use(
        writes=writes,
        reads=reads,
        limit=limit if primitive == "semaphore" else None,
        ttl=ttl,
        timeout=rng.choice((None, None, None, 0.0, ttl / 2, ttl * 3)),
        renew=not scenario.lapses or rng.random() < 0.7,
        max_hold=ttl * rng.random() + 0.1 if scenario.lapses and rng.random() < 0.1 else None,
        block=rng.random() < 0.5,
        rounds=rng.choice((0, 1, 1, 2)) if writes else 0,
        think=rng.choice((0.0, 0.02, ttl / 4, ttl * 1.5)),
        linger=ttl * rng.choice(scenario.lingers),
        careful=rng.random() < 0.5,
        renews=rng.random() < 0.2,
        downgrades=primitive == "rwlock" and rng.random() < 0.5,
        delay=rng.choice((0.0, 0.01, 0.1, 0.5)) * rng.random(),
    )


def random_campaign(rng: Random, scenario: Scenario, label: str) -> Campaign:
    """Return a random candidate; its value is unique."""
    ttl = rng.choice(scenario.ttls)
    return Campaign(
        name=scenario.names[0],
        value=f"http://{label}/{rng.randrange(10**6)}",
        ttl=ttl,
        seconds=rng.choice((1.0, 4.0, 8.0)) * rng.random(),
        runs=rng.random() < 0.7,
        timeout=rng.choice((None, ttl, ttl * 3)),
        rounds=rng.choice((0, 1, 2)),
        think=rng.choice((0.0, 0.02, ttl / 4)),
        linger=ttl * rng.choice((0.0, 0.3, 2.0)),
        stubborn=ttl * rng.choice((0.0, 0.0, 3.0)),
        fails=rng.random() < 0.1,
        delay=rng.choice((0.0, 0.1, 0.5)) * rng.random(),
    )


class WorkFailed(Exception):
    """An error of the work of a term."""


class StopAt:
    """A stop signal that is set at a time of the process's clock."""

    def __init__(self, runtime: SimRuntime, seconds: float) -> None:
        self._now = runtime.now
        self._at = runtime.now() + seconds

    def is_set(self) -> bool:
        """Return whether the time has come."""
        return self._now() >= self._at


class Worker:
    """A task of a process that does one job after the other."""

    def __init__(
        self, client: SimClient, runtime: SimRuntime, resources: dict[str, Resource], recorder: Recorder
    ) -> None:
        self._client = client
        self._runtime = runtime
        self._resources = resources
        self._recorder = recorder

    async def work(self, jobs: Sequence[Any]) -> None:
        """Do the jobs; a cancellation ends one of them, not the worker."""
        for job in jobs:
            try:
                await self._runtime.sleep(job.delay)
                await self.perform(job)
            except (LockTimeout, LeaseLost, StaleToken, EngineUnavailable, RateLimited, BuildFailed, WorkFailed):
                pass  # after a loss the job writes nothing more under this lease
            except Cancelled:
                task = self._runtime.process.current
                if task is None:
                    return  # the run is over, and its coroutines are being closed
                task.uncancel()

    async def perform(self, job: Any) -> None:
        """Do one job."""
        match job:
            case Use():
                await self._use(job)
            case Campaign():
                await self._campaign(job)
            case Observe():
                await self._observe(job)

    # ------------------------------------------------------------------ locks

    async def _use(self, job: Use) -> None:
        if len(job.writes + job.reads) > 1:
            await self._use_group(job)
        elif (lease := await self._acquire(job)) is not None:
            await self._hold(job, lease)

    async def _acquire(self, job: Use) -> SimLease | None:
        (name,) = job.writes + job.reads
        mode = Mode.EXCLUSIVE if job.writes else Mode.SHARED if job.limit is None else Mode.PERMIT
        lock = BaseLock(self._client, name, mode, job.limit, ttl=job.ttl, renew=job.renew, max_hold=job.max_hold)
        return await (lock.try_acquire() if job.timeout == 0.0 else lock.acquire(job.timeout))

    async def _use_group(self, job: Use) -> None:
        scheduler, names = self._recorder.scheduler, job.writes + job.reads
        called = Group(names, self._client.owner, scheduler.time, None, Outcome.UNKNOWN, ())
        record = self._recorder.begun(self._runtime.process, called)
        try:
            group = await self._acquire_group(job, record)
        except BaseException:
            record.returned(Outcome.FAILED)
            raise
        record.returned(Outcome.FAILED if group is None else Outcome.OK)
        if group is not None:
            try:
                await self._hold(job, group)
            finally:
                record.update(released=scheduler.time)

    async def _acquire_group(self, job: Use, record: Pending[Group]) -> BaseGroup | None:
        multi = BaseMultiLock(
            self._client,
            lambda client: record.track(BaseGroup(client)),
            modes_of(job.writes, job.reads, ()),
            ttl=job.ttl,
            renew=job.renew,
            max_hold=job.max_hold,
        )
        return await (multi.try_acquire() if job.timeout == 0.0 else multi.acquire(job.timeout))

    async def _hold(self, job: Use, held: SimLease | BaseGroup) -> None:
        if job.block:
            async with Held(held):
                await self._work_under(job, held)
        else:
            try:
                await self._work_under(job, held)
            finally:
                await held._release()

    async def _work_under(self, job: Use, held: SimLease | BaseGroup) -> None:
        leases = cast("list[SimLease]", list(held._leases()))
        if job.renews:
            await leases[0]._renew_now()
        for lease in leases:
            if lease.mode is Mode.EXCLUSIVE:
                await self._change(lease, job.rounds, job.think, check=held.check if job.careful else None)
        if job.downgrades and leases[0].mode is Mode.EXCLUSIVE:
            await leases[0]._downgrade()
        await self._runtime.sleep(job.linger * self._runtime.random())

    async def _change(self, lease: SimLease, rounds: int, think: float, check: Check | None = None) -> None:
        resource, process = self._resources[lease.name], self._runtime.process
        for _ in range(rounds):
            saw = await resource.read(process, lease)
            await self._runtime.sleep(think * self._runtime.random())
            if check is not None:
                check()
            try:
                await resource.write(process, lease, saw)
            except OutcomeUnknown:
                break  # it may still arrive, so nothing else may be written under this lease

    # ------------------------------------------------------------------ elections

    async def _campaign(self, job: Campaign) -> None:
        election = BaseElection(self._client, job.name, job.value, ttl=job.ttl)
        if job.runs:
            await election.run(partial(self._lead, job), StopAt(self._runtime, job.seconds))
        else:
            async with Held(await election.campaign(job.timeout).acquire()) as term:
                await self._lead(job, term)

    async def _lead(self, job: Campaign, term: SimLease) -> None:
        scheduler = self._recorder.scheduler
        start = scheduler.time
        try:
            await self._change(term, job.rounds, job.think)
            await self._runtime.sleep(job.linger * self._runtime.random())
            if job.fails:
                raise WorkFailed
        except Cancelled:
            await self._runtime.sleep(job.stubborn * self._runtime.random())
            raise
        finally:
            work = Term(term.name, self._client.owner, term.token, start, scheduler.time)
            self._recorder.history.add(work)

    async def _observe(self, job: Observe) -> None:
        election = BaseElection(self._client, job.name, "")
        async for leader in election.observe(StopAt(self._runtime, job.seconds)):
            now = self._recorder.scheduler.time
            state = (None,) if leader is None else (leader.token, leader.owner, leader.value)
            self._recorder.history.add(Observation(job.name, job.observer, now, *state))
