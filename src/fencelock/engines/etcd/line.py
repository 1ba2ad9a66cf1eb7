"""Standing in line: a watch on whoever `admit` says is worth watching, and a look at what the watch cannot tell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fencelock.engines.etcd.layout import data
from fencelock.engines.etcd.messages import after
from fencelock.engines.etcd.sessions import Lease
from fencelock.model import Blocked, Grant, Waiting

if TYPE_CHECKING:
    from fencelock.core.runtime import Event, Runtime
    from fencelock.engines.etcd.keys import Keys
    from fencelock.engines.etcd.layout import Layout
    from fencelock.engines.etcd.link import Link
    from fencelock.engines.etcd.links import Links
    from fencelock.engines.etcd.sessions import Sessions
    from fencelock.engines.etcd.watch import Watcher

WATCHED_ONE_BY_ONE = 16
"""Holders that the first in line for a permit watches one by one; of more, it watches the whole queue."""
REFUSED_PAUSE = 0.2
"""Seconds before the next look when etcd breaks off a watch: it would do the same to the next one."""


class Seat(NamedTuple):
    """A place in line: the claim's key and revision, whom it waits for, and the revision at which that was seen."""

    session: Lease
    key: str
    revision: int
    blocked: Blocked
    seen: int


class Line:
    """Where the waiters of a client stand."""

    def __init__(self, runtime: Runtime, links: Links, sessions: Sessions, layout: Layout, keys: Keys) -> None:
        self._runtime = runtime
        self._links = links
        self._sessions = sessions
        self._layout = layout
        self._keys = keys

    async def watch(
        self, seat: Seat, timeout: float, look: Callable[[int], Awaitable[Grant | Waiting | None]]
    ) -> Grant | Waiting | None:
        """Wait until somebody ahead may have left, for so long at most; return what there is to see then.

        `look` is told the revision that it has to see, or 0 if it has to see all that there is.
        """
        by = seat.blocked.by
        until = self._runtime.now() + timeout
        end = self._sessions.end_of([id for key in by if (id := self._keys.id_of(key)) is not None])
        if end is not None:  # a claim of this client's own, which nobody else ends for as long as the session lives
            until = min(until, end)
        if len(by) > WATCHED_ONE_BY_ONE:
            prefix = data(self._layout.queue_of(by[0]))
            ranges = [(prefix, after(prefix))]
        else:
            ranges = [(data(key), b"") for key in by]
        link = await self._links.take()
        watchers: list[Watcher] = []
        try:
            bell = self._runtime.push_event()
            watchers += (
                (None if behind else link.watches.resume(key, seat.seen, bell.set))
                or link.watches.begin(key, behind, 0, bell.set)
                for key, behind in ranges
            )
            await self._hear(link, bell, watchers, until)
            if not any(watcher.deleted or watcher.broken for watcher in watchers):
                if (since := max(watcher.since for watcher in watchers)) > seat.seen:
                    outcome = await look(since)  # for what happened between our last look and the watch
                    if not isinstance(outcome, Waiting) or outcome.engine_state.blocked != seat.blocked:
                        return outcome
                await self._hear(link, bell, watchers, until)
        finally:
            for watcher in watchers:
                if len(by) == 1:
                    link.watches.keep(watcher)
                else:
                    link.watches.end(watcher)
            self._links.give(link)
        if link.usable and any(watcher.broken and not watcher.compacted for watcher in watchers):
            await self._runtime.sleep(min(timeout, REFUSED_PAUSE))
        return await look(max(watcher.gone if watcher.deleted else 0 for watcher in watchers))

    async def _hear(self, link: Link, bell: Event, watchers: Sequence[Watcher], until: float) -> None:
        """Listen until something happens, the beginning of all watches included if they have not begun."""
        begun = all(watcher.since >= 0 for watcher in watchers)
        try:
            while not any(watcher.deleted or watcher.broken for watcher in watchers):
                left = until - self._runtime.now()
                if (
                    left <= 0
                    or not link.connection.open
                    or (not begun and all(watcher.since >= 0 for watcher in watchers))
                ):
                    break
                await self._runtime.wait_for_push([link.connection], bell, left)
                bell.clear()
        except BaseException:
            if not self._runtime.shares_connections:
                link.connection.close()  # interrupted, perhaps between two bytes
            raise
