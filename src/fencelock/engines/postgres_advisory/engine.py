"""PostgreSQL, advisory: the server's own locks, each on a session that the server ends when it is idle for the ttl.

Advisory locks are re-entrant within a session, so every lease and every waiter has a session of its own. A waiter's statement
blocks in the server and stays open over many calls of `wait`: a new statement would lose its position in the queue.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from fencelock.core.clock import Deadline
from fencelock.core.engine import MAX_REPLY_TIMEOUT, MIN_REPLY_TIMEOUT, not_held, reply_timeout
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.connection import PostgresConnection
from fencelock.engines.postgres.errors import ServerError, translate
from fencelock.engines.postgres.pool import PostgresPool
from fencelock.engines.postgres.rates import PostgresRates
from fencelock.engines.postgres.records import PostgresRecords
from fencelock.engines.postgres.schema import ADVISORY_SINCE
from fencelock.engines.postgres.snapshot import decode_text, encode_value, read_snapshot
from fencelock.engines.postgres.url import PostgresUrl
from fencelock.engines.postgres_advisory import statements as sql
from fencelock.engines.postgres_advisory.session import SHORTEST_REPLY_TIMEOUT, AdvisorySession
from fencelock.engines.postgres_advisory.sessions import AdvisorySessions
from fencelock.errors import EngineUnavailable, GuaranteeUnavailable, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Snapshot, TokenGuarantee, Traits, Waiting

TRAITS = Traits(
    engine="postgresql+advisory",
    guarantee=TokenGuarantee.DURABLE,
    fair=True,
    loss_pushed=False,
    permits=False,
    session=True,
)

ABANDONED_PAUSE = 0.05
ENQUEUE_SECONDS = 5.0
"""How long a session that has just sent LOCK_WAIT may be missing in pg_locks."""


class AdvisoryEngine:
    """`fencelock.core.engine.Engine` on advisory locks."""

    def __init__(self, runtime: Runtime, url: PostgresUrl, namespace: str) -> None:
        self._runtime = runtime
        self._namespace = namespace
        self._pool = PostgresPool(runtime, url, self._begin_session)
        self.records = PostgresRecords(self._pool, namespace)
        self.rates = PostgresRates(self._pool, namespace)
        self._sessions = AdvisorySessions(runtime, self._pool)
        self._abandoned: dict[str, None] = {}
        """Claims that were abandoned while another caller still waited for them."""

    @property
    def traits(self) -> Traits:
        """What the engine promises with the server's settings."""
        return TRAITS.weakened(self._pool.weakness)

    async def learn_traits(self, deadline: Deadline) -> None:
        """Connect, unless this client was connected before, to read the server's settings."""
        await self._pool.learn_settings(deadline)

    # ------------------------------------------------------------------ acquiring

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Try to take the lock; if it is held, make the server's session wait for it."""
        if claim.limit is not None:
            raise GuaranteeUnavailable(
                f"{claim.name!r}: {TRAITS.engine} has readers and writers but no permits; use postgresql://", claim.name
            )
        if claim.id in self._abandoned:
            self._pool.check_open()
            return Waiting(claim, self._runtime.now())
        session = self._sessions.get(claim.id)
        if session is not None:
            outcome = await self._attempt_again(session, enqueue, deadline)
            if outcome is not None:
                return outcome
        connection = await self._pool.borrow(deadline)
        key = sql.key(self._namespace, claim.name)
        session = AdvisorySession(self._runtime, claim, key, connection)
        self._sessions.add(session)
        try:
            return await self._first_attempt(session, enqueue, deadline.at_most(session.reply_timeout))
        finally:
            session.give()

    async def _first_attempt(self, session: AdvisorySession, enqueue: bool, timeout: float) -> Grant | Waiting:
        claim, connection = session.claim, session.connection
        sent = session.sent = self._runtime.now()
        label = (claim.owner, encode_value(claim.value))
        try:
            if not connection.is_registered(label, session.key):
                params = (session.key, self._namespace, claim.name, *label)
                await connection.request(sql.REGISTER, params, timeout, keep=True)
                connection.set_registered(label, session.key)
                sent = session.sent = self._runtime.now()
            # With `keep`, `abandon` can read the reply after an interrupt: a new session would cost more.
            lock_params = (session.key, sql.ms(claim.ttl), claim.shared, enqueue)
            ((token, _),) = await connection.request(sql.TRY_LOCK, lock_params, timeout, keep=True)
            if token is None and enqueue:
                await connection.prepare(sql.LOCK_WAIT, timeout, keep=True)
        except ServerError as error:
            self._sessions.drop(session)
            if claim.id in self._abandoned:
                return Waiting(claim, sent)  # `abandon` cancelled the statement
            raise translate(error, self._pool.address) from error
        except OutcomeUnknown:
            self._sessions.pop(claim.id, None)
            self._sessions.orphan(session)
            raise
        if token is not None:
            session.token = int(token)
            return Grant(claim, session.token, sent)
        if enqueue:
            session.enqueued, session.sent = True, self._runtime.now()
            connection.send(sql.LOCK_WAIT, (session.key, sql.ms(claim.ttl), claim.shared))
        else:
            self._sessions.pop(claim.id, None)
            self._pool.keep(connection)
        return Waiting(claim, sent)

    async def _attempt_again(
        self, session: AdvisorySession, enqueue: bool, deadline: Deadline
    ) -> Grant | Waiting | None:
        """Find the result of an earlier attempt on the claim's own session; return None if the session has ended."""
        claim = session.claim
        timeout = deadline.at_most(session.reply_timeout)
        if not await session.take(timeout):
            raise OutcomeUnknown(f"{self._pool.address}: no answer on the session of {claim.name!r}")
        try:
            if not self._sessions.is_current(session):
                return None
            if session.token is None:
                return await self._check_queued(session, enqueue, deadline)
            sent = self._runtime.now()
            self._sessions.send_ping(session)
            if await self._sessions.read_ping(session, sent + timeout) is Renewal.RENEWED:
                session.sent = sent
                return Grant(claim, session.token, sent)
        except OutcomeUnknown:
            pass  # the server ended the session, and the claim with it
        finally:
            session.give()
        self._sessions.drop(session)
        return None

    async def _check_queued(
        self, session: AdvisorySession, enqueue: bool, deadline: Deadline
    ) -> Grant | Waiting | None:
        """Return the grant if the server has granted the lock; return None if it no longer has the session.

        The server is asked over another connection: a dead connection is not always reported.
        """
        claim, now = session.claim, self._runtime.now()
        timeout = deadline.at_most(session.reply_timeout)
        granted: bytes | None = b"f"
        with suppress(EngineUnavailable):  # there may be no other connection, which says nothing about this session
            ((granted,),) = await self._pool.run(sql.GRANTED, (session.connection.pid,), timeout, deadline=deadline)
        grant = await self._read_grant(session, timeout if granted == b"t" else 0.0)
        if grant is not None:
            return grant
        if granted is None and now - session.sent > ENQUEUE_SECONDS:
            self._sessions.drop(session)
            return None
        if not enqueue:
            await self._sessions.withdraw(session, deadline)
        return Waiting(claim, now)

    # ------------------------------------------------------------------ waiting

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Wait for the reply to LOCK_WAIT; the session stays in the server's queue after the timeout."""
        claim, until = waiting.claim, self._runtime.now() + timeout
        if claim.id in self._abandoned:
            await self._runtime.sleep(min(timeout, ABANDONED_PAUSE))
            return None
        session = self._sessions.get(claim.id)
        if session is None or session.token is not None or not await session.take(timeout):
            return None
        try:
            if not self._sessions.is_current(session):
                return None
            return await self._read_grant(session, until - self._runtime.now())
        except OutcomeUnknown:
            self._sessions.drop(session)  # the server ended the session, and the claim with it: enqueue again
            return None
        finally:
            session.give()

    async def _read_grant(self, session: AdvisorySession, timeout: float) -> Grant | None:
        """Wait for the reply to LOCK_WAIT; return None if it is still pending. Raise OutcomeUnknown if the session ended."""
        connection, claim = session.connection, session.claim
        try:
            ((token,),) = await connection.read_reply(timeout, keep=True)
            session.token = int(token or 0)
            if self._runtime.now() - session.sent > claim.ttl / 3:
                # The ttl runs since the server granted the lock, at an unknown time: check that the session still lives.
                session.sent = self._runtime.now()
                await connection.request(sql.PING, (), MIN_REPLY_TIMEOUT, keep=True)
        except OutcomeUnknown:
            if connection.open:
                return None
            raise
        except ServerError as error:
            if claim.id in self._abandoned:
                return None  # `abandon` cancelled the statement, and waits for the session's turn
            self._sessions.drop(session)
            raise translate(error, self._pool.address) from error
        return Grant(claim, session.token, session.sent)

    async def abandon(self, claim: Claim) -> None:
        """Leave the server's queue, or release the lock, and terminate sessions that may still get it. Safe to repeat."""
        deadline = Deadline(self._runtime.now, MIN_REPLY_TIMEOUT)
        session = self._sessions.get(claim.id)
        if session is not None:
            taken = session.try_take()
            if not taken:
                # Another caller waits on the session while the client closes: cancel its statement.
                self._abandoned[claim.id] = None
                await self._pool.run(
                    sql.CANCEL, (session.connection.pid,), deadline.at_most(session.reply_timeout), deadline=deadline
                )
                taken = await session.take(deadline.at_most(session.reply_timeout))
            if taken:
                try:
                    if self._sessions.is_current(session):
                        await self._sessions.withdraw(session, deadline)
                finally:
                    session.give()
            else:
                # The other caller keeps the turn, or was interrupted just before it gave it back.
                self._sessions.hang_up(session)
        await self._sessions.terminate_orphans(claim, deadline)

    # ------------------------------------------------------------------ renewing and releasing

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Ping all sessions at once: a ping shows that a session lives, and restarts its idle time."""
        until = self._runtime.now() + reply_timeout(min(grant.claim.ttl for grant in grants), SHORTEST_REPLY_TIMEOUT)
        pinged: list[tuple[int, AdvisorySession]] = []
        renewals = [Renewal.LOST] * len(grants)
        try:
            for index, grant in enumerate(grants):
                session = self._sessions.get(grant.claim.id)
                if session is None:
                    continue
                if session.token is not None and self._sessions.try_take(session):
                    pinged.append((index, session))
                    self._sessions.send_ping(session)
                else:
                    renewals[index] = Renewal.UNKNOWN  # another caller releases it, or still takes it
            for index, session in pinged:
                renewals[index] = await self._sessions.read_ping(session, until)
        finally:
            for _, session in pinged:
                session.give()
        self._sessions.drop_ended([session for index, session in pinged if renewals[index] is Renewal.UNKNOWN])
        return renewals

    async def release(self, grant: Grant) -> bool:
        """Release the lock, and give the session back to the pool. Return False if this grant no longer held it."""
        claim = grant.claim
        session = self._sessions.get(claim.id)
        if session is None or session.token is None:
            return False
        if not await session.take(session.reply_timeout):
            raise OutcomeUnknown(f"{self._pool.address}: no answer on the session of {claim.name!r}", claim.name)
        try:
            if not self._sessions.is_current(session):
                return False
            return await self._sessions.unlock(session)
        finally:
            session.give()

    async def downgrade(self, grant: Grant) -> Grant:
        """Take the lock in shared mode and release the exclusive one, in one statement on the session."""
        claim, sent = grant.claim, self._runtime.now()
        session = self._sessions.get(claim.id)
        if session is None or session.token is None:
            raise not_held(grant)
        if not await session.take(session.reply_timeout):
            raise OutcomeUnknown(f"{self._pool.address}: no answer on the session of {claim.name!r}", claim.name)
        connection = session.connection
        try:
            if not self._sessions.is_current(session):
                raise not_held(grant)
            await connection.drain(session.reply_timeout, keep=True)
            if await connection.request(sql.DOWNGRADE, (session.key,), session.reply_timeout, keep=True) == [(b"t",)]:
                return grant.downgraded(sent)
        except ServerError as error:
            raise translate(error, self._pool.address) from error
        except OutcomeUnknown:
            if connection.open:
                raise
        finally:
            session.give()
        # The server ended the session, and the lock with it; the next renewal notices that, too.
        raise not_held(grant)

    # ------------------------------------------------------------------ inspecting and closing

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name, from the server's table of locks."""
        rows = await self._pool.run(sql.INSPECT, (sql.key(self._namespace, name),))
        return read_snapshot(name, rows)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that were in use at the time of the call."""
        for (name,) in await self._pool.run(sql.NAMES, (self._namespace, prefix)):
            yield decode_text(name)

    async def force_release(self, name: str) -> int:
        """Terminate the sessions of the holders; return how many. It runs once: a second run would drop the next holder."""
        key = sql.key(self._namespace, name)
        ((dropped,),) = await self._pool.run(sql.TERMINATE_HOLDERS, (key,), 2 * MAX_REPLY_TIMEOUT, repeat=False)
        return int(dropped or 0)

    async def close(self) -> None:
        """Close all sessions; the server then releases their locks."""
        self._pool.close()
        for session in list(self._sessions.values()):
            if session.try_take():
                self._sessions.drop(session)

    def after_fork(self) -> None:
        """Close the parent's connections without sending anything on them."""
        self._sessions.detach_after_fork()
        self._abandoned.clear()
        self._pool.detach_after_fork()

    async def _begin_session(self, connection: PostgresConnection) -> None:
        """Refuse a server that cannot keep a ttl, and a pooler, which would give the session to others."""
        if connection.version < ADVISORY_SINCE:
            raise EngineUnavailable(
                f"{self._pool.address}: advisory locks need PostgreSQL 14 or later; use postgresql://"
            )
        if not connection.direct:
            raise EngineUnavailable(
                f"{self._pool.address}: there is a pooler between, and advisory locks belong to a session; connect to the "
                "server itself, or use postgresql://, which works behind a pooler"
            )
        try:
            await connection.request(sql.BEGIN_SESSION, (), MAX_REPLY_TIMEOUT)
        except ServerError as error:
            raise translate(error, self._pool.address) from error
