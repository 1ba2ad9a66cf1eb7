"""What is held is watched: a keep-alive says that a session lives, not that each of its claims is still there.

Most locks are given back within a moment, so a claim is watched only when it has been held for one. The watch begins with
the revision after the claim's own: what happened in that moment is told all the same.

A watch that says nothing is like one whose link is dead, so a majority is asked something over that link now and then, once
for all claims: without an answer, they are watched anew over another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from math import inf
from threading import RLock
from typing import TYPE_CHECKING

from fencelock.engines.etcd.link import Link, Refused
from fencelock.engines.etcd.messages import RANGE, count, find, read_range
from fencelock.engines.etcd.sessions import patience
from fencelock.errors import FencelockError, OutcomeUnknown

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime, WakeupEvent
    from fencelock.engines.etcd.links import Links
    from fencelock.engines.etcd.watch import Watcher

MOMENT = 0.1
"""Seconds after which a held claim is watched."""
LINGER = 2.0
"""Seconds without any after which the watch ends, as starting it anew costs a thread in the blocking world; and without a
new one, after which watches end that waiters have kept."""
PAUSE = 0.5
"""Seconds between two tries when etcd cannot be reached: the deadline of each lease counts down meanwhile."""
ASK_SECONDS = 2.0
LONGEST = 3600.0
MANY = 1000
"""Claims that begin to be watched at once."""


class Entry:
    """A claim that is held."""

    __slots__ = ("id", "key", "revision", "since", "ttl", "watcher")

    def __init__(self, key: str, id: str, revision: int, since: float, ttl: float) -> None:
        self.key = key.encode()
        self.id = id
        self.revision = revision
        """The last at which it was known to be there."""
        self.since = since
        self.ttl = ttl
        self.watcher: Watcher | None = None


class Held:
    """All that a client holds. One task or thread watches it, and ends when there is nothing left."""

    def __init__(self, runtime: Runtime, links: Links, witness: bytes, tell: Callable[[str], None]) -> None:
        self._runtime = runtime
        self._links = links
        self._witness = witness
        self._tell = tell
        self._begin()

    def _begin(self) -> None:
        self._mutex = RLock()
        self._young: dict[str, Entry] = {}
        self._watched: dict[str, Entry] = {}
        self._again: list[Entry] = []
        self._news: deque[Entry] = deque()
        self._left: list[Watcher] = []
        self._shortest = LONGEST
        """No ttl of what is held is below this."""
        self._added = -inf
        """When something was added, if the links have not been quiet since."""
        self._bell: WakeupEvent | None = None
        self._asleep = False
        self._closed = False

    def add(self, key: str, id: str, revision: int, ttl: float) -> None:
        """Look after a claim from now on."""
        with self._mutex:
            watched = self._watched.get(id)
            if self._closed or (watched is not None and revision <= watched.revision):
                return
            self.drop(id)  # it was watched under a key that is gone
            self._added = self._runtime.now()
            self._young[id] = Entry(key, id, revision, self._added, ttl)
            self._shortest = min(self._shortest, ttl)
            if self._bell is not None:
                if self._asleep:
                    self._asleep = False
                    self._bell.set()
                return
            bell = self._bell = self._runtime.wakeup_event()
            try:
                self._runtime.spawn(self._run(bell), "fencelock-watch")
            except RuntimeError:  # no more threads: the next claim tries again
                self._bell = None
                bell.close()

    def drop(self, id: str) -> None:
        """Forget a claim that is being given back."""
        with self._mutex:
            self._young.pop(id, None)
            entry = self._watched.pop(id, None)
            if entry is not None and entry.watcher is not None:
                self._left.append(entry.watcher)

    def close(self) -> None:
        """End."""
        with self._mutex:
            self._closed = True
            self._young.clear()
            self._watched.clear()
            if self._bell is not None:
                self._bell.set()

    def forget(self) -> None:
        """Begin anew in a forked child."""
        bell = self._bell
        self._begin()
        if bell is not None:
            bell.close()

    # ------------------------------------------------------------------ the one that watches

    async def _run(self, bell: WakeupEvent) -> None:
        link: Link | None = None
        empty_since: float | None = None
        probed = self._runtime.now()
        self._watch_anew()
        try:
            while True:
                bell.clear()
                if link is not None and not link.usable:
                    self._links.give(link)
                    link = None
                    with self._mutex:
                        self._left.clear()  # they have ended with it
                pause: float | None = None
                try:
                    if link is not None and self._runtime.now() >= probed + self._shortest / 3:
                        probed = await self._probe(link)
                        if not link.usable:
                            continue
                    pause = await self._take_news(link)
                    due = self._due()
                    if due and link is None:
                        link = await self._links.take()
                    for entry in due:
                        assert link is not None
                        self._watch(link, entry)
                except Exception as error:
                    if not isinstance(error, FencelockError):
                        import logging

                        log = "what is held cannot be watched, which never should be; it is tried again"
                        logging.getLogger("fencelock").exception(log)
                    self._watch_anew()
                    pause = PAUSE
                if 0 <= self._added <= self._runtime.now() - LINGER:
                    self._added = -inf
                    self._links.quiet()
                with self._mutex:
                    now = self._runtime.now()
                    empty = not self._young and not self._watched
                    empty_since = None if not empty else now if empty_since is None else empty_since
                    if self._closed or (empty_since is not None and now - empty_since >= LINGER):
                        self._bell = None
                        break
                    timeout = LINGER if empty else self._timeout(now, pause)
                    if link is not None:
                        timeout = min(timeout, max(0.0, probed + self._shortest / 3 - now))
                    if self._added >= 0:
                        timeout = min(timeout, max(0.0, self._added + LINGER - now))
                    self._asleep = pause is None and not self._young
                if link is not None:
                    self._end_left(link)
                await self._runtime.wait_for_push([] if link is None else [link.connection], bell, timeout)
                self._asleep = False
        finally:
            with self._mutex:
                if self._bell is bell:
                    self._bell = None  # its event loop was closed: the next claim starts it anew
            if link is not None:
                self._end_left(link)
                self._links.give(link)
            bell.close()

    def _watch_anew(self) -> None:
        """Begin all watches anew: nobody knows which of them there are."""
        with self._mutex:
            self._left.clear()
            self._news.clear()
            self._again = list(self._watched.values())
            for entry in self._again:
                entry.watcher = None

    async def _probe(self, link: Link) -> float:
        """Ask whether a link is any good; return when, or that the next has to be asked at once."""
        with self._mutex:
            held = chain(self._young.values(), self._watched.values())
            self._shortest = min((entry.ttl for entry in held), default=LONGEST)
        began = self._runtime.now()
        try:
            await link.call(RANGE, count(self._witness), patience(self._shortest))
        except OutcomeUnknown:
            self._links.forsake(link, began)
            if not link.usable:
                return -inf
        except Refused as refusal:
            if refusal.elsewhere:
                self._links.avoid(link)
        return began

    def _timeout(self, now: float, pause: float | None) -> float:
        """Return when to look again at the latest. The mutex is held."""
        if pause is not None:
            return pause
        first = next(iter(self._young.values()), None)
        return LONGEST if first is None else max(0.0, first.since + MOMENT - now)

    def _due(self) -> list[Entry]:
        """Return what has been held for a moment, or whose watch broke off: it is watched from now on."""
        with self._mutex:
            again, self._again = self._again, []
            due = [entry for entry in again if self._watched.get(entry.id) is entry]
            until = self._runtime.now() - MOMENT
            for id, entry in list(islice(self._young.items(), MANY)):
                if entry.since > until:
                    break
                del self._young[id]
                self._watched[id] = entry
                due.append(entry)
        return due

    def _watch(self, link: Link, entry: Entry) -> None:
        watcher = link.watches.begin(entry.key, b"", entry.revision + 1, partial(self._rung, entry))
        with self._mutex:
            if self._watched.get(entry.id) is entry:
                entry.watcher = watcher
            else:
                self._left.append(watcher)  # it was given back meanwhile

    def _end_left(self, link: Link) -> None:
        with self._mutex:
            left, self._left = self._left, []
        for watcher in left:
            link.watches.end(watcher, at_once=True)

    def _rung(self, entry: Entry) -> None:
        self._news.append(entry)
        bell = self._bell
        if bell is not None:
            bell.set()

    async def _take_news(self, link: Link | None) -> float | None:
        """Tell of what was deleted, and see to watches that broke off; return how long to wait if that failed."""
        pause = None
        while self._news:
            entry = self._news.popleft()
            watcher = entry.watcher
            if watcher is None or self._watched.get(entry.id) is not entry:
                continue
            if watcher.deleted:
                self._gone(entry)
            elif watcher.broken:
                if watcher.compacted:
                    try:
                        header, found = read_range(await self._links.request(RANGE, find(entry.key), ASK_SECONDS))
                    except (FencelockError, Refused):
                        self._news.append(entry)
                        return PAUSE
                    if not found.pairs or found.pairs[0].created > entry.revision:  # or it was made anew meanwhile
                        self._gone(entry)
                        continue
                    entry.revision = header.revision
                elif link is not None and link.usable:
                    pause = PAUSE  # it would do the same to the next one
                    self._links.avoid(link)
                entry.watcher = None
                self._again.append(entry)
        return pause

    def _gone(self, entry: Entry) -> None:
        with self._mutex:
            ours = self._watched.get(entry.id) is entry
            if ours:
                del self._watched[entry.id]
                if entry.watcher is not None:
                    self._left.append(entry.watcher)
        if ours:
            self._tell(entry.id)
