"""A rate limit that the processes of a fleet share: every window, every charge, and the order of service."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import NamedTuple

import pytest

from tests.contract.factory import MakeClient

pytestmark = [pytest.mark.processes, pytest.mark.records]

N, BURST = 20, 10

CALL = """
import inspect
from fencelock import RateLimited
from fencelock.core.clock import boottime

async def result_of(value):
    return await value if inspect.isawaitable(value) else value

class Recorder:
    def __init__(self, rates):
        self.rates, self.granted, self.refused = rates, [], 0

    async def reserve(self, requests, max_wait):
        asked = boottime()
        reservation = await self.rates.reserve(requests, max_wait)
        if reservation.granted:
            self.granted.append([asked, boottime(), reservation.wait, *reservation.times])
        else:
            self.refused += 1
        return reservation

    async def refund(self, requests, reservation):
        raise AssertionError('no caller gives up')

limit = locks.raw.rate_limit('api', n, per=per, burst=burst)
recorder = limit._limit._rates = Recorder(limit._limit._rates)
returned = []
for _ in range(calls):
    try:
        await result_of(limit.acquire(cost=100 * n, timeout=0))
    except RateLimited:
        pass
    await result_of(limit.acquire())
    returned.append([boottime(), len(recorder.granted) - 1])
result = recorder.granted, recorder.refused, returned
"""


class Granted(NamedTuple):
    """A reservation. `asked` and `answered` are times of the machine's clock, which all processes of the test share."""

    asked: float
    answered: float
    wait: float
    number: int
    """What the engine stored: in µs, on its own clock."""

    @property
    def earliest(self) -> float:
        """The earliest time at which the call may go: the engine decided between `asked` and `answered`."""
        return self.asked + self.wait

    @property
    def latest(self) -> float:
        """The latest time from which the call may go. A process that was stopped may really go much later."""
        return self.answered + self.wait


def most_in_a_window(granted: list[Granted], width: float) -> int:
    """Return the largest number of grants that certainly lie in one window of this width."""
    starts = [grant.earliest for grant in granted]
    return max(sum(grant.earliest >= start and grant.latest < start + width for grant in granted) for start in starts)


def lost_time(granted: list[Granted], cost: int) -> float:
    """Return the seconds that nobody used. Check that each grant was charged `cost` µs, and refused calls nothing."""
    lost = 0.0
    for last, grant in pairwise(granted):
        unused = (grant.number - last.number - cost) / 1e6
        assert unused >= 0, "a call was not charged"
        if unused:  # the number was in the past, so that the call was charged from its own time
            assert grant.wait == 0, "something else was charged"
            assert unused <= grant.answered - last.asked + 0.01, "a call was charged for time that has not passed"
            lost += max(0.0, unused - (grant.answered - grant.asked))  # a slow engine is not the limit's fault
    return lost


def check_order(granted: list[Granted]) -> None:
    """Check that a process which reserved before another one asked goes first: `granted` is in the order of service."""
    for position, grant in enumerate(granted):
        overtaken = [later for later in granted[position + 1 :] if later.answered < grant.asked]
        assert not overtaken, "a process that asked later goes earlier"


@pytest.mark.parametrize(("processes", "per"), [(4, 0.5), pytest.param(16, 1.0, marks=pytest.mark.long)])
async def test_fleet_never_exceeds_its_limit(factory: MakeClient, processes: int, per: float) -> None:
    """In every window of `per` seconds a fleet gets at most n + burst calls, in the order in which it asked for them.

    Refused calls are not charged, and 16 processes use at least 95 % of n.
    """
    workers = await asyncio.gather(*(factory.worker() for _ in range(processes)))
    answers = await asyncio.gather(
        *(worker.do(CALL, n=N, per=per, burst=BURST, calls=80 // processes) for worker in workers)
    )
    granted = sorted((Granted(*grant) for answer in answers for grant in answer[0]), key=lambda grant: grant.number)
    assert sum(len(returned) for _, _, returned in answers) == 80
    assert sum(refused for _, refused, _ in answers) == 80, "before each call, one that is too large"
    for grants, _, returned in answers:
        for time, index in returned:
            assert time >= Granted(*grants[index]).earliest, "a call went before its time"
    assert most_in_a_window(granted, per) <= N + BURST
    cost = round(per * 1e6 / N)
    lost = lost_time(granted, cost)
    check_order(granted)
    if processes == 16:  # fewer may all be late on a busy machine
        assert lost <= 0.05 * (granted[-1].number - granted[0].number) / 1e6, "less than 95 % of n was used"
