"""Watches: one stream for all of a link's. Each watches a key or a range for deletions, and rings when there is news.

Who waits in turns with the same others waits for the same key again and again, as keys are used again (`keys.py`). So the
last watch that has served is kept for a while: the next wait for that key needs neither a new watch nor a look at what
happened before it began, and is not told late (see `Watches.begin`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fencelock.engines.etcd.http2 import Stream
from fencelock.engines.etcd.messages import WATCH, read_news, unwatch, watch
from fencelock.errors import OutcomeUnknown

if TYPE_CHECKING:
    from fencelock.engines.etcd.link import Link

UNSAID = 8
"""Watches that may be over without etcd having been told."""
FRESH = 1.0
"""Seconds within which a link must have spoken for a watch that was kept to be trusted: a new one would be answered."""


class Watcher:
    """One watch. It is over when something was deleted, or when it was `broken` off: then whoever watches has to look."""

    __slots__ = ("after", "broken", "compacted", "gone", "id", "key", "reason", "ring", "since")

    def __init__(self, id: int, key: bytes, revision: int, ring: Callable[[], object]) -> None:
        self.id = id
        self.key = key
        self.ring = ring
        self.since = revision - 1
        """The last revision that it does not see; -1 while that is not known."""
        self.gone = self.after = 0
        """The revision of the last deletion, and the one up to which that is of no interest."""
        self.broken = False
        """Whether it sees no more: its revision was compacted, or its member lost the others, or the link broke."""
        self.compacted = False
        """Whether what it has missed can be told no more."""
        self.reason = ""
        """What etcd said to that."""

    @property
    def deleted(self) -> bool:
        """Whether something was deleted."""
        return self.gone > self.after


class Watches:
    """All watches of one link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stream: Stream | None = None
        self._watchers: dict[int, Watcher] = {}
        self._unsaid: list[bytes] = []
        self._kept: Watcher | None = None
        self._last = 0

    def begin(self, key: bytes, end: bytes, revision: int, ring: Callable[[], object]) -> Watcher:
        """Watch a key, or a range up to `end`, from a revision on, or from now on if that is 0.

        What has happened since a revision is told late: etcd looks for it ten times a second, for all who ask. Who watches
        from now on is told at once, of when that is too, and has to look for itself what it has missed.
        """
        self._last += 1
        watcher = self._watchers[self._last] = Watcher(self._last, key, revision, ring)
        body = watch(self._last, key, end, revision)
        if self._stream is None or self._stream.closed:
            self._unsaid.clear()
            stream = self._stream = Stream(self._news)
            self._link.open(stream, WATCH, body)
            if stream.closed:
                self._news()
        else:
            self._link.say(self._stream, *self._unsaid, body)
            self._unsaid.clear()
        return watcher

    def resume(self, key: bytes, seen: int, ring: Callable[[], object]) -> Watcher | None:
        """Go on with the watch that was kept, if it is for this key, which was there at the revision `seen`."""
        kept = self._kept
        if kept is None or kept.key != key or not self._link.heard_within(FRESH):
            return None
        self._kept = None
        kept.after, kept.ring = seen, ring
        return kept

    def keep(self, watcher: Watcher) -> None:
        """Watch no longer, for now: the one that was kept before ends instead."""
        if self._watchers.get(watcher.id) is watcher and watcher.deleted:
            watcher.ring = _nobody
            before, self._kept = self._kept, watcher
            if before is not None:
                self.end(before)
        else:
            self.end(watcher)

    def rest(self) -> None:
        """End the watch that was kept."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self.end(kept, at_once=True)

    def end(self, watcher: Watcher, *, at_once: bool = False) -> None:
        """Watch no longer. That is said along with whatever is said next if it has served: there is little left to see."""
        if self._watchers.get(watcher.id) is not watcher:  # on every link the numbers begin anew
            return
        del self._watchers[watcher.id]
        if self._stream is not None:
            self._unsaid.append(unwatch(watcher.id))
            if at_once or not watcher.deleted or len(self._unsaid) >= UNSAID:
                self._link.say(self._stream, *self._unsaid)
                self._unsaid.clear()

    def unsaid(self) -> tuple[Stream | None, list[bytes]]:
        """Return what is to be said, and on which stream, along with whatever is said next."""
        unsaid, self._unsaid = self._unsaid, []
        return self._stream, unsaid

    def close(self) -> None:
        """End them all: whoever watches looks, and watches anew elsewhere."""
        watchers, self._watchers, self._kept = self._watchers, {}, None
        stream, self._stream = self._stream, None
        if stream is not None:
            self._link.cancel(stream)
        for watcher in watchers.values():
            watcher.broken = True
            watcher.ring()

    def _news(self) -> None:
        stream = self._stream
        if stream is None:
            return
        while stream.messages:
            try:
                news = read_news(stream.messages.popleft())
            except OutcomeUnknown as error:
                raise ValueError(str(error)) from error  # on which the wire is closed
            watcher = self._watchers.get(news.id)
            if watcher is None:
                if news.canceled and news.id == -1:  # refused, without saying which: those who may have meant it look
                    self.close()
                continue
            watcher.gone = max(watcher.gone, news.deleted)
            if news.canceled:
                watcher.broken, watcher.compacted, watcher.reason = True, bool(news.compacted), news.reason
                del self._watchers[news.id]
                if self._kept is watcher:
                    self._kept = None
            begun = news.created and watcher.since < 0
            if begun:
                watcher.since = news.revision
            if begun or news.canceled or watcher.deleted:
                watcher.ring()
        if stream.closed:
            self.close()


def _nobody() -> None:
    """Ring for nobody."""
