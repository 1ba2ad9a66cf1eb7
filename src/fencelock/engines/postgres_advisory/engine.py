"""PostgreSQL, advisory: the server's own locks, each on a session that the server ends when it is idle for the ttl.

Advisory locks are re-entrant within a session, so every lease and every waiter has a session of its own. A waiter's statement
blocks in the server and stays open over many calls of `wait`: a new statement would lose its position in the queue.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from fencelock.core.clock import NO_DEADLINE, Deadline
from fencelock.core.engine import MAX_REPLY_TIMEOUT, limit_of, reply_timeout
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.connection import MAX_REGISTERED, PostgresConnection
from fencelock.engines.postgres.errors import ServerError, translate
from fencelock.engines.postgres.pool import PostgresPool
from fencelock.engines.postgres.records import PostgresRecords
from fencelock.engines.postgres.schema import ADVISORY_SINCE
from fencelock.engines.postgres.url import PostgresUrl
from fencelock.engines.postgres_advisory import statements as sql
from fencelock.engines.postgres_advisory.inspect import Inspector
from fencelock.engines.postgres_advisory.session import SHORTEST_REPLY_TIMEOUT, AdvisorySession
from fencelock.engines.postgres_advisory.sessions import AdvisorySessions
from fencelock.errors import EngineUnavailable, FencelockError, GuaranteeUnavailable, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Snapshot, TokenGuarantee, Traits, Waiting

TRAITS = Traits(
    engine="postgresql+advisory",
    guarantee=TokenGuarantee.DURABLE,
    fair=True,
    loss_pushed=False,
    limit=False,
    session=True,
)

ABANDONED_PAUSE = 0.05
CHECK_SECONDS = 5.0
"""How often, at most, a waiter checks that the server still has its session: a dead connection is not always reported."""


class AdvisoryEngine:
    """`fencelock.core.engine.Engine` on advisory locks."""

    def __init__(self, runtime: Runtime, url: PostgresUrl, namespace: str) -> None:
        self._runtime = runtime
        self._namespace = namespace
        self._pool = PostgresPool(runtime, url, self._begin_session)
        self.records = PostgresRecords(self._pool, namespace)
        self._sessions = AdvisorySessions(runtime, self._pool)
        self._inspector = Inspector(self._pool, namespace)
        self._abandoned: dict[str, None] = {}
        """Claims that were abandoned while another caller still waited for them."""
        self._contended: set[int] = set()
        """Keys that were held at the last attempt: LOCK_WAIT takes them in one round trip; on a free key it costs more."""

    @property
    def traits(self) -> Traits:
        """What the engine promises with the server's settings."""
        return TRAITS.weakened(self._pool.weakness)

    async def learn_traits(self, patience: float | None) -> None:
        """Connect, unless this client was connected before, to read the server's settings."""
        await self._pool.learn_settings(limit_of(self._runtime.now, patience, met=False))

    # ------------------------------------------------------------------ acquiring

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Waiting:
        """Try to take the lock; if it is held, make the server's session wait for it."""
        if claim.limit is not None:
            raise GuaranteeUnavailable(
                f"{claim.name!r}: {TRAITS.engine} has readers and writers but no permits; use postgresql://", claim.name
            )
        if claim.id in self._abandoned:
            self._pool.check_open()
            return Waiting(claim, self._runtime.now())
        deadline = limit_of(self._runtime.now, patience, met=self._pool.connected)
        session = self._sessions.get(claim.id)
        if session is not None:
            outcome = await self._attempt_again(session, queue, patience)
            if outcome is not None:
                return outcome
        if len(self._sessions) >= self._sessions.sweep_at:
            self._sessions.sweep()
        connection = await self._pool.borrow(deadline)
        key = sql.key(self._namespace, claim.name)
        session = self._sessions[claim.id] = AdvisorySession(self._runtime, claim, key, connection)
        session.try_take()
        try:
            timeout = reply_timeout(claim.ttl, SHORTEST_REPLY_TIMEOUT, patience)
            return await self._first_attempt(session, queue, timeout)
        finally:
            session.give()

    async def _first_attempt(self, session: AdvisorySession, queue: bool, timeout: float) -> Grant | Waiting:
        claim, connection = session.claim, session.connection
        sent = session.sent = self._runtime.now()
        try:
            if not connection.is_registered(claim.owner, session.key):
                params = (session.key, self._namespace, claim.name, claim.owner)
                await connection.request(sql.REGISTER, params, timeout, keep=True)
                connection.set_registered(claim.owner, session.key)
                sent = session.sent = self._runtime.now()
            # With `keep`, `abandon` can read the reply after an interrupt: a new session would cost more.
            token = None
            if not queue or session.key not in self._contended:
                lock_params = (session.key, sql.ms(claim.ttl), claim.shared, queue)
                ((token, _),) = await connection.request(sql.TRY_LOCK, lock_params, timeout, keep=True)
            if token is None and queue:
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
        if queue:
            if len(self._contended) >= MAX_REGISTERED:
                self._contended.clear()
            self._contended.add(session.key)
            session.enqueued, session.sent = True, self._runtime.now()
            connection.send(sql.LOCK_WAIT, (session.key, sql.ms(claim.ttl), claim.shared))
        else:
            self._sessions.pop(claim.id, None)
            self._pool.keep(connection)
        return Waiting(claim, sent)

    async def _attempt_again(
        self, session: AdvisorySession, queue: bool, patience: float | None
    ) -> Grant | Waiting | None:
        """Repeat an attempt on the claim's own session; return None if the session has ended."""
        claim = session.claim
        deadline = limit_of(self._runtime.now, patience)
        timeout = reply_timeout(claim.ttl, SHORTEST_REPLY_TIMEOUT, patience)
        if not await session.take(timeout):
            raise OutcomeUnknown(f"{self._pool.address}: no answer on the session of {claim.name!r}")
        try:
            if not self._sessions.is_current(session):
                return None
            if session.token is None:
                sent = self._runtime.now()
                rows = await self._pool.run(sql.GRANTED, (session.connection.pid,), timeout, deadline=deadline)
                grant = await self._read_grant(session, timeout if rows == [(b"t",)] else 0.0)
                if grant is None and not queue:
                    await self._sessions.withdraw(session, deadline)
                return grant or Waiting(claim, sent)
            sent = self._runtime.now()
            self._sessions.send_ping(session)
            if await self._sessions.read_ping(session, sent + timeout) is Renewal.RENEWED:
                session.sent = sent
                return Grant(claim, session.token, sent)
        except OutcomeUnknown:
            pass
        finally:
            session.give()
        self._sessions.drop(session)
        return None

    # ------------------------------------------------------------------ waiting

    async def wait(self, waiting: Waiting, timeout: float, patience: float | None = None) -> Grant | Waiting:
        """Wait for the reply to LOCK_WAIT; the session stays in the server's queue after the timeout."""
        claim = waiting.claim
        until = None if patience is None else self._runtime.now() + patience
        if claim.id in self._abandoned:
            await self._runtime.sleep(min(timeout, ABANDONED_PAUSE))
        session = self._sessions.get(claim.id)
        if session is not None and session.token is None and await session.take(timeout):
            try:
                if self._sessions.is_current(session):
                    grant = await self._read_grant(session, timeout, limit_of(self._runtime.now, patience))
                    # Bound the check even for a caller without a timeout: a hung server must not delay it for ever.
                    left = session.patience if until is None else until - self._runtime.now()
                    if grant is not None or await self._is_enqueued(session, limit_of(self._runtime.now, left)):
                        return grant or waiting
                    self._sessions.drop(session)
            except OutcomeUnknown:
                self._sessions.drop(session)  # the server ended the session and with it the claim: enqueue again
            finally:
                session.give()
        return await self.attempt(claim, queue=True, patience=None if until is None else until - self._runtime.now())

    async def _is_enqueued(self, session: AdvisorySession, deadline: Deadline) -> bool:
        """Return whether the server still has the session, as far as is known; ask only now and then."""
        claim, now = session.claim, self._runtime.now()
        if now - session.checked_at < max(CHECK_SECONDS, claim.ttl / 3) or claim.id in self._abandoned:
            return True
        try:
            timeout = deadline.at_most(session.patience)
            rows = await self._pool.run(sql.GRANTED, (session.connection.pid,), timeout, deadline=deadline)
        except EngineUnavailable:
            return True  # there may be no other connection, which says nothing about this session
        session.checked_at = now
        return rows != [(None,)]

    async def _read_grant(
        self, session: AdvisorySession, timeout: float, deadline: Deadline = NO_DEADLINE
    ) -> Grant | None:
        """Wait for the reply to LOCK_WAIT; return None if it is still pending."""
        connection, claim = session.connection, session.claim
        try:
            ((token, waited),) = await connection.read_reply(timeout, keep=True)
            session.token = int(token or 0)
            if waited != b"t":
                self._contended.discard(session.key)
            if self._runtime.now() - session.sent > claim.ttl / 3:
                # The ttl runs since the server granted the lock, at an unknown time: check that the session still lives.
                session.sent = self._runtime.now()
                await connection.request(sql.PING, (), deadline.at_most(session.patience))
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
        deadline = limit_of(self._runtime.now, 0.0)
        session = self._sessions.get(claim.id)
        if session is not None:
            timeout = deadline.at_most(session.patience)
            if session.try_take():
                session.give()
            else:
                # Another caller waits on the session while the client closes: cancel its statement.
                self._abandoned[claim.id] = None
                await self._pool.run(sql.CANCEL, (session.connection.pid,), timeout, deadline=deadline)
            if await session.take(deadline.at_most(session.patience)):
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
        pinged: list[AdvisorySession | None] = []
        unknown: list[AdvisorySession] = []
        renewals = [Renewal.LOST] * len(grants)
        try:
            for index, grant in enumerate(grants):
                session = self._sessions.get(grant.claim.id)
                taken = session is not None and session.token is not None and self._sessions.try_take(session)
                if taken and session is not None:
                    self._sessions.send_ping(session)
                if session is not None and not taken:
                    renewals[index] = Renewal.UNKNOWN  # another caller releases it, or still takes it
                pinged.append(session if taken else None)
            for index, session in enumerate(pinged):
                if session is not None:
                    renewals[index] = await self._sessions.read_ping(session, until)
                    if renewals[index] is Renewal.UNKNOWN:
                        unknown.append(session)
        finally:
            for session in pinged:
                if session is not None:
                    session.give()
        if unknown:
            # In the background: the other leases of this batch must not wait for it.
            with suppress(RuntimeError):  # no more threads: the next renewal tries again
                self._runtime.spawn(self._drop_ended(unknown), "fencelock-lookup")
        return renewals

    async def _drop_ended(self, sessions: list[AdvisorySession]) -> None:
        """Check over another connection which sessions still have their locks; the next renewal reports the others as lost.

        A firewall that dropped a connection swallows the pings, and the server's message that it ended the session.
        """
        timeout = min(session.patience for session in sessions)
        pids = ",".join(str(session.connection.pid) for session in sessions)
        with suppress(FencelockError):  # nothing is known; the next renewal checks again
            deadline = Deadline(self._runtime.now, timeout)
            rows = await self._pool.run(sql.HELD_LOCKS, (f"{{{pids}}}",), timeout, deadline=deadline)
            for session in sessions:
                if (str(session.connection.pid).encode(), str(session.key).encode()) not in rows:
                    self._sessions.drop_ended(session)

    async def release(self, grant: Grant) -> bool:
        """Release the lock, and give the session back to the pool. Return False if this grant no longer held it."""
        claim = grant.claim
        session = self._sessions.get(claim.id)
        if session is None or session.token is None:
            return False
        if not await session.take(session.patience):
            raise OutcomeUnknown(f"{self._pool.address}: no answer on the session of {claim.name!r}", claim.name)
        try:
            if not self._sessions.is_current(session):
                return False
            return await self._sessions.unlock(session)
        finally:
            session.give()

    # ------------------------------------------------------------------ inspecting and closing

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        return await self._inspector.inspect(name)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that were in use at the time of the call."""
        for name in await self._inspector.names(prefix):
            yield name

    async def force_release(self, name: str) -> int:
        """Terminate the sessions of the holders; return how many."""
        return await self._inspector.force_release(name)

    async def close(self) -> None:
        """Close all sessions; the server then releases their locks."""
        self._pool.close()
        for session in list(self._sessions.values()):
            if session.try_take():
                self._sessions.drop(session)

    def before_fork(self) -> None:
        """Do nothing: the parent needs nothing closed."""

    def after_fork(self, *, child: bool) -> None:
        """In the child, close the parent's connections without sending anything on them."""
        if child:
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
