"""Ctrl-C at a chosen step, at the points where Python checks for signals."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any


def interrupted_at(step: int, functions: Collection[Callable[..., Any]], work: Callable[[], object]) -> bool:
    """Run the work and interrupt it at the given step of these functions; return whether it has that many steps."""
    looks = {function.__code__: _looks(function.__code__) for function in functions}
    left = step

    def trace(frame: FrameType, kind: str, _: object) -> Any:
        nonlocal left
        if frame.f_code not in looks:
            return None
        frame.f_trace_opcodes = True
        if kind == "opcode" and frame.f_lasti in looks[frame.f_code]:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def _looks(code: CodeType) -> set[int]:
    """Return the offsets at which Python checks for signals in a function: at its start, and after each call."""
    return {step.offset for before, step in pairwise(dis.get_instructions(code)) if before.opname in {"RESUME", "CALL"}}
