"""`once` and `schedule` of either API as coroutines. Work is an `async def`, which the blocking API calls from its thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fencelock.primitives.runs import Run
from tests.contract.factory import MakeClient
from tests.contract.runtimes import LocksView

Work = Callable[[Any], Awaitable[object]]


async def nothing(slot: Any) -> None:
    """Do no work."""


async def until_lost(slot: Any) -> None:
    """Work until the lease is lost; in asyncio the loss cancels it."""
    while not slot.lost.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


class JobView:
    """A `Once` or a `Schedule`."""

    def __init__(self, factory: MakeClient, raw: Any) -> None:
        self.raw = raw
        self._blocking = factory.runtime_name == "blocking"
        self._call = factory.call

    def _plain(self, work: Work) -> Callable[[Any], object]:
        loop = asyncio.get_running_loop()

        async def call(slot: Any) -> None:
            await work(slot)

        return lambda slot: asyncio.run_coroutine_threadsafe(call(slot), loop).result()

    async def _with(self, method: Callable[..., Any], work: Work, *args: Any) -> Any:
        if self._blocking:
            return await self._call(method, self._plain(work), *args)
        return await method(work, *args)

    async def run(self, work: Work, *stop: Any) -> Any:
        """Call `run`."""
        return await self._with(self.raw.run, work, *stop)

    async def run_due(self, work: Work = nothing) -> list[Run]:
        """Call `run_due`."""
        return await self._with(self.raw.run_due, work)  # type: ignore[no-any-return]

    async def trigger(self, work: Work = nothing) -> Run | None:
        """Call `trigger`."""
        return await self._with(self.raw.trigger, work)  # type: ignore[no-any-return]

    async def history(self, limit: int = 20) -> list[Run]:
        """Call `history`."""
        if self._blocking:
            return list(await self._call(self.raw.history, limit))
        return list(await self.raw.history(limit))

    async def __aenter__(self) -> Any:
        return await (self._call(self.raw.__enter__) if self._blocking else self.raw.__aenter__())

    async def __aexit__(self, *error: Any) -> None:
        await (self._call(self.raw.__exit__, *error) if self._blocking else self.raw.__aexit__(*error))


def once(factory: MakeClient, locks: LocksView, name: str, slot: str, **options: Any) -> JobView:
    """Return `locks.once(…)`."""
    return JobView(factory, locks.raw.once(name, slot, **factory.ttl_scale.options(options)))


def schedule(
    factory: MakeClient, locks: LocksView, name: str, clock: Callable[[], float] | None = None, **options: Any
) -> JobView:
    """Return `locks.schedule(…)`, perhaps with another wall clock."""
    view = JobView(factory, locks.raw.schedule(name, **factory.ttl_scale.options(options)))
    if clock is not None:
        view.raw._schedule.clock = clock
    return view
