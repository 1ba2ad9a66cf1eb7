"""Ctrl-C while a `with` block ends: the lease is no longer renewed, and the lock can be acquired again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fencelock
from fencelock.core.block import Blocks, take_last
from fencelock.core.lease import BaseLease
from fencelock.primitives.lock import EnteredBlocks
from fencelock.runtime.blocking import _store, run_sync
from tests.interrupts import interrupted_at
from tests.support.waiting import eventually_blocking

FUNCTIONS: list[Callable[..., Any]] = [
    EnteredBlocks.pop_block,
    take_last,
    run_sync,
    _store,
    BaseLease._exit_block,
    Blocks.exit,
    Blocks._leave,
    BaseLease._release,
    BaseLease._send_release,
]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("kind", ["lock", "multi"])
def test_interrupt_at_any_step_of_the_end_of_a_block_ends_the_lease(kind: str) -> None:
    """Wherever Ctrl-C interrupts the end of a block, nothing renews the lease, and its thread can acquire the lock again."""
    step, interrupted = 0, True
    with fencelock.connect(f"memory://interrupted-{kind}", ttl=30) as locks:
        lock: Any = getattr(locks, kind)("x")
        while interrupted:
            step += 1
            held = lock.__enter__()
            interrupted = interrupted_at(step, FUNCTIONS, lambda: lock.__exit__(None, None, None))
            assert not locks._client.renewer.leases(), f"renewed after an interrupt at step {step}"
            with pytest.raises(fencelock.LeaseLost):
                held.check()
            eventually_blocking(lambda: not locks.inspect("x").holders, f"the lock is free after step {step}")
            with lock:
                pass  # no WouldDeadlock, although the object of the lock is the same
    assert step > 20, "hardly any step was interrupted"
