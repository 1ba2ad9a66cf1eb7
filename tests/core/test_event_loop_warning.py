"""The blocking API inside a running event loop."""

from __future__ import annotations

import asyncio

import pytest

import fencelock
from fencelock.runtime import blocking


def test_blocking_api_in_an_event_loop_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The blocking API in an event loop warns once and names fencelock.aio; elsewhere it does not warn."""
    monkeypatch.setattr(blocking, "_warned", False)

    def use() -> None:
        with fencelock.connect("memory://warned") as locks, locks.lock("x"):
            pass

    async def main() -> None:
        use()
        use()

    use()
    assert not caplog.records
    asyncio.run(main())
    (record,) = caplog.records
    assert "fencelock.aio" in record.message
