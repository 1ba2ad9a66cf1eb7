"""What simulated clients do with the primitives that keep records: once, schedule, rate_limit and single_flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from random import Random

from fencelock.core.rates import RateRequest
from fencelock.core.rates import Reservation as Reserved
from fencelock.primitives.cached_values import CacheOptions, invalidate
from fencelock.primitives.once import BaseOnce
from fencelock.primitives.rate_limit import BaseRateLimit, Limit, make_limit
from fencelock.primitives.runs import Run, as_datetime
from fencelock.primitives.schedule import BaseSchedule
from fencelock.primitives.single_flight import SingleFlight
from fencelock.sim.clocks import WallClock
from fencelock.sim.history import Build, CacheCall, JobRun, Outcome, Reservation, Watch
from fencelock.sim.locks import SimClient, SimLease
from fencelock.sim.program import StopAt, Worker, WorkFailed
from fencelock.sim.recorder import Pending, Recorder
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import ONCE_SLOTS, Scenario
from fencelock.sim.task import Cancelled

NAME = "x"
SKEWS = (0.0, 0.3, 5.0)
"""Seconds by which the wall clock of a process may be wrong, and by which it may be set while the process runs."""


class Options:
    """The options of the primitive: all processes of a run have the same."""

    def __init__(self, rng: Random, scenario: Scenario) -> None:
        self.attempts = rng.choice((1, 1, 2, 3))
        self.every = rng.choice((0.5, 1.0, 2.0))
        self.catch_up = rng.choice(("latest", "all", "none"))
        self.overlap = rng.choice(("skip", "wait"))
        self.limit = make_limit(NAME, rng.choice((1, 5, 20)), rng.choice((0.5, 2.0)), rng.choice((1, 3, 10)))
        self.cache = CacheOptions(
            ttl=rng.choice((0.3, 2.0)),
            stale=rng.choice((0.0, 2.0)),
            timeout=rng.choice((None, 3.0)),
            error_for=rng.choice((0.0, 0.5)),
            lease_ttl=rng.choice(scenario.ttls),
        )


@dataclass(frozen=True, slots=True)
class RecordJob:
    """One use of a primitive. The seed decides what is open here when the job runs."""

    primitive: str
    action: str
    ttl: float
    seconds: float
    """How long the work or the build takes, at most."""
    stubborn: float
    """Seconds for which the work goes on after it was cancelled, at most."""
    fails: bool
    delay: float


ACTIONS = {
    "once": ("run",),
    "schedule": ("run", "run", "run", "run_due", "run_due", "trigger"),
    "rate_limit": ("acquire", "acquire", "try_acquire"),
    "single_flight": ("get", "get", "get", "get", "refresh", "invalidate"),
}


def random_record_job(rng: Random, scenario: Scenario) -> RecordJob:
    """Return a random use of the scenario's primitive."""
    ttl = rng.choice(scenario.ttls)
    return RecordJob(
        primitive=scenario.primitive,
        action=rng.choice(ACTIONS[scenario.primitive]),
        ttl=ttl,
        seconds=ttl * rng.choice((0.0, 0.1, 0.5, 2.0)),
        stubborn=ttl * rng.choice((0.0, 0.0, 3.0)),
        fails=rng.random() < 0.15,
        delay=rng.choice((0.0, 0.1, 2.0)) * rng.random(),
    )


class RecordWorker(Worker):
    """A task of a process that uses a primitive with records."""

    def __init__(self, client: SimClient, runtime: SimRuntime, recorder: Recorder, options: Options) -> None:
        super().__init__(client, runtime, {}, recorder)
        self._options = options
        self._scheduler = recorder.scheduler
        self._rng = self._scheduler.random
        self._wall = WallClock(self._scheduler, runtime.process.clock.rate)
        self._set_clock()
        self._scheduler.after(10.0 * self._rng.random(), self._set_clock)

    def _set_clock(self) -> None:
        skew = self._rng.choice(SKEWS)
        self._wall.jump(self._rng.uniform(-skew, skew) / 2)

    async def perform(self, job: RecordJob) -> None:
        """Do a job."""
        match job.primitive:
            case "once":
                slot = self._rng.choice(ONCE_SLOTS)
                once = SimOnce(self._client, NAME, slot, attempts=self._options.attempts, ttl=job.ttl)
                once.wall = self._wall
                await once.run(partial(self._run, job))
            case "schedule":
                await self._schedule(job)
            case "rate_limit":
                await self._call_limited(job)
            case _:
                await self._call_cached(job)

    # ------------------------------------------------------------------ jobs

    async def _run(self, job: RecordJob, lease: SimLease, run: Run) -> None:
        """The work of a run."""
        start, attempts = self._scheduler.time, self._options.attempts
        record = JobRun(lease.name, run.slot, lease.owner, run.token, run.attempt, attempts, run.triggered, start)
        work = self._recorder.begun(self._runtime.process, record)
        try:
            await self._runtime.sleep(job.seconds * self._runtime.random())
            if job.fails:
                raise WorkFailed
        except Cancelled:
            await self._runtime.sleep(job.stubborn * self._runtime.random())
            raise
        finally:
            work.update(end=self._scheduler.time)

    async def _schedule(self, job: RecordJob) -> None:
        options = self._options
        schedule = BaseSchedule(
            self._client,
            NAME,
            every=options.every,
            catch_up=options.catch_up,  # type: ignore[arg-type]
            overlap=options.overlap,  # type: ignore[arg-type]
            attempts=options.attempts,
            ttl=job.ttl,
        )
        schedule.clock = lambda: self._wall.us() / 1e6
        work = partial(self._run, job)
        if job.action == "trigger":
            await schedule.trigger(work)
        elif job.action == "run_due":
            await schedule.run_due(work, early=0.2)
        else:
            since = self._wall.us()
            await schedule.run(work, StopAt(self._runtime, 15.0 * self._runtime.random()))
            every = int(options.every * 1e6)
            waits = options.overlap == "wait" or options.catch_up == "all"
            watch = Watch(f"schedule:{NAME}", self._client.owner, every, since, self._wall.us(), waits)
            self._recorder.history.add(watch)

    # ------------------------------------------------------------------ rate limits

    async def _call_limited(self, job: RecordJob) -> None:
        limit = self._options.limit
        calls = SimRateLimit(self._client, limit, self._recorder)
        cost = self._rng.randint(1, limit.burst)
        for _ in range(self._rng.choice((1, 3, 20))):
            if job.action == "try_acquire":
                await calls.try_acquire(cost)
            else:
                await calls.acquire(cost, self._rng.choice((None, 0.0, 1.0)))
                calls.last.update(went=self._scheduler.time)

    # ------------------------------------------------------------------ cached values

    async def _call_cached(self, job: RecordJob) -> None:
        options = self._options.cache
        if job.action == "invalidate":
            await invalidate(self._client, NAME)
            return
        cache = SingleFlight(self._client, NAME, partial(self._build, job), options)
        called, value = self._scheduler.time, None
        try:
            value = await (cache.refresh() if job.action == "refresh" else cache.get())
        finally:
            call = CacheCall(
                f"cache:{NAME}",
                self._client.owner,
                called,
                self._scheduler.time,
                value,
                options.ttl + options.stale,
            )
            self._recorder.history.add(call)

    async def _build(self, job: RecordJob) -> int:
        number = self._recorder.next_build()
        build = Build(f"cache:{NAME}", self._client.owner, number, self._scheduler.time)
        work = self._recorder.begun(self._runtime.process, build)
        try:
            await self._runtime.sleep(job.seconds * self._runtime.random())
            if job.fails:
                raise WorkFailed
        finally:
            work.update(end=self._scheduler.time)
        return number


class SimOnce(BaseOnce[SimLease]):
    """`once` with the wall clock of a simulated process."""

    wall: WallClock

    def now(self) -> datetime:
        """Return the time of the process."""
        return as_datetime(self.wall.us())


class SimRateLimit(BaseRateLimit):
    """A rate limit that records every reservation. It is for one caller."""

    last: Pending[Reservation]

    def __init__(self, client: SimClient, limit: Limit, recorder: Recorder) -> None:
        super().__init__(client, [limit])
        self._begin: Callable[[Reservation], Pending[Reservation]] = partial(recorder.begun, client._process)
        self._scheduler = recorder.scheduler

    async def _reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reserved | None:
        (limit,), now = self.limits, self._scheduler.time
        self.last = self._begin(Reservation(limit.key, self._client.owner, limit.n, limit.per, limit.burst, now))
        reserved = await super()._reserve(requests, max_wait)
        assert reserved is not None
        self.last.returned(Outcome.OK if reserved.granted else Outcome.FAILED, wait=reserved.wait)
        return reserved
