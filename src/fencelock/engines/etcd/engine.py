"""etcd: a claim is a key under its session's lease, the queue is the order of creation, and waiters watch keys.

The words of this package, and where each thing is:

    session      an etcd lease that all claims of about the same ttl share; one keep-alive extends it (session.py)
    claim        a key below its name's prefix, attached to the session; the oldest key holds the name (keyspace.py)
    own claim    a claim of this client and what the client knows of it; its key ends with a slot number (own_claims.py)
    in flight    this client has sent an attempt and got no reply: etcd has created the key, or may do so later, or never
    abandoned    a key that marks a claim whose attempt is in flight: etcd creates nothing if the attempt arrives later
                 (release.py)
    token base   what is added to a key's create revision to make a token that follows the clock (token_base.py)
    watch        etcd reports the deletion of a key: a waiter watches the claims ahead of it (lock.py), and the client
                 watches the claims that it holds (loss_watch.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fencelock.core.engine import MIN_REPLY_TIMEOUT
from fencelock.core.rates import RecordRates
from fencelock.engines.etcd.client import EtcdClient
from fencelock.engines.etcd.inspect import Inspection
from fencelock.engines.etcd.keyspace import ClaimData, Keyspace
from fencelock.engines.etcd.lock import Acquisition
from fencelock.engines.etcd.loss_watch import LossWatcher
from fencelock.engines.etcd.messages import TXN, TxnReply, do_put, do_txn, is_modified_at, read_txn, txn
from fencelock.engines.etcd.own_claims import OwnClaim, OwnClaims
from fencelock.engines.etcd.records import EtcdRecords
from fencelock.engines.etcd.release import BATCH, Releaser
from fencelock.engines.etcd.session import EtcdSession, Sessions
from fencelock.engines.etcd.token_base import TokenBase
from fencelock.errors import EngineUnavailable
from fencelock.model import Grant, Renewal, TokenGuarantee, Traits

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime
    from fencelock.engines.etcd.url import EtcdUrl

RATE_KEEP = 60.0
"""Seconds for which a limit's record outlives its last call. Each call leaves an etcd lease behind, which lasts as long."""
TRAITS = Traits(
    engine="etcd",
    guarantee=TokenGuarantee.CONSENSUS,
    fair=True,
    loss_pushed=True,
    session=True,
    ttl_min=1.0,
)


class EtcdEngine:
    """`fencelock.core.engine.LossNotifier` on etcd."""

    traits = TRAITS

    def __init__(self, runtime: Runtime, url: EtcdUrl, namespace: str) -> None:
        self.on_gone: Callable[[str], None] = lambda _: None
        self._runtime = runtime
        self._client = client = EtcdClient(runtime, url, self._history_changed)
        keyspace = Keyspace(url.prefix, namespace)
        self._token_base = TokenBase(client, keyspace)
        self._loss_watcher = LossWatcher(runtime, client, keyspace.about, lambda id: self._claims.deleted(id))
        self._claims = claims = OwnClaims(keyspace, self._loss_watcher, lambda id: self.on_gone(id))
        self._sessions = sessions = Sessions(runtime, client, keyspace.about, claims.session_ended)
        self._releaser = releaser = Releaser(runtime, client, keyspace, claims, sessions)
        acquisition = Acquisition(runtime, client, keyspace, claims, sessions, self._token_base, releaser)
        self.attempt, self.wait, self.downgrade = acquisition.attempt, acquisition.wait, acquisition.downgrade
        self.abandon = releaser.abandon
        inspection = Inspection(client, keyspace)
        self.inspect, self.names, self.force_release = inspection.inspect, inspection.names, inspection.force_release
        self.records = EtcdRecords(client, keyspace, self._token_base)
        self.rates = RecordRates(runtime, self.records, self.records.clock, keep=RATE_KEEP)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Keep the sessions of the grants alive: one keep-alive per session, however many claims it has."""
        sent = self._runtime.now()
        results: dict[EtcdSession, Renewal] = {}
        for grant in grants:
            session: EtcdSession = grant.engine_state.session
            if session not in results:
                results[session] = Renewal.LOST if session.ended else Renewal.UNKNOWN
        alive = [
            session for session in results if session.alive(sent) and await self._releaser.remove_expired_of(session)
        ]
        results.update(await self._sessions.keep_alive(alive))
        renewals = [self._result(grant, results, sent) for grant in grants]
        await self._write_grant_times(
            [grant.engine_state for grant, result in zip(grants, renewals, strict=True) if result is Renewal.RENEWED]
        )
        return renewals

    def _result(self, grant: Grant, results: dict[EtcdSession, Renewal], sent: float) -> Renewal:
        own: OwnClaim = grant.engine_state
        assert own.session is not None
        result = results[own.session]
        if result is Renewal.RENEWED and not (
            own.id == grant.claim.id and self._claims.holds(own) and own.session.extend(own.id, sent, own.session.ttl)
        ):
            return Renewal.LOST
        return result

    async def _write_grant_times(self, owns: Sequence[OwnClaim]) -> None:
        """Write when a claim was granted that had to wait, once: `inspect` shows for how long it is held.

        The put compares the mod revision, which a downgrade raises above the create revision: it must not overwrite that.
        What is left over, or has no reply, is written after the next renewal.
        """
        steps: list[bytes] = []
        written: list[tuple[OwnClaim, ClaimData]] = []
        for own in owns:
            if own.grant_time and own.data is not None and own.session is not None and len(steps) < BATCH:
                data = own.data._replace(granted=own.grant_time)
                put = do_put(own.key, data.encode(), own.session.handle)
                steps.append(do_txn(txn([is_modified_at(own.key, own.create_revision)], [put])))
                written.append((own, data))
        if not steps:
            return
        try:
            reply = read_txn(await self._client.request(TXN, txn([], steps), MIN_REPLY_TIMEOUT))
        except EngineUnavailable:
            return
        for (own, data), step in zip(written, reply.steps, strict=True):
            if own.grant_time and isinstance(step, TxnReply) and step.succeeded:
                own.data = data
            own.grant_time = 0

    async def release(self, grant: Grant) -> bool:
        """Delete the claim's key, which wakes the next waiter. Return False if this grant no longer held the lock."""
        own: OwnClaim = grant.engine_state
        return own.id == grant.claim.id and await self._releaser.release(own, grant.claim.name)

    def _history_changed(self, revision: int) -> None:
        """Report all claims as gone: etcd has gone back in time, or is another cluster."""
        self._token_base.history_changed(revision)
        self._sessions.end_all()

    async def close(self) -> None:
        """Revoke the sessions and close all connections; waiters end without a reply."""
        self._client.closing = True
        self._loss_watcher.close()
        await self._sessions.close()
        self._client.close()

    def after_fork(self) -> None:
        """Drop the parent's connections without sending anything, and start with new sessions."""
        self._loss_watcher.detach_after_fork()
        self._claims.detach_after_fork()
        self._sessions.detach_after_fork()
        self._client.detach_after_fork()
