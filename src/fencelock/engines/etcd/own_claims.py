"""The claims of this client: their keys, and what is known about them. No I/O.

A key ends with the client's number and a slot number. Slots are used again, as etcd keeps deleted keys in its index until
somebody compacts it, and visits them in every read of a queue: with a new key for each of 20,000 claims on one name, a read
took 7 ms of the server's time. A slot is free again only when etcd has confirmed that its key is gone and no attempt that
could create the key is in flight. No lock depends on that: an attempt creates its key only where there is none, and a removal
compares the revision at which the key was created.
"""

from __future__ import annotations

from collections.abc import Callable
from os import urandom
from typing import TYPE_CHECKING

from fencelock.model import Claim

if TYPE_CHECKING:
    from fencelock.engines.etcd.keyspace import ClaimData, Keyspace
    from fencelock.engines.etcd.loss_watch import LossWatcher
    from fencelock.engines.etcd.session import EtcdSession


class OwnClaim:
    """A claim of this client that etcd has, or may have."""

    def __init__(self, id: str, queue: bytes, client: bytes, slot: int) -> None:
        self.id = id
        self.queue = queue
        """The prefix of all claims on its name."""
        self.slot = slot
        self.key = queue + client + b"%d" % slot
        self.session: EtcdSession | None = None
        self.data: ClaimData | None = None
        self.create_revision = 0
        """The revision at which etcd created its key; 0 until a reply has shown it."""
        self.in_flight = False
        """Whether an attempt has no reply: etcd may still receive it, and create the key, until the claim is abandoned."""
        self.held = False
        self.blocked_by: tuple[bytes, ...] = ()
        """While it waits: the keys of the claims ahead that block it."""
        self.read_revision = 0
        """The revision of etcd at which this client has read `blocked_by`."""
        self.waited = False
        self.grant_time = 0
        """The wall clock, in µs, of a grant after a wait, until a renewal has written it; else 0."""


class OwnClaims:
    """All claims of a client. Each step is atomic in Python: other threads and signal handlers may run between any two."""

    def __init__(self, keyspace: Keyspace, loss_watcher: LossWatcher, on_gone: Callable[[str], None]) -> None:
        self._keyspace = keyspace
        self._loss_watcher = loss_watcher
        self._on_gone = on_gone
        self.detach_after_fork()

    def detach_after_fork(self) -> None:
        """Start without claims: in a forked child, the claims are the parent's."""
        self._claims: dict[str, OwnClaim] = {}
        self._client = urandom(8).hex().encode() + b"-"
        self._free: list[int] = []
        self._slots = iter(range(1 << 62))

    def get(self, id: str) -> OwnClaim | None:
        """Return the claim with this id."""
        return self._claims.get(id)

    def get_or_add(self, claim: Claim) -> OwnClaim:
        """Return the claim, with a key of its own from now on."""
        own = self._claims.get(claim.id)
        if own is None:
            try:
                slot = self._free.pop()
            except IndexError:
                slot = next(self._slots)
            own = OwnClaim(claim.id, self._keyspace.queue(claim.name), self._client, slot)
            self._claims[claim.id] = own
        return own

    def remove(self, own: OwnClaim, *, reuse: bool) -> None:
        """Forget a claim. Its slot is used again if etcd has confirmed that the key is gone (`reuse`)."""
        self.end_hold(own)
        if own.session is not None:
            own.session.remove(own.id)
        if self._claims.pop(own.id, None) is own and reuse and not own.in_flight:
            self._free.append(own.slot)

    def hold(self, own: OwnClaim) -> bool:
        """Record that a claim is held; return False if it was abandoned or its session has ended meanwhile.

        The claim is marked before the session is checked, and `Sessions.report_gone` does it the other way round: one of the
        two notices.
        """
        own.held = True
        if own.session is None or own.session.ended or self._claims.get(own.id) is not own:
            own.held = False
            return False
        self._loss_watcher.add(own.id, own.key, own.create_revision, own.session.ttl)
        return True

    def holds(self, own: OwnClaim) -> bool:
        """Return whether a claim is held, as far as this client knows."""
        return own.held and self._claims.get(own.id) is own

    def end_hold(self, own: OwnClaim) -> None:
        """Stop watching a held claim: from now on it is this client that removes it."""
        if own.held:
            own.held = False
            self._loss_watcher.drop(own.id)

    def deleted(self, id: str) -> None:
        """Report that somebody else has deleted a held claim."""
        own = self._claims.get(id)
        if own is not None and own.held:
            self.end_hold(own)
            self._on_gone(id)

    def session_ended(self, session: EtcdSession) -> None:
        """Report that all claims of a session are gone. Attempts that are still in flight will find no lease."""
        for own in list(self._claims.values()):
            if own.session is session:
                own.in_flight = False
                if own.held:
                    self.remove(own, reuse=False)
                    self._on_gone(own.id)
