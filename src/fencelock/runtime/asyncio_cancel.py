"""Cancellation in the asyncio runtime: of a body whose lease is lost, and of callers whose clean-up has to end first."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

T = TypeVar("T")


class TaskCancelGuard:
    """Cancels the task that entered the block when the lease is lost, and uncancels it when the block ends."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a with block is entered by a task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._outside = task.cancelling()
        self._inside = True
        self._cancelled = False

    def interrupt(self) -> None:
        """Cancel the body at its next await; callable from any thread. The loop does it, as the body may be running."""
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:
            pass  # the loop is closed, so the body has ended

    def _cancel(self) -> None:
        if self._inside and not self._cancelled and not self._task.done():
            self._cancelled = True
            self._task.cancel("the lease was lost")

    def leave(self) -> bool:
        """Take this guard's cancellation back; return whether it was the only one."""
        self._inside = False
        return self._cancelled and self._task.uncancel() <= self._outside


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # asyncio logs exceptions that no code has retrieved


async def await_uncancelled(future: asyncio.Future[T], timeout: float | None) -> T:
    """Await the future, at most `timeout` seconds, even if the caller is cancelled; raise the cancellation afterwards."""
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        left = None if end is None else end - loop.time()
        if left is not None and left <= 0:
            break
        try:
            await asyncio.wait([future], timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None or not future.done():
        future.add_done_callback(_mark_retrieved)
    if cancelled is not None:
        raise cancelled
    if not future.done():
        raise TimeoutError(f"not done within {timeout:g} s")
    if future.cancelled():
        raise TimeoutError("it was cancelled: the client is being closed")
    return future.result()
