"""Which key each claim of a client has. Keys are used again, for what is claimed later, so that etcd's index does not grow.

etcd keeps the keys that were deleted in its index until somebody compacts it, which by itself it never does, and goes through
all of them whenever a line is looked at: twenty thousand claims on one name, each with a key of its own, made each look take
7 ms of a server's time.

A key is used again only after etcd has said that it is not there, and while no attempt that could create it is in flight. No
lock depends on that: an attempt creates its key only where there is none, and a deletion names the claim that it deletes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.engines.etcd.layout import value
from fencelock.model import new_id

if TYPE_CHECKING:
    from fencelock.engines.etcd.layout import Layout
    from fencelock.model import Claim

KEPT = 1000
"""Endings of keys that are kept for later."""


class ClaimKey:
    """The key of one claim, what is written there, and the revision at which it was created (0: not known)."""

    __slots__ = ("created", "key", "value")

    def __init__(self, key: str, value: bytes) -> None:
        self.key = key
        self.value = value
        self.created = 0


class Keys:
    """The keys of one client. Its steps are single ones for Python: threads, and signal handlers, may be amid others."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.forget()

    def forget(self) -> None:
        """Begin anew in a forked child: the parent's keys are not ours to use."""
        self._free: list[str] = []
        """Endings that no claim has: one does for any name."""
        self._by_id: dict[str, ClaimKey] = {}
        self._ids: dict[str, str] = {}

    def of(self, id: str) -> ClaimKey | None:
        """Return the key that a claim has, if it has one."""
        return self._by_id.get(id)

    def give(self, claim: Claim) -> ClaimKey:
        """Return the key that a claim has from now on."""
        found = self._by_id.get(claim.id)
        if found is None:
            try:
                ending = self._free.pop()
            except IndexError:
                ending = new_id()
            found = self._by_id[claim.id] = ClaimKey(self._layout.queue(claim.name) + ending, value(claim))
            self._ids[found.key] = claim.id
        return found

    def id_of(self, key: str) -> str | None:
        """Return the id of the claim that has a key."""
        return self._ids.get(key)

    def end(self, id: str, *, again: bool) -> None:
        """Take its key from a claim. A later claim may use it `again` if etcd has said that it is not there."""
        found = self._by_id.pop(id, None)
        if found is None:
            return
        self._ids.pop(found.key, None)
        if again and len(self._free) < KEPT:
            self._free.append(found.key.rpartition("/")[2])
