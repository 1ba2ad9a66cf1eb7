"""Which key each claim of a client has. Keys are used again, for what is claimed later, so that etcd's index does not grow.

etcd keeps the keys that were deleted in its index until somebody compacts it, which by itself it never does, and goes through
all of them whenever a line is looked at: twenty thousand claims on one name, each with a key of its own, made each look take
7 ms of a server's time.

Only a key about which nothing is on its way any more is used again: a deletion that comes late would meet the next claim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.model import new_id

if TYPE_CHECKING:
    from fencelock.backends.etcd.layout import Layout
    from fencelock.model import Claim

KEPT = 1000
"""Endings of keys that are kept for later."""


class Keys:
    """The keys of one client. Its steps are single ones for Python: threads, and signal handlers, may be amid others."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.forget()

    def forget(self) -> None:
        """Begin anew in a forked child: the parent's keys are not ours to use."""
        self._free: list[str] = []
        """Endings that no claim has: one does for any name."""
        self._by_id: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._asked: dict[str, list[None]] = {}
        """By the claim's id, the deletions that were asked for and not answered."""

    def of(self, claim: Claim) -> str | None:
        """Return the key that a claim has, if it has one."""
        return self._by_id.get(claim.id)

    def give(self, claim: Claim) -> str:
        """Return the key that a claim has from now on."""
        key = self._by_id.get(claim.id)
        if key is None:
            try:
                ending = self._free.pop()
            except IndexError:
                ending = new_id()
            key = self._by_id[claim.id] = self._layout.queue(claim.name) + ending
            self._ids[key] = claim.id
        return key

    def id_of(self, key: str) -> str | None:
        """Return the id of the claim that has a key."""
        return self._ids.get(key)

    def asked(self, id: str) -> None:
        """Note that the deletion of a claim's key was asked for."""
        self._asked.setdefault(id, []).append(None)

    def answered(self, id: str) -> None:
        """Note that the deletion of a claim's key was answered, once."""
        if asked := self._asked.get(id):
            asked.pop()

    def end(self, id: str, *, again: bool) -> None:
        """Take its key from a claim, once: who comes later has no say, as the key may be another's by then.

        It may be used `again` if nothing about it is on its way.
        """
        on_its_way = self._asked.pop(id, None)
        key = self._by_id.pop(id, None)
        if key is None:
            return
        self._ids.pop(key, None)
        if again and not on_its_way and len(self._free) < KEPT:
            self._free.append(key.rpartition("/")[2])
