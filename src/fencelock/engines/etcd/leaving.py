"""Leaving: a claim's key is deleted, and what may still be on its way is kept from doing anything when it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.core.engine import MAX_REPLY_TIMEOUT, MIN_REPLY_TIMEOUT
from fencelock.engines.etcd import messages as m
from fencelock.engines.etcd.asking import Asking, Limit
from fencelock.engines.etcd.layout import Layout, is_of, value
from fencelock.engines.etcd.link import Refused
from fencelock.model import Claim

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime
    from fencelock.engines.etcd.claims import Claims
    from fencelock.engines.etcd.keys import Keys
    from fencelock.engines.etcd.links import Links
    from fencelock.engines.etcd.sessions import Sessions


class Leaving:
    """How a client's claims end, if not with their session."""

    def __init__(
        self,
        runtime: Runtime,
        links: Links,
        layout: Layout,
        keys: Keys,
        claims: Claims,
        sessions: Sessions,
        asking: Asking,
    ) -> None:
        self._runtime = runtime
        self._links = links
        self._layout = layout
        self._keys = keys
        self._claims = claims
        self._sessions = sessions
        self._asking = asking

    def is_left(self, id: str) -> bool:
        """Return whether nothing of a claim can be on etcd, or on its way there."""
        claims = self._claims
        return id not in claims.doubt and id not in claims.holds and self._sessions.end_of([id]) is None

    async def delete(
        self, claim: Claim, key: str, created: int, seconds: float = MAX_REPLY_TIMEOUT
    ) -> tuple[bool, int]:
        """Delete a claim's key; return whether it was there, and how often that was asked for.

        The key is deleted only if this claim has it, whose id is part of the value, and only as it was `created`. That
        revision is not certain while an attempt may still arrive: then the value alone counts. Nobody else's claim is ever
        deleted, however late this arrives, and whichever claim has the key by then.
        """
        encoded = key.encode()
        compares = [m.valued(encoded, value(claim))]
        if created and claim.id not in self._claims.doubt:
            compares.append(m.created(encoded, m.EQUAL, created))
        body = m.txn(compares, [m.do_delete(encoded)])
        floor = self._asking.facts.revision
        said, tries = await self._asking.ask_counted(m.TXN, body, seconds)
        answer = m.read_txn(said)
        self._asking.facts.take(answer.header, floor)
        self._sessions.let_go(claim.id)
        if self.is_left(claim.id):
            self._keys.end(claim.id, again=answer.succeeded)
        return answer.succeeded, tries

    async def abandon(self, claim: Claim) -> None:
        """Leave nothing behind."""
        found = self._keys.of(claim.id)
        limit = Limit(self._runtime, claim.ttl, MIN_REPLY_TIMEOUT)
        if found is None:
            await self._abandon_unknown(claim, limit)
            return
        self._claims.drop(claim.id)
        self._sessions.give_up(claim.id)
        session = self._claims.doubt.get(claim.id)
        if session is not None and not session.ended:
            # Whatever is still on its way comes with the same lease: if that is gone, it cannot do anything.
            self._sessions.retire(session)
            key = found.key.encode()
            tomb = m.do_put(m.put(self._layout.tomb(claim.id).encode(), b"", session.handle))
            body = m.txn([m.valued(key, found.value)], [m.do_delete(key), tomb], [tomb])
            try:
                m.read_txn(await self._links.request(m.TXN, body, limit.left))
            except Refused as refusal:
                if not refusal.no_lease:
                    raise self._asking.told(refusal) from refusal
                await self.delete(claim, found.key, found.created, limit.left)
            self._keys.end(claim.id, again=False)
            self._claims.settled(claim.id, session)
        else:
            # That ends it if nothing is in doubt, and the key may be another's by then.
            await self.delete(claim, found.key, found.created, limit.left)
            if session is not None:
                self._keys.end(claim.id, again=False)
                self._claims.doubt.pop(claim.id, None)

    async def _abandon_unknown(self, claim: Claim, limit: Limit) -> None:
        """Leave nothing behind of a claim that another client has made, if there is anything."""
        line = m.below(self._layout.queue(claim.name).encode())
        _, line_up = m.read_range(await self._asking.request(m.RANGE, line, limit.left))
        for pair in line_up.pairs:
            if is_of(pair, claim):
                body = m.txn([m.created(pair.key, m.EQUAL, pair.created)], [m.do_delete(pair.key)])
                m.read_txn(await self._asking.request(m.TXN, body, limit.left))
