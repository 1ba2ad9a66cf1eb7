"""Removing claims: release, abandon, and claims that have expired by this client's clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fencelock.core.engine import MAX_REPLY_TIMEOUT, MIN_REPLY_TIMEOUT
from fencelock.engines.etcd import messages as m
from fencelock.engines.etcd.client import timeout_for
from fencelock.engines.etcd.keyspace import Keyspace, read_claim
from fencelock.engines.etcd.rpc_errors import LeaseNotFound
from fencelock.errors import EngineUnavailable, OutcomeUnknown
from fencelock.model import Claim

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime
    from fencelock.engines.etcd.client import EtcdClient
    from fencelock.engines.etcd.own_claims import OwnClaim, OwnClaims
    from fencelock.engines.etcd.session import EtcdSession, Sessions

BATCH = 60
"""Claims that one transaction removes: etcd allows 128 steps."""


def delete_if_created_at(key: bytes, revision: int) -> bytes:
    """Return the transaction that deletes a claim's key, and never a later claim's with the same key."""
    return m.txn([m.is_created_at(key, revision)], [m.do_delete(key)])


class Releaser:
    """Removes this client's claims."""

    def __init__(
        self, runtime: Runtime, client: EtcdClient, keyspace: Keyspace, claims: OwnClaims, sessions: Sessions
    ) -> None:
        self._runtime = runtime
        self._client = client
        self._keyspace = keyspace
        self._claims = claims
        self._sessions = sessions

    async def release(self, own: OwnClaim, name: str) -> bool:
        """Delete a held claim's key; return False if it was gone already."""
        self._claims.end_hold(own)
        assert own.session is not None
        body = delete_if_created_at(own.key, own.create_revision)
        reply, sent = await self._transact(body, timeout_for(own.session.ttl))
        if not own.in_flight:  # else the core abandons the claim after this
            self._claims.remove(own, reuse=reply.succeeded)
        if not reply.succeeded and sent > 1:
            raise OutcomeUnknown(f"etcd at {self._client.address}: an earlier request may have released {name!r}")
        return reply.succeeded

    async def abandon(self, claim: Claim) -> None:
        """Remove a claim whatever its state is, and keep attempts of it that are in flight from creating it again."""
        own = self._claims.get(claim.id)
        if own is None:
            await self._abandon_foreign(claim)
            return
        self._claims.end_hold(own)
        if own.session is not None:  # if the removal is interrupted, it is repeated before the next keep-alive
            own.session.mark_expired(own.id)
        await self._remove([own], min(timeout_for(claim.ttl), MIN_REPLY_TIMEOUT))

    async def _abandon_foreign(self, claim: Claim) -> None:
        """Remove a claim that another client made, if it exists."""
        timeout = min(timeout_for(claim.ttl), MIN_REPLY_TIMEOUT)
        body = m.get_prefix(self._keyspace.queue(claim.name))
        _, found = m.read_range(await self._client.request(m.RANGE, body, timeout))
        for pair in found.pairs:
            if read_claim(pair.value).id == claim.id:
                await self._client.request(m.TXN, delete_if_created_at(pair.key, pair.create_revision), timeout)

    async def remove_expired(self, timeout: float = MAX_REPLY_TIMEOUT) -> None:
        """Remove the expired claims of all sessions."""
        now = self._runtime.now()
        for session in self._sessions.all():
            if session.expired_ids(now):
                await self.remove_expired_of(session, timeout)

    async def remove_expired_of(self, session: EtcdSession, timeout: float = MAX_REPLY_TIMEOUT) -> bool:
        """Remove the expired claims of a session; False if that failed, and then the session must not be kept alive."""
        owns = []
        for id in session.mark_expired_ids(self._runtime.now()):
            own = self._claims.get(id)
            if own is not None and own.session is session:
                owns.append(own)
            else:
                session.remove(id)  # etcd cannot have it
        try:
            for start in range(0, len(owns), BATCH):
                await self._remove(owns[start : start + BATCH], timeout)
        except EngineUnavailable:
            return False
        return True

    async def _remove(self, owns: Sequence[OwnClaim], timeout: float) -> None:
        """Delete the keys of claims of one session, by their create revision.

        Of a claim with an attempt in flight that revision is not known. The claim is marked as abandoned, which keeps the
        attempt from creating the key later; a key that exists already is deleted in a second step. The mark has the same
        lease as the attempt: when the mark ends, the attempt can create nothing.
        """
        in_flight = [own for own in owns if own.in_flight and own.session is not None and not own.session.ended]
        steps = []
        for own in in_flight:
            assert own.session is not None
            self._sessions.refuse_claims(own.session)
            mark = m.do_put(self._keyspace.abandoned(own.id), b"", own.session.handle)
            steps += [m.do_range(m.get_key(own.key)), mark]
        steps += [m.do_txn(delete_if_created_at(own.key, own.create_revision)) for own in owns if own.create_revision]
        if steps:
            try:
                reply, _ = await self._transact(m.txn([], steps), timeout)
            except LeaseNotFound:
                assert in_flight[0].session is not None
                self._sessions.report_gone(in_flight[0].session)  # all of them have the same one
                await self._remove(owns, timeout)
                return
            found = [self._own_pair(own, reply.pairs(2 * at)) for at, own in enumerate(in_flight)]
            if rest := [
                m.do_txn(delete_if_created_at(pair.key, pair.create_revision)) for pair in found if pair is not None
            ]:
                await self._transact(m.txn([], rest), timeout)
        for own in owns:
            self._claims.remove(own, reuse=bool(own.create_revision))

    async def _transact(self, body: bytes, timeout: float) -> tuple[m.TxnReply, int]:
        """Send a transaction; return its reply, and how often it was sent."""
        seen = self._client.revision
        data, sent = await self._client.request_counted(m.TXN, body, timeout)
        reply = m.read_txn(data)
        self._client.check_header(reply.header, seen)
        return reply, sent

    @staticmethod
    def _own_pair(own: OwnClaim, pairs: list[m.KeyValue]) -> m.KeyValue | None:
        """Return the pair if the claim itself created it: after a restored backup, the key may be another claim's."""
        if pairs and pairs[0].create_revision != own.create_revision and read_claim(pairs[0].value).id == own.id:
            return pairs[0]
        return None
