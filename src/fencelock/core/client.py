"""A client: one engine, one runtime, one renewer, and the leases that it holds."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from threading import RLock
from typing import Any, Generic, TypeVar, cast

from fencelock.core.acquire import ShouldStop, acquire, attach_name
from fencelock.core.clock import Deadline
from fencelock.core.engine import (
    FIRST_CONNECT_TIMEOUT,
    MIN_REPLY_TIMEOUT,
    Configured,
    Engine,
    ForkPrepared,
    LossNotifier,
    never_repeated,
)
from fencelock.core.fork import FORKED, Forked, register, registered
from fencelock.core.group import BaseGroup
from fencelock.core.lease import BaseLease
from fencelock.core.lease_state import HoldOptions, LeaseState
from fencelock.core.limits import LimitComparison
from fencelock.core.log import ERROR, WARNING, log
from fencelock.core.renewer import LeaseRenewer
from fencelock.core.runtime import Runtime
from fencelock.core.validation import check_name, check_purpose, check_reason, check_ttl
from fencelock.core.watch import StopSignal, Watches
from fencelock.errors import ClientClosed, FencelockError, LockTimeout, NotHeld, WouldDeadlock
from fencelock.model import Claim, Grant, Holder, LossReason, Mode, Snapshot

CLOSE_SECONDS = 5.0
"""Seconds for which close() tries to release the leases if the engine does not answer."""

OnLost = Callable[[Any, LossReason], object]
L = TypeVar("L", bound=BaseLease)


class Client(Generic[L]):
    """What the blocking and the asyncio `Locks` delegate to. Safe to share between threads and tasks."""

    def __init__(
        self,
        runtime: Runtime,
        engine: Engine,
        make_lease: Callable[..., L],
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        self.runtime = runtime
        self.engine = engine
        self.ttl = check_ttl(ttl, engine.traits)
        self._given_owner = None if owner is None else check_name(owner, "an owner's label")
        self.owner = self._given_owner or _default_owner()
        """The label for people: what the user gave, else host and process id."""
        self._on_lost = on_lost
        self._make_lease = make_lease
        self.mutex = RLock()  # a signal handler that looks at a lease may interrupt a thread that has it
        self.renewer = LeaseRenewer(self)
        if engine.traits.loss_pushed:
            cast(LossNotifier, engine).on_gone = partial(_gone, weakref.ref(self))
        self.watches = Watches(self)
        self.outermost: weakref.WeakValueDictionary[tuple[str, Hashable], BaseLease] = weakref.WeakValueDictionary()
        """The lease of the outermost open `with` block, by name and by the thread or task that entered the block."""
        self.reentrant: weakref.WeakValueDictionary[tuple[str, Hashable], L] = weakref.WeakValueDictionary()
        """The lease that a thread or task holds through reentrant locks, by name. A lease that is dropped disappears."""
        self.limits = LimitComparison(self)
        self.flights: dict[str, Any] = {}
        """The builds of single flight that callers of this process share, by key."""
        self.rebuild_retries: dict[str, float] = {}
        """When to try again to rebuild a stale value that another process was rebuilding, by key."""
        self.unfinished: dict[str, Claim] = {}
        """The claims that are being acquired or released at this moment: `close` abandons them."""
        self.closed = self._closing = False
        self.connected = False
        """Whether the engine has answered before: a first connection may take longer."""
        self._to_release: list[Grant] = []
        """The grants that `close` still has to release."""
        register(self)

    async def acquire(
        self, claim: Claim, timeout: float | None, options: HoldOptions, should_stop: ShouldStop | None = None
    ) -> L | None:
        """Return a lease that the renewer renews, or None if the lock was not free in time."""
        # Register the claim before checking `closed`: close() either finds it here, or we see that the client is closed.
        self.unfinished[claim.id] = claim
        grant: Grant | None = None
        try:
            self._check_open(claim.name)
            grant = await acquire(self, claim, timeout, should_stop)
            self.connected = True
            lease: L | None = None
            if grant is not None:
                lease = self._make_lease(self, grant, options)
                self.renewer.add(lease)
                if claim.id not in self.unfinished:
                    raise Forked(FORKED, claim.name)
                if self.closed:
                    lease._lose(LossReason.CLOSED)
                    self._check_open(claim.name)
            del self.unfinished[claim.id]  # not pop(): Ctrl-C inside a call would abandon a lease that the caller gets
            return lease
        except BaseException:
            if grant is not None and claim.id in self.unfinished:
                self.renewer.remove(grant.claim.id)
                await self.renewer.leftovers.abandon_shielded(grant.claim)
            self.unfinished.pop(claim.id, None)
            raise

    def would_deadlock(self, name: str, mode: Mode) -> bool:
        """Return whether this thread or task holds the name in an open `with` block and would wait for itself."""
        return self._outermost_lease(name, mode) is not None

    def _outermost_lease(self, name: str, mode: Mode) -> BaseLease | None:
        """Return the lease of an open block of this thread or task that blocks a new claim in this mode, or None.

        A thread may take several permits of one semaphore.
        """
        held = self.outermost.get((name, self.runtime.current_task())) if self.outermost else None
        if held is None or held.mode is mode is Mode.PERMIT or held._released or held.is_lost():
            return None
        return held

    def check_deadlock(self, name: str, mode: Mode) -> None:
        """Raise WouldDeadlock if this thread or task would wait for itself."""
        if (held := self._outermost_lease(name, mode)) is not None:
            advice = "leave that block first, or use reentrant=True in both places if they need the same mode"
            if held.mode is Mode.SHARED and mode is Mode.EXCLUSIVE:
                advice = "a read lease cannot be upgraded: release it, acquire write(), and read again"
            raise WouldDeadlock(
                f"this thread or task is inside a with block that holds {name!r} and would wait for itself; {advice}",
                name,
            )

    def assert_held(self, name: str, mode: Mode = Mode.EXCLUSIVE) -> None:
        """Raise NotHeld unless this client holds the name now, in this mode; a writer may do what a reader may."""
        check_name(name)
        wanted = {Mode.EXCLUSIVE, Mode.SHARED} if mode is Mode.SHARED else {mode}
        held = [lease.mode for lease in self.renewer.leases() if lease.name == name and not lease.is_lost()]
        if wanted.isdisjoint(held):
            how = f"holds {name!r} only as a {held[0].value} lease" if held else f"does not hold {name!r}"
            raise NotHeld(f"this client ({self.owner}) {how}, and this code needs it {mode.value}", name)

    async def lock_timeout(self, name: str, timeout: float, since: float) -> LockTimeout:
        """Return the error for a lock that was not free in time: it names the holder if the engine can do that soon."""
        holders: tuple[Holder, ...] = ()
        if (left := since + timeout + MIN_REPLY_TIMEOUT - self.runtime.now()) > 0:
            with suppress(FencelockError, TimeoutError):
                holders = (await self.runtime.run_with_time_limit(self.engine.inspect(name), left)).holders
        who = f"it is held by {self._describe(name, holders)}" if holders else f"ask inspect({name!r}) who holds it"
        return LockTimeout(f"{name!r} was not free within {timeout:g} s; {who}", name)

    def _describe(self, name: str, holders: Sequence[Holder]) -> str:
        first, count = holders[0], len(holders) - 1
        ours = any(lease.name == name and lease.token == first.token for lease in self.renewer.leases())
        others = f" and {count} other{'s' if count > 1 else ''}" if count else ""
        held = "" if first.held_for is None else f", held for {first.held_for:.1f} s"
        return f"{first.owner} ({'this process, ' if ours else ''}token {first.token}{held}){others}"

    async def check_purpose(self, purpose: str, name: str, timeout: float | None) -> None:
        """Raise GuaranteeUnavailable if the engine, as its server is configured, cannot serve this purpose."""
        self._check_open(name)
        if hasattr(self.engine, "learn_traits"):
            with attach_name(name):
                seconds = None if timeout is None else timeout + FIRST_CONNECT_TIMEOUT
                await cast(Configured, self.engine).learn_traits(Deadline(self.runtime.now, seconds))
            self.connected = True
        check_purpose(purpose, self.engine.traits, name)

    async def inspect(self, name: str) -> Snapshot:
        """Return who holds a name and who waits for it."""
        self._check_open(name)
        check_name(name)
        with attach_name(name):
            return await self.engine.inspect(name)

    def watch(self, name: str, stop: StopSignal | None) -> AsyncIterator[Snapshot]:
        """Iterate over the states of a name: the current one, then the newest one after each change."""
        self._check_open(name)
        return self.watches.watch(check_name(name), stop)

    def names(self, prefix: str = "") -> AsyncIterator[str]:
        """Iterate over the names that have a holder or a waiter."""
        self._check_open(None)
        if prefix != "":
            check_name(prefix, "a prefix")
        return self.engine.names(prefix)

    async def force_release(self, name: str, reason: str) -> int:
        """Drop the holders of a name and return how many they were. It is logged, with the reason."""
        self._check_open(name)
        check_name(name)
        reason = check_reason(reason, name)
        with attach_name(name), never_repeated("the forced release", "Look with inspect()", name):
            dropped = await self.engine.force_release(name)
        holders = "1 holder" if dropped == 1 else f"{dropped} holders"
        message = f"{self.owner} released {name!r} by force, dropping {holders}: {reason}"
        log("client", WARNING, message, lock=name, owner=self.owner, reason=reason, dropped=dropped)
        return dropped

    async def close(self) -> None:
        """Release all leases, stop the renewer and close the engine. Calling it again is harmless.

        If one lock cannot be released, the others still are. If the engine does not answer, close() ends after CLOSE_SECONDS.
        """
        if self._closing:
            return
        try:
            self._closing = self.closed = True
            await self._close()
        except BaseException:
            self._closing = False  # an interrupt: the next call continues
            raise

    async def _close(self) -> None:
        self._to_release += self.renewer.grants()
        self.renewer.stop(LossReason.CLOSED)
        try:
            if self._to_release or self.unfinished or self.renewer.leftovers.claims():
                with suppress(TimeoutError):
                    await self.runtime.run_with_time_limit(self._release_all(), CLOSE_SECONDS)
            left = [grant.claim for grant in self._to_release] + self.renewer.leftovers.claims()
            if left:
                names = ", ".join(sorted({repr(claim.name) for claim in left})[:10])
                message = f"not everything could be released on close; it runs out by itself: {names}"
                log("client", ERROR, message, owner=self.owner, leases=len(left))
        finally:
            try:
                await self.engine.close()
            finally:
                await self.runtime.close()

    async def _release_all(self) -> None:
        """Release all leases, and abandon the claims in flight and the leftovers; continue after an error."""
        leftovers = self.renewer.leftovers
        while self._to_release:
            grant = self._to_release[-1]
            try:
                await self.engine.release(grant)
            except Exception:
                leftovers.add(grant.claim, 0.0, inf)
            self._to_release.pop()
        for claim in list(self.unfinished.values()):
            leftovers.add(claim, 0.0, inf)
        await leftovers.process_all()

    def before_fork(self) -> None:
        """Prepare an engine with something that must not exist twice."""
        if hasattr(self.engine, "before_fork"):
            cast(ForkPrepared, self.engine).before_fork()

    def after_fork_in_parent(self) -> None:
        """Continue after a fork."""
        if hasattr(self.engine, "after_fork_in_parent"):
            cast(ForkPrepared, self.engine).after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        """Start again in a forked child: it owns no lease, no connection and no thread of its parent."""
        self.mutex = RLock()  # the parent's may be held by a thread that does not exist here
        leases = self.renewer.leases()
        self.renewer = LeaseRenewer(self)
        self.watches.after_fork()
        self.reentrant.clear()
        self.outermost.clear()
        self.flights.clear()
        self.unfinished.clear()
        self._to_release.clear()
        self.connected = False
        self.owner = self._given_owner or _default_owner()
        self.engine.after_fork()
        self.runtime.after_fork()
        for lease in leases:
            lease._lose(LossReason.FORKED)

    def call_on_lost(self, lease: LeaseState | BaseGroup, reason: LossReason) -> None:
        """Call the user's `on_lost`, if there is one: in a thread or a callback of its own, so that none delays another."""
        if self._on_lost is not None:
            self.runtime.call_user(partial(self._call_on_lost, self._on_lost, lease, reason))

    def _call_on_lost(self, on_lost: OnLost, lease: LeaseState | BaseGroup, reason: LossReason) -> None:
        """Call it, and log its error."""
        try:
            on_lost(lease, reason)
        except (Exception, SystemExit) as error:  # sys.exit() would end nothing but its thread
            log("lease", ERROR, f"on_lost failed for {lease.name!r}: {error}", error=error, lock=lease.name)

    def _check_open(self, name: str | None) -> None:
        if self.closed:
            raise ClientClosed("this client is closed; connect again", name)
        self.runtime.check_usable()


def _gone(client: weakref.ref[Client[Any]], id: str) -> None:
    """Report to the client that the engine dropped a claim. A weak reference: the engine must not keep the client alive."""
    if (it := client()) is not None:
        it.renewer.gone(id)


def _default_owner() -> str:
    return f"{os.uname().nodename}:{os.getpid()}" if hasattr(os, "uname") else f"pid:{os.getpid()}"


def clients() -> list[Client[Any]]:
    """Return every client of this process."""
    return [it for it in registered() if isinstance(it, Client)]
