"""What a `with` block does around a lease: cancel its body on loss, release at its end, and say what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fencelock.core.log import WARNING, log
from fencelock.errors import FencelockError, LeaseLost
from fencelock.model import LossReason, Mode

if TYPE_CHECKING:
    from fencelock.core.client import Client
    from fencelock.core.lease import BaseLease
    from fencelock.core.runtime import CancelGuard

X = TypeVar("X")


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


def take_last(
    entered: list[tuple[Hashable, X]], current_task: Callable[[], Hashable], taken: list[X] | None = None
) -> tuple[Hashable, X]:
    """Remove and return the block that this thread or task has entered last. What it holds is in `taken` before that.

    If this task has entered none, it is the last one of any task: a fixture or an exit stack may leave a block in another
    task than it entered. Others may enter and leave their blocks meanwhile.
    """
    blocks = entered.copy()
    block = blocks[-1]
    if len(blocks) > 1:
        try:
            task = current_task()
        except RuntimeError:
            task = None  # no task at all: the event loop was closed, and its pending coroutines are being ended
        block = next((block for block in reversed(blocks) if block[0] == task), block)
    if taken is not None:
        taken.append(block[1])
    entered.remove(block)  # blocks of one thread and lease are equal
    return block


class Blocks:
    """The `with` blocks that are open on one lease. Several tasks may be inside at once; only the outermost releases."""

    __slots__ = ("_entered", "more_permits")

    def __init__(self) -> None:
        self._entered: list[tuple[Hashable, CancelGuard | None]] = []
        """Each block: the thread or task that entered it, and its guard; None in a runtime that cannot cancel."""
        self.more_permits = False
        """Whether a task inside has entered another permit of the same name, too."""

    @property
    def open(self) -> bool:
        """Whether a block is open."""
        return bool(self._entered)

    def enter(self, lease: Holding, task: Hashable) -> None:
        """Begin a block. `task` is the thread or task that enters it. On loss, asyncio cancels its body."""
        make_guard = lease._client.runtime.cancel_guard
        guard = None if make_guard is None else make_guard()
        self._entered.append((task, guard))
        for held in lease._leases():
            current = lease._client.outermost.get((held.name, task))
            if current is not None and held.mode is Mode.PERMIT:  # also if it is over: there may be a third one
                current._blocks.more_permits = held._blocks.more_permits = True
            if current is None or current._over:
                lease._client.outermost[held.name, task] = held
        if guard is not None and lease.is_lost():
            guard.interrupt()

    def interrupt(self) -> None:
        """Cancel the bodies of all blocks, as the lease is lost."""
        for _, guard in self._entered.copy():  # a copy: another thread may change the list meanwhile
            if guard is not None:
                guard.interrupt()

    async def exit(self, lease: Holding, error: BaseException | None) -> None:
        """End a block: release, and raise LeaseLost after a loss unless the body has an error of its own."""
        cancelled_by_us = False
        try:
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
        task, guard = take_last(self._entered, lease._client.runtime.current_task)
        if not self._entered or not self._is_inside(task):  # it has left the outermost block of this lease
            outermost = lease._client.outermost
            for held in lease._leases():
                if outermost.get((held.name, task)) is held:
                    del outermost[held.name, task]
                    if self.more_permits:
                        self._make_other_permit_outermost(lease._client, held.name, task)
        return False if guard is None else guard.leave()

    def _is_inside(self, task: Hashable) -> bool:
        return any(entered == task for entered, _ in self._entered.copy())

    def _make_other_permit_outermost(self, client: Client[Any], name: str, task: Hashable) -> None:
        """Record another permit of the name that this task still holds: only permits can be left in any order."""
        for lease in client.renewer.leases():
            if lease.name == name and lease._blocks._is_inside(task):
                client.outermost[name, task] = lease
                return
