"""Watches: one stream per connection carries all of them. Each watches a key, or a range of keys, for changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fencelock.engines.etcd.messages import WATCH, cancel_watch, create_watch, read_watch
from fencelock.errors import OutcomeUnknown

if TYPE_CHECKING:
    from fencelock.engines.etcd.grpc import Call, EtcdConnection


class Watch:
    """One watch. It is over when it is `broken`; then the caller has to read, and to watch again."""

    __slots__ = ("broken", "changed", "compacted", "id", "keys", "notify", "start_revision")

    def __init__(self, id: int, notify: Callable[[], object], keys: frozenset[bytes] | None) -> None:
        self.id = id
        self.notify = notify
        self.keys = keys
        """The keys that count, of a range; None: all."""
        self.start_revision: int | None = None
        """The revision at which it started: later changes are reported."""
        self.changed = 0
        """The revision of the last deletion or overwrite, or 0."""
        self.broken = False
        """Whether it reports nothing any more: its revision was compacted, its member lost the others, or it is closed."""
        self.compacted = False
        """Whether etcd no longer has what the watch has missed."""


class WatchStream:
    """All watches of one connection."""

    def __init__(self, connection: EtcdConnection) -> None:
        self._connection = connection
        self._call: Call | None = None
        self._watches: dict[int, Watch] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._watches)

    def start(
        self,
        key: bytes,
        notify: Callable[[], object],
        *,
        end: bytes = b"",
        keys: frozenset[bytes] | None = None,
        revision: int = 0,
        puts: bool = False,
    ) -> Watch:
        """Watch a key, or the range up to `end`, for deletions and, with `puts`, for overwrites.

        From a past `revision` on, etcd reports up to 0.1 s late: it looks for such watches ten times a second. From now
        on (0), it reports immediately, and the caller has to read what happened before `start_revision`.
        """
        self._last_id += 1
        watch = self._watches[self._last_id] = Watch(self._last_id, notify, keys)
        request = create_watch(watch.id, key, end, revision, puts=puts)
        if self._call is not None and not self._call.closed:
            self._connection.send(self._call, request)
        else:
            self._call = self._connection.open(WATCH, request, self._receive, ends=False)
            self._receive()  # it may be closed already
        return watch

    def cancel(self, watch: Watch) -> None:
        """End a watch. A watch of another connection is ignored, although it may have the same number."""
        if self._watches.get(watch.id) is watch:
            del self._watches[watch.id]
            if self._call is not None:
                self._connection.send(self._call, cancel_watch(watch.id))

    def close(self) -> None:
        """Break all watches: their callers read, and watch again elsewhere."""
        watches, self._watches = self._watches, {}
        call, self._call = self._call, None
        if call is not None:
            self._connection.cancel(call)
        for watch in watches.values():
            watch.broken = True
            watch.notify()

    def _receive(self) -> None:
        call = self._call
        if call is None:
            return
        while call.messages:
            try:
                report = read_watch(call.messages.popleft())
            except OutcomeUnknown as error:
                raise ValueError(str(error)) from error  # this closes the connection
            watch = self._watches.get(report.id)
            if watch is None:
                if report.canceled and report.id == -1:  # refused, without a number: all callers have to look
                    self.close()
                continue
            if report.created and watch.start_revision is None:
                watch.start_revision = report.revision
            for key, revision in report.changes:
                if watch.keys is None or key in watch.keys:
                    watch.changed = max(watch.changed, revision)
            if report.canceled:
                watch.broken, watch.compacted = True, bool(report.compacted)
                del self._watches[report.id]
            watch.notify()
        if call.closed and call is self._call:
            self.close()
