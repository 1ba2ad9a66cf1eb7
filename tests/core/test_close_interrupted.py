"""Ctrl-C while a client is closed: a second close() does the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import fencelock
from fencelock.core.client import Client
from fencelock.core.renewer import LeaseRenewer
from fencelock.engines.sqlite.database import Database
from fencelock.engines.sqlite.engine import SqliteEngine
from tests.interrupts import interrupted_at

CLOSING: list[Callable[..., Any]] = [
    Client.close,
    Client._close,
    LeaseRenewer.grants,
    LeaseRenewer.stop,
    SqliteEngine.close,
    Database.close,
]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_close_interrupted_at_any_step_can_be_repeated(tmp_path: Path) -> None:
    """Wherever a close is interrupted, after the next one nothing is renewed any more, and no descriptor is open.

    What was held is released, too, unless it was that which was interrupted: then it runs out.
    """
    url = f"sqlite:///{tmp_path}/locks.db"
    with fencelock.connect(url) as other:
        other.lock("warm").acquire().release()
        with fencelock.connect(url) as warm:  # SQLite keeps its descriptor for the next who opens the file
            warm.lock("warm").acquire().release()
        before = len(os.listdir("/proc/self/fd"))
        left = 0
        for step in count(1):
            locks = fencelock.connect(url)
            lease = locks.lock("x", ttl=60).acquire()
            interrupted = interrupted_at(step, CLOSING, locks.close)
            locks.close()
            assert lease.reason is fencelock.LossReason.CLOSED, f"interrupted at step {step}"
            assert locks._client.renewer.leases() == [], f"interrupted at step {step}"
            left += other.force_release("x", reason="it would run out by itself")
            assert len(os.listdir("/proc/self/fd")) == before, f"interrupted at step {step}"
            with pytest.raises(fencelock.ClientClosed):
                locks.inspect("x")
            if not interrupted:
                break
        assert step > 10
        assert left < step / 2
