"""Watches the keys of held locks: a keep-alive shows that a session lives, not that each of its claims still exists.

Most locks are held only briefly, so a claim is watched once it has been held for 0.1 s. The watch starts at the revision
after the claim's own, so nothing that happened before is missed. A connection that reports nothing looks like a dead one, so
the watcher reads a key over it every third of the shortest ttl; without a reply, it watches all claims over another one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from threading import RLock
from typing import TYPE_CHECKING

from fencelock.core.log import ERROR, log
from fencelock.engines.etcd.client import timeout_for
from fencelock.engines.etcd.messages import RANGE, count_key, get_key, read_range
from fencelock.errors import FencelockError

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime, WakeupEvent
    from fencelock.engines.etcd.client import EtcdClient
    from fencelock.engines.etcd.grpc import Call, EtcdConnection
    from fencelock.engines.etcd.watch import Watch

WATCH_AFTER = 0.1
"""Seconds after which a held claim is watched."""
LINGER = 2.0
"""Seconds for which the watcher stays when nothing is held: in the blocking runtime, starting it costs a thread."""
RETRY_PAUSE = 0.5
"""Seconds between two tries while etcd cannot be reached; the leases count down meanwhile."""


class Held:
    """A held claim."""

    __slots__ = ("id", "key", "seen_revision", "since", "ttl", "watch")

    def __init__(self, id: str, key: bytes, create_revision: int, ttl: float, since: float) -> None:
        self.id = id
        self.key = key
        self.seen_revision = create_revision
        """The last revision at which it is known to exist."""
        self.ttl = ttl
        self.since = since
        self.watch: Watch | None = None


class LossWatcher:
    """Watches all claims that a client holds, in one task or thread, which ends when nothing is held."""

    def __init__(
        self, runtime: Runtime, client: EtcdClient, probe_key: bytes, on_deleted: Callable[[str], None]
    ) -> None:
        self._runtime = runtime
        self._client = client
        self._probe_key = probe_key
        self._on_deleted = on_deleted
        self._event: WakeupEvent | None = None
        self.detach_after_fork()

    def detach_after_fork(self) -> None:
        """Start without claims: in a forked child, the claims are the parent's."""
        event, self._event = self._event, None
        if event is not None:
            event.close()
        self._mutex = RLock()
        self._held: dict[str, Held] = {}
        self._unneeded: list[Watch] = []
        self._sleeping = False
        """Whether the next claim must wake the watcher; otherwise it wakes up soon enough by itself."""
        self._closed = False

    def add(self, id: str, key: bytes, create_revision: int, ttl: float) -> None:
        """Watch a claim from now on."""
        with self._mutex:
            if self._closed or id in self._held:
                return
            self._held[id] = Held(id, key, create_revision, ttl, self._runtime.now())
            if self._event is not None:
                if self._sleeping:
                    self._sleeping = False
                    self._event.set()
                return
            event = self._event = self._runtime.wakeup_event()
            try:
                self._runtime.spawn(self._run(event), "fencelock-watch")
            except RuntimeError:  # no more threads: the next claim tries again
                self._event = None
                event.close()

    def drop(self, id: str) -> None:
        """Stop watching a claim that this client removes."""
        with self._mutex:
            held = self._held.pop(id, None)
            if held is not None and held.watch is not None:
                self._unneeded.append(held.watch)

    def close(self) -> None:
        """End the watcher."""
        with self._mutex:
            self._closed = True
            self._held.clear()
            if self._event is not None:
                self._event.set()

    # ------------------------------------------------------------------ the watcher

    async def _run(self, event: WakeupEvent) -> None:
        connection: EtcdConnection | None = None
        probe: Call | None = None
        probed = -inf
        last_held = self._runtime.now()
        self._forget_watches()
        try:
            while True:
                event.clear()
                pause = WATCH_AFTER
                shortest = min((held.ttl for held in self._all()), default=inf)
                if connection is not None:
                    if probe is not None and self._runtime.now() >= probed + timeout_for(shortest):
                        self._client.report_silence(connection, probed)
                    if not connection.usable:
                        self._client.give_back(connection)
                        connection = probe = None
                        self._forget_watches()
                try:
                    if self._held:
                        if connection is None:
                            connection, probed = await self._client.take(), -inf
                        await self._check_watches(connection)
                        if probe is None and self._runtime.now() >= probed + shortest / 3:
                            probed = self._runtime.now()
                            probe = connection.open(RANGE, count_key(self._probe_key), event.set)
                    if connection is not None:
                        self._cancel_unneeded(connection)
                except Exception as error:
                    if not isinstance(error, FencelockError):
                        log("etcd", ERROR, "the watch of held locks failed; it is repeated", error=error)
                    self._forget_watches()
                    pause = RETRY_PAUSE
                if probe is not None and probe.closed:
                    probe = None
                with self._mutex:
                    now = self._runtime.now()
                    if self._held:
                        last_held = now
                    if self._closed or now >= last_held + LINGER:
                        self._event = None
                        break
                    self._sleeping = all(held.watch is not None for held in self._held.values())
                    if self._sleeping:
                        due = probed + (shortest / 3 if probe is None else timeout_for(shortest))
                        pause = min(LINGER, max(0.0, due - now)) if self._held else LINGER
                await self._runtime.wait_for_push([] if connection is None else [connection.raw], event, pause)
                self._sleeping = False
        finally:
            with self._mutex:
                if self._event is event:
                    self._event = None  # its event loop was closed: the next claim starts another watcher
            if connection is not None:
                self._cancel_unneeded(connection)
                self._client.give_back(connection)
            event.close()

    def _all(self) -> list[Held]:
        with self._mutex:
            return list(self._held.values())

    def _forget_watches(self) -> None:
        """Watch all claims again: the connection of their watches is gone, or nobody knows which watches exist."""
        with self._mutex:
            self._unneeded.clear()
            for held in self._held.values():
                held.watch = None

    async def _check_watches(self, connection: EtcdConnection) -> None:
        """Watch the claims that have been held for a moment, report those that were deleted, and replace broken watches."""
        for held in self._all():
            watch = held.watch
            if watch is None:
                if held.since <= self._runtime.now() - WATCH_AFTER:
                    self._start_watch(connection, held)
                continue
            deleted = bool(watch.changed) or (watch.broken and await self._is_deleted(held, watch, connection))
            if deleted and self._held.get(held.id) is held:  # else this client has released it meanwhile
                self._on_deleted(held.id)
                self.drop(held.id)

    def _start_watch(self, connection: EtcdConnection, held: Held) -> None:
        watch = connection.watches.start(held.key, self._wake, revision=held.seen_revision + 1)
        with self._mutex:
            held.watch = watch
            if self._held.get(held.id) is not held:  # it was released meanwhile
                self._unneeded.append(watch)

    async def _is_deleted(self, held: Held, watch: Watch, connection: EtcdConnection) -> bool:
        """Return whether a claim whose watch broke is known to be deleted; otherwise it is watched again."""
        held.watch = None
        if watch.compacted:  # etcd no longer has the events: read the key instead
            header, found = read_range(await self._client.request(RANGE, get_key(held.key)))
            deleted = not found.pairs or found.pairs[0].create_revision > held.seen_revision
            held.seen_revision = max(held.seen_revision, header.revision)
            return deleted
        held.since = self._runtime.now() + RETRY_PAUSE
        if connection.usable:
            self._client.avoid(connection)  # it would break the next watch too
        return False

    def _cancel_unneeded(self, connection: EtcdConnection) -> None:
        with self._mutex:
            unneeded, self._unneeded = self._unneeded, []
        for watch in unneeded:
            connection.watches.cancel(watch)

    def _wake(self) -> None:
        event = self._event
        if event is not None:
            event.set()
