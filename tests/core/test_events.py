"""Events of the blocking runtime: any thread sets them, and Ctrl-C at any moment breaks none."""

from __future__ import annotations

import sys
import threading
from itertools import count
from types import FrameType
from typing import Any

from fencelock.runtime.blocking import BlockingRuntime, run_sync


def waits_undisturbed(event: Any, step: int) -> bool:
    """Wait for the event and interrupt that at the given step; return whether it was over before."""
    left = step

    def trace(frame: FrameType, kind: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if kind == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    wait = event.wait(0.001)
    sys.settrace(trace)
    try:
        wait.send(None)
    except StopIteration:
        return True
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(None)
    raise AssertionError("it suspended")


def test_interrupted_wait_blocks_no_other_waiter() -> None:
    """When a wait is interrupted at any step, set() does not hang, and the next waiter is woken."""
    for step in count(1):
        event = BlockingRuntime().event()
        over = waits_undisturbed(event, step)
        setter = threading.Thread(target=event.set, daemon=True)
        setter.start()
        setter.join(60)
        assert not setter.is_alive(), f"interrupted at step {step}, and nobody can set it any more"
        assert run_sync(event.wait(60)) is True
        if over:
            break
    assert step > 20


def test_set_wakes_all_waiters() -> None:
    """set() wakes all waiters, and later waiters return at once."""
    event = BlockingRuntime().event()
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(run_sync(event.wait(60)))) for _ in range(5)]
    for thread in threads:
        thread.start()
    while len(event._waiters) < 5:
        pass
    event.set()
    for thread in threads:
        thread.join(60)
    assert woken == [True] * 5
    assert run_sync(event.wait(0)) is True
    event.clear()
    assert run_sync(event.wait(0)) is False
    assert run_sync(event.wait(-1)) is False
    assert event._waiters == []
