"""A multi-lock on an engine that hangs: its clean-up has one time limit for all names."""

from __future__ import annotations

import asyncio
import time

import pytest

from fencelock import aio
from fencelock.core.leftovers import CLEANUP_SECONDS
from tests.contract.faults import Faulty
from tests.contract.runtimes import connect, direct
from tests.contract.steps import waiting


async def test_cancelled_group_waits_once_for_a_hung_engine() -> None:
    """A cancelled group waits once for its clean-up on a hung engine, not once for each name."""
    locks = connect("aio", direct, "memory://multi-hangs")
    async with locks, aio.connect("memory://multi-hangs") as other, other.lock("z"):
        faulty = Faulty.around(locks)
        task = asyncio.ensure_future(locks.multi("a", "b", "c", "z").acquire())
        await waiting(locks, "z")
        faulty.allow("abandon")
        faulty.slow("abandon", 3, 20)
        begun = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - begun < CLEANUP_SECONDS + 3
        faulty.heal()
