"""What a `with` block does around a lease: cancel its body on loss, release at its end, and say what went wrong."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from fencelock.core.log import WARNING, log
from fencelock.errors import FencelockError, LeaseLost

if TYPE_CHECKING:
    from fencelock.core.lease import BaseLease
    from fencelock.core.runtime import CancelGuard


class Blocks:
    """The `with` blocks that are open on one lease. Several tasks may be inside at once; only the outermost releases."""

    __slots__ = ("_guards", "open")

    def __init__(self) -> None:
        self.open = 0
        self._guards: list[tuple[Hashable, CancelGuard]] = []

    def enter(self, lease: BaseLease, task: Hashable) -> None:
        """Begin a block. `task` is the thread or task that enters it. On loss, asyncio cancels its body."""
        self.open += 1
        if (make_guard := lease._client.runtime.cancel_guard) is not None:
            guard = make_guard()
            self._guards.append((task, guard))
            if lease.is_lost():
                guard.interrupt()

    def interrupt(self) -> None:
        """Cancel the bodies of all blocks, as the lease is lost."""
        for _, guard in self._guards.copy():  # a thread may have seen the loss, and the event loop goes on meanwhile
            guard.interrupt()

    async def exit(self, lease: BaseLease, error: BaseException | None) -> None:
        """End a block: release, and raise LeaseLost after a loss unless the body has an error of its own."""
        self.open -= 1
        cancelled_by_us = self._leave(lease) if self._guards else False
        try:
            await lease._release()
        except FencelockError as failure:
            # The body is done, and its work may be committed: an error here would look like a failed acquire.
            log("lease", WARNING, str(failure), lock=lease.name, token=lease.token, owner=lease.owner)
        if lease.reason is None:
            return
        own_error = isinstance(error, Exception | KeyboardInterrupt | SystemExit)
        if error is None or (cancelled_by_us and not own_error):
            raise lease._loss() from error
        if not (isinstance(error, LeaseLost) and error.name == lease.name):
            error.add_note(f"Besides, {lease._loss()}.")

    def _leave(self, lease: BaseLease) -> bool:
        """Remove the guard of the block that this task entered last; return whether it has cancelled the body."""
        guards = self._guards
        try:
            task = lease._client.runtime.current_task()
        except RuntimeError:
            task = None  # no task at all: the event loop was closed, and its pending coroutines are being ended
        # A fixture or an exit stack may leave in another task than it entered: then take the last guard.
        at = next((at for at in reversed(range(len(guards))) if guards[at][0] == task), -1)
        return guards.pop(at)[1].leave()
