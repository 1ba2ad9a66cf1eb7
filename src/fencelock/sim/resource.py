"""The resource that a lock protects: clients read, change and write it back over the network, with a fence or without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fencelock.errors import StaleToken
from fencelock.fences import Fenced, TokenPair
from fencelock.fences.memory import MemoryFence
from fencelock.sim.history import Write
from fencelock.sim.network import Network
from fencelock.sim.process import Process


class Resource:
    """One value on a server. Each request is one atomic step there, and may arrive long after it was sent."""

    def __init__(self, network: Network, label: str, fence: MemoryFence | None, log: Callable[[Write], None]) -> None:
        self._network = network
        self._fence = fence
        self._log = log
        self._value = 0
        self._values = 0
        self.label = label

    async def read(self, process: Process, lease: Fenced) -> int:
        """Pass the fence, then return the value."""
        return await self._network.request(process, self.label, partial(self.read_step, _token_pair(lease)))

    async def write(self, process: Process, lease: Fenced, saw: int) -> None:
        """Replace the value that was read by a new one."""
        self._values += 1
        question = partial(self.write_step, process.label, _token_pair(lease), saw, self._values)
        # A server that applied one write twice would lose data even with a perfect lock.
        await self._network.request(process, self.label, question, once=True)

    def read_step(self, lease: Fenced) -> int:
        """Enter the fence and read, on the server."""
        if self._fence is not None:
            self._fence.enter(lease, self.label)
        return self._value

    def write_step(self, owner: str, lease: Fenced, saw: int, value: int) -> None:
        """Check the fence and write, on the server."""
        at = self._network.scheduler.time
        try:
            if self._fence is not None:
                self._fence.check(lease, self.label)
        except StaleToken:
            self._log(Write(self.label, owner, lease.token, at, saw, value, accepted=False))
            raise
        self._value = value
        self._log(Write(self.label, owner, lease.token, at, saw, value, accepted=True))


def _token_pair(lease: Fenced) -> TokenPair:
    """Return what a request carries: the server sees the token, and not the clock of the process that sent it."""
    return TokenPair(lease.token, lease.id)
