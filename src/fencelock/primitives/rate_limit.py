"""Rate limits: at most n calls per period in the whole fleet. A caller reserves its time in one step and sleeps locally."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import ceil, inf
from typing import Any, Literal, NamedTuple

from fencelock.core.acquire import attach_name
from fencelock.core.client import Client
from fencelock.core.log import WARNING, log
from fencelock.core.rates import RateRequest, Rates, Reservation
from fencelock.core.validation import check_seconds
from fencelock.errors import EngineUnavailable, GuaranteeUnavailable, InvalidArgument, InvalidType, RateLimited
from fencelock.primitives.keys import record_key

ON_ERROR = ("raise", "allow")


class RateState(NamedTuple):
    """The state of a limit, for response headers and dashboards."""

    limit: int
    """The calls per period, `n`."""
    remaining: int
    """How many calls may go at this moment, at most `burst`."""
    retry_after: float
    """Seconds until the next call may go; 0 if one may go now."""
    reset_after: float
    """Seconds until the whole burst is available again."""


class Limit(NamedTuple):
    """One limit: `n` calls per `per` seconds, and `burst` of them at once."""

    name: str
    key: str
    n: int
    per: float
    burst: int

    @property
    def interval(self) -> float:
        """µs between two calls."""
        return self.per * 1e6 / self.n

    def request(self, cost: int) -> RateRequest:
        """Return what a call of this cost takes. Rounded up, so that the rate is never exceeded."""
        return RateRequest(self.key, ceil(cost * self.interval), int(self.burst * self.interval))


def make_limit(name: str, n: object, per: object, burst: object) -> Limit:
    """Return a limit, or raise InvalidArgument."""
    key = record_key("rate", name)
    seconds = check_seconds(per, "per", name, zero=False)
    if seconds is None:
        raise InvalidArgument(f"{name!r}: per must be a number of seconds", name)
    return Limit(name, key, _whole(n, "n", name), seconds, _whole(burst, "burst", name))


class BaseRateLimit:
    """One limit, or several that are charged together, of both APIs, as coroutines."""

    def __init__(
        self, client: Client[Any], limits: Sequence[Limit], on_error: Literal["raise", "allow"] = "raise"
    ) -> None:
        self._client = client
        if not limits:
            raise InvalidArgument("rate_limits() needs at least one limit")
        self.limits = tuple({limit.key: limit for limit in limits}.values())
        self.name = ", ".join(limit.name for limit in self.limits)
        rates: Rates | None = getattr(client.engine, "rates", None)
        if rates is None:
            engine = client.engine.traits.engine
            raise GuaranteeUnavailable(f"{self.name!r}: {engine} has no records, so it has no rate limits", self.name)
        self._rates = rates
        if on_error not in ON_ERROR:
            raise InvalidArgument(f"{self.name!r}: on_error must be one of {', '.join(ON_ERROR)}", self.name)
        self.on_error = on_error

    async def acquire(self, cost: int, timeout: float | None) -> None:
        """Wait until the call may go; raise RateLimited at once if that would take longer than the timeout."""
        runtime = self._client.runtime
        seconds = check_seconds(timeout, "timeout", self.name, zero=True)
        requests, until = self._requests(cost), inf if seconds is None else runtime.now() + seconds
        while True:
            started = runtime.now()
            reservation = await self._reserve(requests, min(max(0.0, until - started), 1e9))
            if reservation is None:
                return
            if not reservation.granted:
                raise RateLimited(
                    f"{self.name!r} is at its limit: the next call of this cost may go in {reservation.wait:.3g} s",
                    self.name,
                    retry_after=reservation.wait,
                )
            if not reservation.wait:
                return
            try:
                await runtime.sleep(reservation.wait)
            except BaseException:
                with suppress(TimeoutError):  # without the refund, the limit is a little stricter for a moment
                    await runtime.shield(self._refund(requests, reservation), 1.0)
                raise
            # A process that was stopped in its sleep must not use its turn together with later ones.
            late = runtime.now() - started - reservation.wait
            if late <= min(limit.burst * limit.interval for limit in self.limits) / 1e6:
                return

    async def try_acquire(self, cost: int) -> bool:
        """Return whether the call may go now; if not, it is not charged."""
        requests = self._requests(cost)
        if any(request.cost > request.tolerance + 1 for request in requests):  # + 1 µs: a cost is rounded up
            raise InvalidArgument(
                f"{self.name!r}: a call of cost {cost} is larger than the burst and never goes at once; use acquire()",
                self.name,
            )
        reservation = await self._reserve(requests, 0.0)
        return reservation is None or reservation.granted

    async def state(self) -> RateState:
        """Return the state of the limit; of several, of the one that is exhausted first."""
        self._client._check_open(self.name)
        with attach_name(self.name):
            now, times = await self._rates.read([limit.key for limit in self.limits])
        states = []
        for limit, time in zip(self.limits, times, strict=True):
            ahead = max(0, time - now)
            free = max(0.0, limit.burst * limit.interval - ahead)
            wait = max(0.0, ahead + limit.interval - limit.burst * limit.interval)
            states.append(RateState(limit.n, int(free / limit.interval + 1e-6), wait / 1e6, ahead / 1e6))
        return max(states, key=lambda state: state.retry_after)

    async def _reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reservation | None:
        """Charge the limits; return None if the engine failed and calls are allowed then."""
        self._client._check_open(self.name)
        try:
            with attach_name(self.name):
                return await self._rates.reserve(requests, max_wait)
        except EngineUnavailable as error:
            if self.on_error == "raise":
                raise
            log("rate_limit", WARNING, f"{self.name!r} cannot be checked, and the call goes: {error}", lock=self.name)
            return None

    async def _refund(self, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        try:
            await self._rates.refund(requests, reservation)
        except EngineUnavailable:
            return  # the limit is a little stricter for a moment

    def _requests(self, cost: object) -> list[RateRequest]:
        whole = _whole(cost, "cost", self.name)
        return [limit.request(whole) for limit in self.limits]


def _whole(value: object, what: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name!r}: {what} must be a whole number, not {type(value).__name__}", name)
    if not 1 <= value <= 10**12:
        raise InvalidArgument(f"{name!r}: {what} must be between 1 and 10^12, not {value!r:.40}", name)
    return value
