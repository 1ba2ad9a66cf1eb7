"""Leases that the program dropped without a release."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from tests.contract.factory import MakeClient
from tests.contract.runtimes import LocksView
from tests.contract.steps import is_free
from tests.support.waiting import SOON


async def test_dropped_lease_is_logged_and_released_by_close(
    factory: MakeClient, locks: LocksView, caplog: pytest.LogCaptureFixture
) -> None:
    """A lease dropped without a release is logged, stays held meanwhile, and is released when its client is closed."""

    async def acquire_and_drop() -> None:
        await locks.lock("x", ttl=30).acquire()

    other = factory.connect()
    with caplog.at_level(logging.WARNING, "fencelock"), pytest.warns(ResourceWarning, match="dropped without release"):  # noqa: PT031
        await asyncio.create_task(acquire_and_drop())
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0.05)
    assert any("dropped without release" in record.getMessage() for record in caplog.records)
    assert not await is_free(other, "x")
    await locks.close()
    assert await is_free(other, "x")


@pytest.mark.client_side
async def test_lease_dropped_after_max_hold_is_released_by_close(
    factory: MakeClient, locks: LocksView, recwarn: pytest.WarningsRecorder
) -> None:
    """A lease that was lost at max_hold may be dropped without a warning, and close() releases it."""

    async def acquire_and_drop() -> None:
        lease = await locks.lock("x", ttl=30, max_hold=0.2).acquire()
        assert await lease.lost.wait(timeout=SOON)

    other = factory.connect()
    await asyncio.create_task(acquire_and_drop())
    await asyncio.sleep(0)
    gc.collect()
    await asyncio.sleep(0.05)
    assert not [warning for warning in recwarn if warning.category is ResourceWarning]
    assert not await is_free(other, "x")
    await locks.close()
    assert await is_free(other, "x")
