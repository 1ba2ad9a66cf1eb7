"""Watching a name: its current state, and then the newest state after each change. All watches of a name share one poll."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from fencelock.core.acquire import attach_name
from fencelock.core.log import INFO, WARNING, log
from fencelock.errors import EngineUnavailable, InvalidType
from fencelock.model import Snapshot

if TYPE_CHECKING:
    from collections.abc import Hashable

    from fencelock.core.client import Client

POLL_SECONDS = 0.4
"""How often a watched name is read: a change is seen within a second, also if another watch has just read it."""


class StopSignal(Protocol):
    """A `threading.Event` or an `asyncio.Event`."""

    def is_set(self) -> bool: ...


def check_stop(stop: object) -> StopSignal | None:
    """Return the event that ends a loop, or raise InvalidType."""
    if stop is not None and not callable(getattr(stop, "is_set", None)):
        raise InvalidType(f"stop must be a threading.Event or an asyncio.Event, not {type(stop).__name__}")
    return stop  # type: ignore[return-value]


class _Poll:
    """The last state of one name, shared by all that watch it."""

    __slots__ = ("failed", "reading", "snapshot", "taken", "watchers")

    def __init__(self) -> None:
        self.watchers = 0
        self.snapshot: Snapshot | None = None
        self.taken = 0.0
        self.reading = False
        self.failed = False


class Watches:
    """The watched names of one client."""

    def __init__(self, client: Client[Any]) -> None:
        self._client = client
        self._polls: dict[str, _Poll] = {}

    async def watch(self, name: str, stop: StopSignal | None = None) -> AsyncIterator[Snapshot]:
        """Yield the state of a name, then its newest state after each change, until the client is closed or `stop` is set.

        A state that lasted less than the poll interval may be skipped. An outage is logged, and the watch goes on after it.
        """
        client = self._client
        with client.mutex:
            poll = self._polls.setdefault(name, _Poll())
            poll.watchers += 1
        seen: Hashable = None
        try:
            while not client.closed and not (stop is not None and stop.is_set()):
                await self._read(name, poll)
                if poll.snapshot is not None and (state := _state(poll.snapshot)) != seen:
                    seen = state
                    yield poll.snapshot
                else:
                    await client.runtime.sleep(POLL_SECONDS)
        finally:
            with client.mutex:
                poll.watchers -= 1
                if not poll.watchers and self._polls.get(name) is poll:
                    del self._polls[name]

    def after_fork(self) -> None:
        """Forget the reads of the parent's threads, which do not exist in this child."""
        for poll in self._polls.values():
            poll.reading = False

    async def _read(self, name: str, poll: _Poll) -> None:
        """Read the name, unless another watch has done so just now or does it at this moment."""
        client = self._client
        with client.mutex:
            if poll.reading or client.runtime.now() - poll.taken < POLL_SECONDS:
                return
            poll.reading = True
        try:
            with attach_name(name):
                poll.snapshot = await client.engine.inspect(name)
            poll.taken = client.runtime.now()
            if poll.failed:
                poll.failed = False
                log("client", INFO, f"{name!r} can be watched again", lock=name)
        except EngineUnavailable as error:
            if not poll.failed:
                poll.failed = True
                log("client", WARNING, f"{name!r} cannot be watched; it is tried again: {error}", lock=name)
        finally:
            poll.reading = False


def _state(snapshot: Snapshot) -> Hashable:
    """Return what counts as a change: everything but times."""
    return (
        tuple(holder._replace(expires_in=0.0, held_for=None) for holder in snapshot.holders),
        tuple(waiter._replace(expires_in=0.0) for waiter in snapshot.waiters),
    )
