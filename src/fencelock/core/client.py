"""A client: one engine, one world, one keeper, and the leases that it holds."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Callable, Hashable
from functools import partial
from threading import RLock
from typing import Any, Generic, TypeVar, cast

from fencelock.core.acquire import acquire, naming, undo
from fencelock.core.backend import Backend, Watchful
from fencelock.core.inherited import FORKED, Forked
from fencelock.core.keeper import Keeper, Kept
from fencelock.core.lease import LeaseCore
from fencelock.core.names import check_name, check_ttl
from fencelock.core.world import Soon, World, fail, had
from fencelock.errors import ClientClosed, FencelockError, LockTimeout
from fencelock.model import Busy, Claim, Grant, Reason, Snapshot

OnLost = Callable[[Any, Reason], object]
L = TypeVar("L", bound=LeaseCore)


class Client(Generic[L]):
    """What a façade's `connect` returns, without a colour. Safe to share between threads and tasks."""

    def __init__(
        self,
        world: World,
        backend: Backend,
        make_lease: Callable[..., L],
        *,
        ttl: float = 30.0,
        owner: str | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        self.world = world
        self.backend = backend
        self.ttl = check_ttl(ttl, backend.traits)
        self._given_owner = None if owner is None else check_name(owner, "an owner's label")
        self.owner = self._given_owner or _default_owner()
        """The label for people: what the user gave, else host and process id."""
        self._on_lost = on_lost
        self._make_lease = make_lease
        self.mutex = RLock()  # a signal handler that looks at a lease may interrupt a thread that has it
        self.keeper = Keeper(self)
        if backend.traits.loss_pushed:
            cast(Watchful, backend).on_gone = partial(_gone, weakref.ref(self))
        self.reentrant: weakref.WeakValueDictionary[tuple[str, Hashable], L] = weakref.WeakValueDictionary()
        """What threads and tasks hold through reentrant locks; what they drop goes from here with it, and the task, too."""
        self.under_way: dict[str, Claim] = {}
        """What is being asked for or given back at this moment, for `close` to see to."""
        self.closed = self._closing = False
        self._left: list[Grant] = []
        """What a close has to release yet."""
        with _registry:
            _clients.add(self)

    def acquire(self, claim: Claim, timeout: float | None, renew: bool, max_hold: float | None) -> Soon[L]:
        """Return a lease that the keeper looks after, or raise LockTimeout."""
        under_way, now, id = self.under_way, self.world.now, claim.id
        # Noted before the look at `closed` and until after the next one: either close() finds the claim, or we see it.
        under_way[id] = claim
        try:
            if self.closed or self.world.ready is not None:
                self._check_open(claim.name)
            sent, ttl = now(), claim.ttl
            lease = self._make_lease(self, renew, max_hold)
            kept = self.keeper.expect(lease)
            if max_hold is None:  # which counts from the grant on
                lease._extend(sent, ttl)
            fresh = sent + ttl / 3
        except BaseException:
            under_way.pop(id, None)
            raise
        attempt: Soon[Grant | Busy]
        try:
            attempt = self.backend.attempt(claim, queue=timeout != 0, patience=timeout)
            # All that can be was done before: if others had it, they wait for us now.
            if type(attempt) is Grant and now() <= fresh and max_hold is None:
                lease._grant = attempt
                self.keeper.add(lease, kept)
                if id in under_way and not self.closed:
                    # No call: an interrupt comes before, and finds it there, or after we have returned.
                    del under_way[id]
                    return lease
        except BaseException as error:
            self.keeper.drop(id, None)
            attempt = fail(error)
        return self._acquire(claim, timeout, lease, kept, sent, attempt)

    async def _acquire(
        self, claim: Claim, timeout: float | None, lease: L, kept: Kept, sent: float, attempt: Soon[Grant | Busy]
    ) -> L:
        """Go on where it takes more than one attempt that is granted at once."""
        try:
            grant = await acquire(self.world, self.backend, claim, timeout, self.under_way, sent, attempt)
            if grant is None:
                name = claim.name
                advice = f"wait longer, or ask inspect({name!r}) who holds it"
                raise LockTimeout(f"{name!r} was not free within {timeout:g} s; {advice}", name)
            try:
                lease._begin(grant)
                self.keeper.add(lease, kept)
                if claim.id not in self.under_way:
                    raise Forked(FORKED, claim.name)
                if self.closed:
                    lease._lose(Reason.CLOSED)
                    self._check_open(claim.name)
            except BaseException:  # no thread to be had for the keeper, say
                self.keeper.drop(grant.claim.id, None)
                if claim.id in self.under_way:
                    await undo(self.world, self.backend, grant.claim)
                raise
        finally:
            self.under_way.pop(claim.id, None)
        return lease

    async def inspect(self, name: str) -> Snapshot:
        """Return who holds a name and who waits for it."""
        self._check_open(name)
        check_name(name)
        with naming(name):
            return await self.backend.inspect(name)

    def names(self, prefix: str = "") -> AsyncIterator[str]:
        """Iterate over the names that have a holder or a waiter."""
        self._check_open(None)
        if prefix:
            check_name(prefix, "a prefix")
        return self.backend.names(prefix)

    async def force_release(self, name: str, reason: str) -> int:
        """Drop whoever holds the name; return how many that were. It is logged, with the reason."""
        self._check_open(name)
        check_name(name)
        if not reason.strip():
            raise ValueError(f"a forced release of {name!r} needs a reason that others can read later")
        with naming(name):
            dropped = await self.backend.force_release(name)
        holders = "1 holder" if dropped == 1 else f"{dropped} holders"
        self._log().warning("%s released %r by force, dropping %s: %s", self.owner, name, holders, reason)
        return dropped

    async def close(self) -> None:
        """Release what is still held, stop the keeper, leave the engine. Calling again is harmless."""
        if self._closing:
            return
        try:
            self._closing = self.closed = True
            await self._close()
        except BaseException:
            self._closing = False  # an interrupt: whoever calls again does the rest
            raise

    async def _close(self) -> None:
        self._left += self.keeper.grants()
        self.keeper.stop(Reason.CLOSED)
        try:
            while self._left:
                await had(self.backend.release(self._left[-1]))
                self._left.pop()
            for claim in list(self.under_way.values()):
                await self.backend.abandon(claim)
        except FencelockError as error:
            # Not one by one: an engine that does not answer would hold up the end of the process many times over.
            self.complain("not everything could be released on close; the rest runs out by itself", error)
        finally:
            try:
                await self.backend.close()
            finally:
                await self.world.close()

    def after_fork(self) -> None:
        """Begin anew in a forked child: no lease, no connection, no thread of the parent is ours."""
        self.mutex = RLock()  # the parent's may be held by a thread that does not exist here
        leases = self.keeper.leases()
        self.keeper = Keeper(self)
        self.reentrant.clear()
        self.under_way.clear()
        self._left.clear()
        self.owner = self._given_owner or _default_owner()
        self.backend.after_fork(child=True)  # first: it gives its bells back to the world, which closes our copies
        self.world.after_fork()
        for lease in leases:
            lease._lose(Reason.FORKED)

    @property
    def cares_about_loss(self) -> bool:
        """Whether the user gave an `on_lost`."""
        return self._on_lost is not None

    def tell_lost(self, lease: LeaseCore, reason: Reason) -> None:
        """Call the user's `on_lost`, if there is one."""
        if self._on_lost is not None:
            self.world.at_home(partial(self._call_on_lost, self._on_lost, lease, reason))

    def _call_on_lost(self, on_lost: OnLost, lease: LeaseCore, reason: Reason) -> None:
        """Errors of the user's function are logged and do not stop the keeper."""
        try:
            on_lost(lease, reason)
        except (Exception, SystemExit) as error:  # sys.exit() in a thread would end nothing but the keeper
            self.complain(f"on_lost failed for {lease.name!r}", error)

    def caution(self, message: str) -> None:
        """Log what the user should know and nothing else would show."""
        self._log().warning("%s", message)

    def complain(self, message: str, error: BaseException) -> None:
        """Log what nobody is there to be told."""
        self._log().error("%s: %s", message, error, exc_info=error)

    def _check_open(self, name: str | None) -> None:
        if self.closed:
            raise ClientClosed("this client is closed; connect again", name)
        if (ready := self.world.ready) is not None:
            ready()

    @staticmethod
    def _log() -> Any:
        import logging  # costs a tenth of the start of `fencelock run`, which hardly ever needs it

        return logging.getLogger("fencelock")


def _gone(client: weakref.ref[Client[Any]], id: str) -> None:
    """Pass on what an engine tells of a claim; the engine must not keep the client from being garbage."""
    if (it := client()) is not None:
        it.keeper.gone(id)


def _default_owner() -> str:
    return f"{os.uname().nodename}:{os.getpid()}" if hasattr(os, "uname") else f"pid:{os.getpid()}"


_clients: weakref.WeakSet[Client[Any]] = weakref.WeakSet()
_registry = RLock()
"""Held while a client is added, and all through a fork: a set that grows cannot be read, and none may be forgotten."""


def clients() -> list[Client[Any]]:
    """Return every client of this process."""
    with _registry:
        return list(_clients)


def _before_fork() -> None:
    _registry.acquire()
    _forking.append(list(_clients))
    for client in _forking[-1]:
        client.backend.before_fork()


def _after_fork_in_parent() -> None:
    for client in _forking.pop():
        client.backend.after_fork(child=False)
    _registry.release()


def _after_fork_in_child() -> None:
    for client in _forking.pop():
        client.after_fork()
    _registry.release()  # its holder is the thread that forked, and that is us


_forking: list[list[Client[Any]]] = []
"""The clients that a fork is about; a list of them, as a signal handler may fork in the middle of a fork."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
