"""The world port: everything the core needs from the outside that depends on how it is being run.

Three worlds implement it: `worlds/blocking.py`, `worlds/aio.py` and `sim/world.py`. The core and the engines are written
once, as coroutines, against these protocols. In the blocking world no await ever suspends: a coroutine runs to its end
in the caller's own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Protocol, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Event(Protocol):
    """A flag that can be waited for. `set` may be called from any thread."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    async def wait(self, timeout: float | None) -> bool: ...


class Doorbell(Protocol):
    """A flag that another process can set, by its address. Rings may get lost: whoever waits looks again in the end."""

    address: str

    async def wait(self, timeout: float) -> bool: ...
    def close(self) -> None: ...


class Guard(Protocol):
    """What stops the body of a `with` block whose lease is lost, where the colour can do that."""

    def interrupt(self) -> None: ...

    def leave(self) -> bool:
        """Withdraw from the body; return whether an exception that comes out of it is only our own interruption."""
        ...


class World(Protocol):
    """One way to run the core."""

    def now(self) -> float:
        """Return seconds on a clock that never goes back and counts while the machine sleeps."""
        ...

    def ready(self) -> None:
        """Raise if the caller cannot use this world (another event loop, say). Called before anything is sent."""
        ...

    def random(self) -> float:
        """Return a number from 0 up to 1, for jitter."""
        ...

    def here(self) -> Hashable:
        """Return what identifies the running thread or task, for opt-in reentrancy."""
        ...

    def event(self) -> Event: ...

    def doorbell(self) -> Doorbell | None:
        """Return a doorbell of one's own, or None where processes cannot ring each other."""
        ...

    def guard(self) -> Guard | None: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run in the background; it never keeps the process alive."""
        ...

    def at_home(self, tell: Callable[[], None]) -> None:
        """Call a function of the user's where users expect it: on the event loop, if that is what the world runs on."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def block(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a function that blocks, where that does no harm.

        It is awaited to its end even when the caller is cancelled, so that what follows comes after it.
        """
        ...

    async def shield(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run to the end, or for so long, whatever happens to the caller: a cancellation comes out afterwards."""
        ...

    async def close(self) -> None:
        """Give back what the world itself holds: threads, sockets."""
        ...

    def after_fork(self) -> None:
        """Forget everything that belongs to the parent process."""
        ...
