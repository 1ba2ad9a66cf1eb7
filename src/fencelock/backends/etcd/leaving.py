"""Leaving: a claim's key is deleted, and what may still be on its way is kept from doing anything when it arrives."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from fencelock.backends.etcd import messages as m
from fencelock.backends.etcd.asking import Asking, Limit
from fencelock.backends.etcd.layout import Layout, is_of
from fencelock.backends.etcd.link import Link, Refused
from fencelock.core.backend import GRACE, LONGEST
from fencelock.model import Claim

if TYPE_CHECKING:
    from fencelock.backends.etcd.claims import Claims
    from fencelock.backends.etcd.keys import Keys
    from fencelock.backends.etcd.links import Links
    from fencelock.backends.etcd.sessions import Sessions
    from fencelock.core.world import World


class Leaving:
    """How a client's claims end, if not with their session."""

    def __init__(
        self,
        world: World,
        links: Links,
        layout: Layout,
        keys: Keys,
        claims: Claims,
        sessions: Sessions,
        asking: Asking,
    ) -> None:
        self._world = world
        self._links = links
        self._layout = layout
        self._keys = keys
        self._claims = claims
        self._sessions = sessions
        self._asking = asking

    def is_left(self, key: str) -> bool:
        """Return whether nothing of a claim can be on etcd, or on its way there."""
        return key not in self._claims.doubt and self._sessions.end_of([key]) is None

    async def delete(self, id: str, key: str, seconds: float = LONGEST) -> tuple[bool, int]:
        """Delete a key; return whether it was there, and how often that was asked for."""
        floor = self._asking.facts.revision
        body = m.find(key.encode())
        tries = 0

        def work(link: Link, left: float) -> Awaitable[bytes]:
            nonlocal tries
            tries += 1
            self._keys.asked(id)
            return link.call(m.DELETE, body, left)

        header, deleted = m.read_deleted(await self._asking.run(work, seconds))
        self._keys.answered(id)
        self._asking.facts.take(header, floor)
        self._sessions.let_go(key)
        if self.is_left(key):
            self._keys.end(id, again=True)
        return deleted > 0, tries

    async def abandon(self, claim: Claim) -> None:
        """Leave nothing behind."""
        key = self._keys.of(claim)
        limit = Limit(self._world, claim.ttl, GRACE)
        if key is None:
            await self._abandon_unknown(claim, limit)
            return
        self._claims.drop(claim.id, key)
        self._sessions.give_up(key)
        session = self._claims.doubt.get(key)
        if session is not None and not session.ended:
            # Whatever is still on its way comes with the same lease: if that is gone, it cannot do anything.
            self._sessions.retire(session)
            tomb = self._layout.tomb(claim.id)
            body = m.txn([], [m.do_delete(key.encode()), m.do_put(m.put(tomb.encode(), b"", session.handle))])
            try:
                m.read_txn(await self._links.ask(m.TXN, body, limit.left))
            except Refused as refusal:
                if not refusal.no_lease:
                    raise self._asking.told(refusal) from refusal
                await self.delete(claim.id, key, limit.left)
            self._keys.end(claim.id, again=False)
            self._claims.settled(key, session)
        else:
            # That ends it if nothing is in doubt, and the key may be another's by then.
            await self.delete(claim.id, key, limit.left)
            if session is not None:
                self._keys.end(claim.id, again=False)
                self._claims.doubt.pop(key, None)

    async def _abandon_unknown(self, claim: Claim, limit: Limit) -> None:
        """Leave nothing behind of a claim that another client has made, if there is anything."""
        line = m.below(self._layout.queue(claim.name).encode())
        _, line_up = m.read_range(await self._asking.ask(m.RANGE, line, limit.left))
        for pair in line_up.pairs:
            if is_of(pair, claim):
                body = m.txn([m.created(pair.key, m.EQUAL, pair.created)], [m.do_delete(pair.key)])
                m.read_txn(await self._asking.ask(m.TXN, body, limit.left))
