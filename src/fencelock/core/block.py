"""What a `with` block does around a lease: cancel its body on loss, release at its end, and say what went wrong."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from fencelock.core.log import WARNING, log
from fencelock.errors import FencelockError, LeaseLost
from fencelock.model import LossReason, Mode

if TYPE_CHECKING:
    from fencelock.core.client import Client
    from fencelock.core.lease import BaseLease
    from fencelock.core.runtime import CancelGuard


class Holding(Protocol):
    """What a `with` block needs of a lease, or of the group of a multi-lock."""

    _client: Client[Any]

    @property
    def reason(self) -> LossReason | None: ...
    @property
    def name(self) -> str: ...
    def is_lost(self) -> bool: ...
    def _leases(self) -> Sequence[BaseLease]:
        """Return the leases that the block holds."""
        ...

    def _loss(self) -> LeaseLost: ...
    async def _release(self) -> bool: ...
    def _withdraw(self) -> object:
        """Stop renewing, without a request; what the engine still has becomes a leftover."""
        ...


def give_up(lease: Holding) -> None:
    """End the lease of a block whose end was interrupted: no code can release it any more, so it must not be renewed."""
    if lease._withdraw():
        with suppress(RuntimeError):  # no more threads, or the loop is closed: close() abandons it
            lease._client.renewer.look_at(lease._client.runtime.now())


class Blocks:
    """The `with` blocks that are open on one lease. Several tasks may be inside at once; only the outermost releases."""

    __slots__ = ("_guards", "_tasks", "more_permits", "open")

    def __init__(self) -> None:
        self.open = 0
        self._tasks: list[Hashable] = []
        self._guards: list[CancelGuard] = []
        """The guards of the blocks, in the order of `_tasks`; none in a runtime that cannot cancel."""
        self.more_permits = False
        """Whether a task inside has entered another permit of the same name, too."""

    def enter(self, lease: Holding, task: Hashable) -> None:
        """Begin a block. `task` is the thread or task that enters it. On loss, asyncio cancels its body."""
        self.open += 1
        self._tasks.append(task)
        for held in lease._leases():
            current = lease._client.entered.get((held.name, task))
            if current is None or current._over:
                lease._client.entered[held.name, task] = held
            elif held.mode is Mode.PERMIT:
                current._blocks.more_permits = held._blocks.more_permits = True
        if (make_guard := lease._client.runtime.cancel_guard) is not None:
            guard = make_guard()
            self._guards.append(guard)
            if lease.is_lost():
                guard.interrupt()

    def interrupt(self) -> None:
        """Cancel the bodies of all blocks, as the lease is lost."""
        for guard in self._guards.copy():  # a copy: another thread may change the list meanwhile
            guard.interrupt()

    async def exit(self, lease: Holding, error: BaseException | None) -> None:
        """End a block: release, and raise LeaseLost after a loss unless the body has an error of its own."""
        cancelled_by_us = False
        try:
            self.open -= 1
            cancelled_by_us = self._leave(lease)
            await lease._release()
        except FencelockError as failure:
            # The body is done, and its work may be committed: an error here would look like a failed acquire.
            failed = next((held for held in lease._leases() if held.name == failure.name), lease._leases()[0])
            log("lease", WARNING, str(failure), lock=failed.name, token=failed.token, owner=failed.owner)
        except BaseException:
            give_up(lease)
            raise
        if lease.reason is None:
            return
        own_error = isinstance(error, Exception | KeyboardInterrupt | SystemExit)
        if error is None or (cancelled_by_us and not own_error):
            raise lease._loss() from error
        if not (isinstance(error, LeaseLost) and error.name == lease.name):
            error.add_note(f"Besides, {lease._loss()}.")

    def _leave(self, lease: Holding) -> bool:
        """Remove the block that this task entered last; return whether its guard has cancelled the body."""
        try:
            task = lease._client.runtime.current_task()
        except RuntimeError:
            task = None  # no task at all: the event loop was closed, and its pending coroutines are being ended
        # A fixture or an exit stack may leave in another task than it entered: then take the last block.
        at = len(self._tasks) - 1
        if self._tasks[at] != task:
            at = next((at for at in reversed(range(at)) if self._tasks[at] == task), at)
        task = self._tasks.pop(at)
        if task not in self._tasks:  # it has left the outermost block of this lease
            entered = lease._client.entered
            for held in lease._leases():
                if entered.get((held.name, task)) is held:
                    del entered[held.name, task]
                    if self.more_permits:
                        self._enter_other_permit(lease._client, held.name, task)
        return self._guards.pop(at).leave() if self._guards else False

    def _enter_other_permit(self, client: Client[Any], name: str, task: Hashable) -> None:
        """Record another permit of the name that this task still holds: only permits can be left in any order."""
        for lease in client.renewer.leases():
            if lease.name == name and task in lease._blocks._tasks:
                client.entered[name, task] = lease
                return
