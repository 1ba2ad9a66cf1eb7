"""A group of leases that are held, lost and released together: what a multi-lock gives to its user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from fencelock.core.block import Blocks
from fencelock.core.lease import BaseLease
from fencelock.core.validation import check_seconds
from fencelock.errors import FencelockError, LeaseLost
from fencelock.model import Claim, LossReason

if TYPE_CHECKING:
    from fencelock.core.client import Client
    from fencelock.core.runtime import Event


class BaseGroup:
    """What the blocking and the asyncio group share: those add `release`, `lost` and the context manager.

    The loss of one lease is the loss of the group, and it is reported once.
    """

    def __init__(self, client: Client[Any]) -> None:
        self._client = client
        self._members: list[BaseLease] = []
        self._blocks = Blocks()
        self._event: Event | None = None
        self._reported = True
        """Whether the loss was reported, or must not be: the group is not complete yet."""

    def _add(self, lease: BaseLease) -> None:
        """Add a lease, while the group is being acquired."""
        lease._group = self
        self._members.append(lease)

    def _complete(self) -> bool:
        """End the acquisition; return False if a lease was lost meanwhile."""
        with self._client.mutex:  # a loss is noted under it: this either sees the loss or leaves its report to others
            self._reported = self.is_lost()
            return not self._reported

    @property
    def name(self) -> str:
        """The names of the group, for messages."""
        return ", ".join(lease.name for lease in self._members)

    @property
    def reason(self) -> LossReason | None:
        """How the group was lost, or None."""
        return next((lease.reason for lease in self._members if lease.reason is not None), None)

    @property
    def remaining(self) -> float:
        """Seconds that the holder may still trust all leases of the group."""
        return min(lease.remaining for lease in self._members)

    @property
    def deadline(self) -> float:
        """When the holder must stop, by the client's clock."""
        return min(lease.deadline for lease in self._members)

    @property
    def ttl(self) -> float:
        """Seconds after which the engine grants the locks to others if the group is not renewed."""
        return min(lease.ttl for lease in self._members)

    def is_lost(self) -> bool:
        """Return whether a lease of the group ended before it was released. It looks at the clock itself."""
        return any(lease.is_lost() for lease in self._members)

    def check(self) -> None:
        """Raise LeaseLost if any lease of the group is over, released or lost."""
        for lease in self._members:
            lease.check()

    def progress(self) -> None:
        """Say that the work goes on, for all leases of the group; see `Lease.progress`."""
        for lease in self._members:
            lease.progress()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: object) -> bool:
        return any(lease.name == name for lease in self._members)

    def __repr__(self) -> str:
        state = f"lost: {self.reason}" if self.is_lost() else f"{self.remaining:.1f} s"
        return f"<Group {self.name!r} {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a fencelock group cannot be sent to another process; call connect() and acquire there")

    def _leases(self) -> list[BaseLease]:
        return self._members

    def _loss(self) -> LeaseLost:
        return self._lost_member()._loss()

    def _lost_member(self) -> BaseLease:
        return next((lease for lease in self._members if lease.reason is not None), self._members[0])

    def _member_lost(self) -> None:
        """Report the loss of the group, once: a lease of it was lost."""
        with self._client.mutex:
            if self._reported:
                return
            self._reported = True
        if self._event is not None:
            self._event.set()
        self._blocks.interrupt()
        self._lost_member()._notify_lost(self, f"; with it the group of {self.name}" if len(self._members) > 1 else "")

    async def _wait_lost(self, timeout: float | None) -> bool:
        """Wait until the group is lost or released; return whether it is lost."""
        timeout = check_seconds(timeout, "timeout", self.name, zero=True)
        with self._client.mutex:
            if self._event is None:
                self._event = self._client.runtime.event()
        if not self.is_lost() and not all(lease._over for lease in self._members):
            await self._event.wait(timeout)
        return self.is_lost()

    async def _release(self) -> bool:
        """Release every lease, the last one first, even if one fails; return whether all of them were still held."""
        held, failure = True, None
        for lease in reversed(self._members):
            try:
                held = await lease._release() and held
            except FencelockError as error:
                held, failure = False, failure or error
            except BaseException:
                await self._client.renewer.leftovers.abandon_shielded(*self._withdraw())
                raise
        if self._event is not None:
            self._event.set()
        if failure is not None:
            raise failure
        return held

    def _withdraw(self) -> list[Claim]:
        """End the leases that are still held, without a request; return the claims to abandon, the last one first."""
        claims = [lease._withdraw() for lease in reversed(self._members)]
        if self._event is not None:
            self._event.set()
        return [claim for claim in claims if claim is not None]

    def _enter_block(self) -> None:
        """Begin a `with` block of the group itself."""
        self.check()
        self._blocks.enter(self, self._client.runtime.current_task())

    async def _exit_block(self, error: BaseException | None) -> None:
        """End a `with` block."""
        await self._blocks.exit(self, error)
