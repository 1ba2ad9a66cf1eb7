"""Acquiring: one transaction creates the claim's key and reads the queue; a waiter watches the claims ahead of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fencelock.core.clock import Deadline, wall_us
from fencelock.core.engine import MIN_REPLY_TIMEOUT, not_held
from fencelock.engines.etcd import messages as m
from fencelock.engines.etcd.client import timeout_for
from fencelock.engines.etcd.keyspace import ClaimData, QueuedKey, key_of, queue_of, read_claim
from fencelock.engines.etcd.release import delete_if_created_at
from fencelock.engines.etcd.rpc_errors import LeaseNotFound, RpcError
from fencelock.errors import EngineUnavailable, FencelockError, OutcomeUnknown
from fencelock.model import Claim, Grant, Mode, Waiting, blockers

if TYPE_CHECKING:
    from fencelock.core.runtime import Event, Runtime
    from fencelock.engines.etcd.client import EtcdClient
    from fencelock.engines.etcd.grpc import EtcdConnection
    from fencelock.engines.etcd.keyspace import Keyspace, Numbering
    from fencelock.engines.etcd.own_claims import OwnClaim, OwnClaims
    from fencelock.engines.etcd.release import Releaser
    from fencelock.engines.etcd.session import EtcdSession, Sessions
    from fencelock.engines.etcd.token_base import TokenBase
    from fencelock.engines.etcd.watch import Watch

LAST_TIMEOUT = 0.05
"""Seconds for a request when the caller's time is over: it may have a reply immediately."""
REFUSED_PAUSE = 0.2
"""Seconds before the next attempt when etcd breaks a watch: it would break the next one too."""


class Acquisition:
    """Acquires locks for this client, and waits for them."""

    def __init__(
        self,
        runtime: Runtime,
        client: EtcdClient,
        keyspace: Keyspace,
        claims: OwnClaims,
        sessions: Sessions,
        token_base: TokenBase,
        releaser: Releaser,
    ) -> None:
        self._runtime = runtime
        self._client = client
        self._keyspace = keyspace
        self._claims = claims
        self._sessions = sessions
        self._token_base = token_base
        self._releaser = releaser

    # ------------------------------------------------------------------ attempt

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Acquire the lock or enqueue the claim; a claim that is in the queue keeps its place."""

        def left() -> float:
            return max(LAST_TIMEOUT, deadline.at_most(timeout_for(claim.ttl)))

        while True:
            self._client.check_open()
            own = self._claims.get_or_add(claim)
            try:
                outcome = await self._attempt_once(claim, own, enqueue, left)
            except BaseException as error:
                if not own.create_revision and not own.in_flight:
                    self._claims.remove(own, reuse=True)  # nothing of it was sent, or etcd has refused it
                if isinstance(error, EngineUnavailable):
                    self._client.check_open()  # close() may have closed the connection
                raise
            if outcome is not None:
                return outcome

    async def _attempt_once(
        self, claim: Claim, own: OwnClaim, enqueue: bool, left: Callable[[], float]
    ) -> Grant | Waiting | None:
        """Attempt once; None if something has changed meanwhile, and the attempt has to be repeated."""
        await self._releaser.remove_expired(left())
        session, now = own.session, self._runtime.now()
        if session is not None and not session.alive(now):
            session = None
        if session is not None and own.create_revision and not own.in_flight:
            session.attach(own.id, now, session.ttl)
            outcome = await self._look(claim, own, left(), enqueue)
            if outcome is None:
                self._claims.remove(own, reuse=False)  # etcd does not have it any more: start again
            return outcome
        # What an attempt without a reply may still create belongs to its session: use the same one again.
        if session is None or not own.in_flight:
            session = await self._sessions.get(claim.ttl, left())
        numbering = await self._token_base.get(left())
        self._client.check_open()  # a session that was created while close() ends the others would stay
        return await self._create(claim, own, enqueue, session, numbering, left)

    async def _create(
        self,
        claim: Claim,
        own: OwnClaim,
        enqueue: bool,
        session: EtcdSession,
        numbering: Numbering,
        left: Callable[[], float],
    ) -> Grant | Waiting | None:
        """Create the claim's key, unless it exists, and read the queue."""
        data = ClaimData.of(claim, numbering.base, wall_us())
        about_key = self._keyspace.about
        compares = [
            m.is_absent(own.key),
            m.is_absent(self._keyspace.abandoned(own.id)),
            m.is_modified_at(about_key, numbering.mod_revision),
        ]
        if not enqueue and not claim.shared:
            compares.append(m.is_prefix_unused(own.queue))
        body = m.txn(
            compares,
            [m.do_put(own.key, data.encode(), session.handle), m.do_range(_queue_request(claim, own, 0))],
            [m.do_range(m.get_key(own.key)), m.do_range(m.get_key(about_key))],
        )
        was_in_flight, own.in_flight = own.in_flight, True
        before, own.session = own.session, session
        session.attach(own.id, self._runtime.now(), session.ttl)
        try:
            reply, sent = await self._sessions.request(session, m.TXN, body, m.read_txn, left())
        except OutcomeUnknown:
            raise
        except FencelockError as error:
            own.in_flight = was_in_flight
            if not was_in_flight and not own.create_revision:
                session.remove(own.id)
                own.session = before
            if not isinstance(error, LeaseNotFound):
                raise
            self._sessions.report_gone(session)
            return None
        own.in_flight = was_in_flight or sent > 1
        if reply.succeeded:
            own.data, own.create_revision = data, reply.header.revision
            return await self._decide(claim, own, reply.pairs(1), reply.header, enqueue)
        existing, about_pairs = reply.pairs(0), reply.pairs(1)
        found = [pair for pair in existing if read_claim(pair.value).id == own.id]
        if found:
            return await self._continue(claim, own, found[0], enqueue, left)
        if not about_pairs or about_pairs[0].mod_revision != numbering.mod_revision:
            self._token_base.forget(numbering)
            return None
        # Another claim holds the lock and this one must not wait; or it was abandoned; or its key is another claim's, as
        # after a restored backup.
        if own.in_flight:
            await self._releaser.abandon(claim)
        else:
            self._claims.remove(own, reuse=not existing)
        return None if existing else Waiting(claim, session.since)

    async def _continue(
        self, claim: Claim, own: OwnClaim, pair: m.KeyValue, enqueue: bool, left: Callable[[], float]
    ) -> Grant | Waiting | None:
        """Continue with a key that an earlier attempt has created."""
        own.data, own.create_revision = read_claim(pair.value), pair.create_revision
        session = self._sessions.find(pair.lease)
        if session is None or not session.alive(self._runtime.now()):
            # Its session has ended by our clock, not yet by etcd's.
            await self._client.request(m.TXN, delete_if_created_at(own.key, own.create_revision), left())
            own.create_revision = 0
            return None
        if own.session is not session and own.session is not None:
            own.session.remove(own.id)
        own.session = session
        session.attach(own.id, self._runtime.now(), session.ttl)
        return await self._look(claim, own, left(), enqueue)

    async def _look(self, claim: Claim, own: OwnClaim, timeout: float, enqueue: bool) -> Grant | Waiting | None:
        """Keep the session alive and read the claim's place in the queue; None if it is not in the queue any more."""
        assert own.session is not None
        body = _queue_request(claim, own, own.create_revision)
        (header, found), _ = await self._sessions.request(
            own.session, m.RANGE, body, m.read_range, timeout, keep_alive=True
        )
        return await self._decide(claim, own, found.pairs, header, enqueue)

    async def _decide(
        self, claim: Claim, own: OwnClaim, pairs: list[m.KeyValue], header: m.Header, enqueue: bool
    ) -> Grant | Waiting | None:
        """Return what the queue means for a claim; None if the claim is not in it."""
        session, data = own.session, own.data
        now = self._runtime.now()
        if session is None or data is None or not session.alive(now):
            return None
        me = QueuedKey(own.key, data, own.create_revision, session.handle)
        queue = queue_of(pairs)
        if not any(
            (entry.key, entry.create_revision, entry.lease) == (me.key, me.create_revision, me.lease) for entry in queue
        ):
            return None
        blocked_by = blockers([*(entry for entry in queue if entry.create_revision < me.create_revision), me], me)
        claim = claim._replace(ttl=session.ttl)
        session.attach(own.id, now, session.ttl)
        if not blocked_by:
            if not self._claims.hold(own):
                return None
            if own.waited and not data.granted:
                own.grant_time = own.grant_time or wall_us()
            return Grant(claim, me.token, session.since, own, attempt_in_flight=own.in_flight)
        if not enqueue:
            await self._releaser.abandon(claim)
            return Waiting(claim, session.since)
        own.waited = True
        own.blocked_by, own.read_revision = tuple(map(key_of, blocked_by)), header.revision
        return Waiting(claim, session.since, None, own)

    # ------------------------------------------------------------------ wait

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Watch the claims ahead until this claim is admitted; None when the time is over, or the place is lost."""
        own: OwnClaim | None = waiting.engine_state
        until = self._runtime.now() + timeout
        if own is None:  # the claim was abandoned, and cannot be created again
            await self._runtime.sleep(min(timeout, REFUSED_PAUSE))
            return None
        outcome: Grant | Waiting | None = waiting
        while isinstance(outcome, Waiting) and self._runtime.now() < until:
            outcome = await self._watch(waiting.claim, own, until)
        return outcome if isinstance(outcome, Grant) else None

    async def _watch(self, claim: Claim, own: OwnClaim, until: float) -> Grant | Waiting | None:
        """Watch the claims ahead until one of them changes, and read the place again; None when the time is over."""
        event = self._runtime.event()
        connection = await self._client.take(max(0.0, until - self._runtime.now()) + MIN_REPLY_TIMEOUT)
        watch: Watch | None = None
        try:
            blocked_by = own.blocked_by
            watch = self._start_watch(connection, claim, own, event)
            await self._wait_for(connection, event, until, watch, started=True)
            if watch.start_revision is not None and watch.start_revision > own.read_revision and not watch.changed:
                # Something was written between the last read and the start of the watch.
                outcome = await self._read_place(connection, claim, own, until, watch.start_revision)
                if not isinstance(outcome, Waiting) or own.blocked_by != blocked_by:
                    return outcome
            await self._wait_for(connection, event, until, watch)
            if watch.changed:
                return await self._read_place(connection, claim, own, until, watch.changed)
        finally:
            if watch is not None:
                connection.watches.cancel(watch)
            self._client.give_back(connection)
        if watch.broken and not watch.compacted and connection.usable:
            await self._runtime.sleep(max(0.0, min(until - self._runtime.now(), REFUSED_PAUSE)))
        return None

    @staticmethod
    def _start_watch(connection: EtcdConnection, claim: Claim, own: OwnClaim, event: Event) -> Watch:
        """Watch what blocks a claim. A reader or permit is also admitted when a writer ahead is downgraded: a put."""
        by, start = own.blocked_by, connection.watches.start
        if len(by) == 1:
            return start(by[0], event.set, puts=claim.shared)
        return start(own.queue, event.set, end=m.prefix_end(own.queue), keys=frozenset(by), puts=claim.shared)

    async def _wait_for(
        self, connection: EtcdConnection, event: Event, until: float, watch: Watch, *, started: bool = False
    ) -> None:
        """Wait until a watch reports a change, is broken, or, with `started`, has started."""
        try:
            while not (watch.changed or watch.broken or (started and watch.start_revision is not None)):
                left = until - self._runtime.now()
                if left <= 0 or not connection.raw.open:
                    break
                await self._runtime.wait_for_push([connection.raw], event, left)
                event.clear()
        except BaseException:
            if not self._runtime.shares_connections:
                connection.raw.close()  # the thread may have been interrupted between any two bytes
            raise

    async def _read_place(
        self, connection: EtcdConnection, claim: Claim, own: OwnClaim, until: float, at: int
    ) -> Grant | Waiting | None:
        """Read the claim's place in the queue at a revision or later; None if it is not in the queue, or without a reply.

        The member that has reported the revision may answer alone: a claim that has left never comes back, so the claims
        ahead that are gone stay gone. Of our own claim the reply shows only that it existed; its session is alive by our
        clock, and if somebody deletes the key, its watch reports it. A majority would have to wait for its disks, between
        every two holders.
        """
        self._client.check_open()
        body = m.serializable(_queue_request(claim, own, own.create_revision))
        sent = self._runtime.now()
        timeout = min(timeout_for(claim.ttl), max(0.0, until - sent) + MIN_REPLY_TIMEOUT)
        try:
            header, found = m.read_range(await connection.call(m.RANGE, body, timeout))
        except OutcomeUnknown:
            self._client.report_silence(connection, sent)
            return None
        except RpcError:
            return None  # the next attempt reports it, or asks another member
        if header.revision < at or header.cluster != self._client.cluster:
            return None
        return await self._decide(claim, own, found.pairs, header, enqueue=True)

    # ------------------------------------------------------------------ downgrade

    async def downgrade(self, grant: Grant) -> Grant:
        """Make an exclusive claim a shared one, in place; readers behind it see the put."""
        own: OwnClaim = grant.engine_state
        session, data = own.session, own.data
        if session is None or data is None or not self._claims.holds(own):
            raise not_held(grant)
        shared = data._replace(mode=Mode.SHARED, granted=data.granted or own.grant_time)
        own.data = shared  # before the request, which may run even if its reply is lost
        await self._releaser.remove_expired_of(session)
        put = m.do_put(own.key, shared.encode(), session.handle)
        body = m.txn([m.is_created_at(own.key, own.create_revision)], [put])
        try:
            reply, _ = await self._sessions.request(
                session, m.TXN, body, m.read_txn, timeout_for(session.ttl), keep_alive=True
            )
        except LeaseNotFound as error:
            self._sessions.report_gone(session)
            raise not_held(grant) from error
        if not reply.succeeded:
            self._claims.deleted(own.id)
            raise not_held(grant)
        session.extend(own.id, self._runtime.now(), session.ttl)
        return grant.downgraded(max(grant.since, session.since))


def _queue_request(claim: Claim, own: OwnClaim, until: int) -> bytes:
    """Return the request for the queue up to a claim: an exclusive one needs itself and the last claim ahead of it."""
    if claim.mode is Mode.EXCLUSIVE:
        return m.get_prefix(own.queue, order=m.DESCENDING, limit=2, keys_only=True, until=until)
    return m.get_prefix(own.queue, until=until)
