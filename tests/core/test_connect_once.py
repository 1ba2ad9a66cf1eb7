"""One link for all who need one: who waits for somebody else's, and whose failure is shared."""

from __future__ import annotations

import asyncio
from math import inf

import pytest

from fencelock.core.connect_once import ConnectOnce
from fencelock.errors import EngineUnavailable
from fencelock.runtime.asyncio import AsyncioRuntime


class Line:
    """Dials as it is told, and counts."""

    def __init__(self, *failures: float) -> None:
        self.dialled: list[float] = []
        self.kept: list[str] = []
        self._failures = list(failures)
        self._dialling = ConnectOnce(AsyncioRuntime(), "the server", self._dial)

    async def link(self, within: float = inf) -> str:
        """Have a link."""
        return await self._dialling.once(lambda: self.kept[-1] if self.kept else None, self.kept.append, within)

    async def _dial(self, within: float) -> str:
        self.dialled.append(within)
        if self._failures:
            await asyncio.sleep(self._failures.pop(0))
            raise EngineUnavailable(f"refused, call {len(self.dialled)}")
        await asyncio.sleep(0.01)
        return f"link {len(self.dialled)}"


async def test_concurrent_callers_share_one_connect() -> None:
    """A hundred concurrent callers get one connection, opened once."""
    line = Line()
    assert await asyncio.gather(*(line.link() for _ in range(100))) == ["link 1"] * 100
    assert len(line.dialled) == 1


async def test_failure_is_shared() -> None:
    """Who waited for somebody's link fails as that does, without another try."""
    line = Line(0.01)
    errors = await asyncio.gather(*(line.link() for _ in range(10)), return_exceptions=True)
    assert {str(error) for error in errors} == {"refused, call 1"}
    assert len(line.dialled) == 1
    assert await line.link() == "link 2"


async def test_connect_is_repeated_for_callers_with_more_time() -> None:
    """If the first caller had less time than the others have left, one of them connects again for all."""
    line = Line(0.01)
    first, *others = await asyncio.gather(line.link(1), *(line.link(60) for _ in range(9)), return_exceptions=True)
    assert isinstance(first, EngineUnavailable)
    assert others == ["link 2"] * 9
    assert line.dialled[0] <= 1 < line.dialled[1]


async def test_caller_with_a_short_timeout_does_not_wait_for_the_shared_connect() -> None:
    """A caller whose time is over does not wait for another caller's connect, which continues."""
    line = Line(5)
    patient = asyncio.create_task(line.link())
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match=r"cannot reach the server within 0\.05 s"):
        await line.link(0.05)
    patient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await patient
    assert await line.link() == "link 2", "the cancelled one left the others waiting"
