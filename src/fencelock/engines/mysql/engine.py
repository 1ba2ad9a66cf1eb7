"""The engine for MySQL and MariaDB: GET_LOCK, in a session per claim that the server ends after a ttl of silence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fencelock.core.clock import Deadline
from fencelock.core.engine import MIN_REPLY_TIMEOUT
from fencelock.core.rates import RecordRates
from fencelock.core.runtime import Runtime
from fencelock.engines.mysql import statements as sql
from fencelock.engines.mysql.connection import MySQLConnection
from fencelock.engines.mysql.inspect import Administration
from fencelock.engines.mysql.packets import Rows
from fencelock.engines.mysql.pool import MySQLPool
from fencelock.engines.mysql.records import MySQLRecords
from fencelock.engines.mysql.session import MIN_TIMEOUT, MySQLSession, MySQLSessions, Stage
from fencelock.engines.mysql.url import MySQLUrl
from fencelock.errors import EngineUnavailable, GuaranteeUnavailable, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, TokenGuarantee, Traits, Waiting

if TYPE_CHECKING:
    from fencelock.core.adopted_client import AdoptedClient

TRAITS = Traits(
    engine="mysql",
    guarantee=TokenGuarantee.DURABLE,
    fair=True,
    loss_pushed=False,
    readers=False,
    permits=False,
    session=True,
    ttl_min=1.0,
)

ABANDONED_PAUSE = 0.02
"""Seconds that the caller of an abandoned claim waits between its attempts."""
MAX_ABANDONED = 1000


class MySQLEngine(Administration):
    """`fencelock.core.engine.Engine` on one MySQL or MariaDB server."""

    def __init__(
        self, runtime: Runtime, server: MySQLUrl | AdoptedClient[MySQLUrl], namespace: str, url: str | None = None
    ) -> None:
        self.url = url
        """The URL of an adopted client, without a password; None if the client was opened with a URL."""
        self._runtime = runtime
        self._pool = MySQLPool(runtime, server, namespace)
        self.records = MySQLRecords(self._pool)
        self.rates = RecordRates(runtime, self.records, self.records.clock)
        self._sessions = MySQLSessions(runtime, self._pool)
        self._abandoned: dict[str, None] = {}
        """Ids of abandoned claims. close() abandons claims whose callers still attempt: those must not get the lock."""

    @property
    def traits(self) -> Traits:
        """What the engine promises, as the server is configured."""
        return TRAITS.weakened(self._pool.weakness)

    async def learn_traits(self, deadline: Deadline) -> None:
        """Connect, unless this client has connected before, to read the server's settings."""
        self._pool.check_open()
        await self._pool.names(deadline)

    # ------------------------------------------------------------------ attempt

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Acquire the lock if it is free; else, with `enqueue`, send a statement that waits for it."""
        if claim.shared:
            raise GuaranteeUnavailable(f"{claim.name!r}: GET_LOCK has neither readers nor permits", claim.name)
        self._pool.check_open()
        if claim.id in self._abandoned:
            return Waiting(claim, self._runtime.now())
        session = self._sessions.get(claim.id)
        if session is not None:
            outcome = await self._resume(session, enqueue, deadline)
            if outcome is not None:
                return outcome
        for connect in (self._pool.get, self._pool.connect):  # a pooled connection may be broken, then a new one helps
            outcome = await self._try_lock(claim, await connect(int(claim.ttl), deadline), enqueue, deadline)
            if outcome is not None:
                return outcome
        raise OutcomeUnknown(f"{self._pool.address}: the connection broke before the reply came")

    async def _try_lock(
        self, claim: Claim, connection: MySQLConnection, enqueue: bool, deadline: Deadline
    ) -> Grant | Waiting | None:
        """Attempt on this connection; None if it was broken, and the claim has nothing on the server."""
        names, ttl = await self._pool.names(), int(claim.ttl)
        claim = claim._replace(ttl=float(ttl))
        statements = sql.LockStatements(claim, names.key(claim.name), names.space)
        session = MySQLSession(self._runtime, claim, connection, statements)
        self._sessions.add(session)
        # Checked after the session was added: either abandon() finds the session, or this line finds the claim.
        if claim.id in self._abandoned:
            self._sessions.finish(session)
            return Waiting(claim, self._runtime.now())
        try:
            batch = statements.try_lock()
            if connection.ttl != ttl:
                batch = [sql.set_ttl(ttl), *batch]
                connection.ttl = ttl
            session.replies = connection.send(batch)
            return await self._read_try(session, enqueue, deadline)
        finally:
            session.give()

    async def _read_try(self, session: MySQLSession, enqueue: bool, deadline: Deadline) -> Grant | Waiting | None:
        """Read the reply to a try; enqueue the claim if another session holds the lock. None if the connection broke."""
        timeout = deadline.at_most(session.reply_timeout)
        if not await session.connection.receive(session.replies, timeout):
            if session.connection.open:
                raise OutcomeUnknown(f"{self._pool.address}: no reply within {timeout:.3g} s")
            await self._sessions.end(session, deadline)
            return None
        if await self._sessions.read_token(session):
            return session.grant(session.sent_at)
        if enqueue:
            self._sessions.enqueue(session, deadline)
        else:
            self._sessions.finish(session)
        return session.waiting()

    async def _resume(self, session: MySQLSession, enqueue: bool, deadline: Deadline) -> Grant | Waiting | None:
        """Continue an earlier attempt of the same claim; None if it left nothing on the server."""
        if not await session.take(deadline.at_most(session.reply_timeout)):
            raise OutcomeUnknown(f"{self._pool.address}: an earlier attempt has no reply yet")
        try:
            if not self._sessions.is_current(session):
                return None
            if session.stage is Stage.TRYING:
                return await self._read_try(session, enqueue, deadline)
            outcome: Grant | Waiting | None = None
            if not session.connection.open:
                pass  # the server has ended the session, or does so when it notices
            elif session.stage is Stage.HELD:
                outcome = await self._sessions.confirm(session, deadline)
            elif await session.connection.receive(session.replies, 0.0):
                outcome = await self._finish_wait(session, deadline)
            elif await self._is_enqueued(session, deadline):
                outcome = session.waiting()
            if outcome is None or (isinstance(outcome, Waiting) and not enqueue):
                await self._sessions.end(session, deadline)
            return outcome
        finally:
            session.give()

    # ------------------------------------------------------------------ wait

    async def wait(self, waiting: Waiting, timeout: float) -> None:
        """Wait for the reply to the GET_LOCK that the attempt has sent; the next attempt reads it."""
        if waiting.claim.id in self._abandoned:
            await self._runtime.sleep(min(timeout, ABANDONED_PAUSE))
            return
        session = self._sessions.get(waiting.claim.id)
        quarter = waiting.claim.ttl / 4
        if timeout > quarter:  # spread the lookups of the next attempts: many waiters may have started together
            timeout = quarter + self._runtime.random() * (timeout - quarter)
        until = self._runtime.now() + timeout
        if session is not None and session.stage is Stage.WAITING and await session.take(timeout):
            try:
                if self._sessions.is_current(session):
                    await session.connection.receive(session.replies, until - self._runtime.now())
            finally:
                session.give()

    async def _is_enqueued(self, session: MySQLSession, deadline: Deadline) -> bool:
        """Return whether the server still has the session of a waiter; looked up every quarter of the ttl.

        Without the lookup, a waiter whose connection died silently, or whose server hangs, would wait forever.
        """
        now = self._runtime.now()
        if now - session.checked_at >= session.claim.ttl / 4:
            if not await self._pool.session_exists(session.connection, session.reply_timeout, deadline):
                return False
            session.checked_at = now
        return True

    async def _finish_wait(self, session: MySQLSession, deadline: Deadline) -> Grant | Waiting | None:
        """Read the reply to a wait; None if the session got the lock and has lost it again."""
        locked = session.replies[0].value
        try:
            token = await self._sessions.read_token(session)
        except OutcomeUnknown:
            if session.connection.open:
                raise
            return None  # the session ended after it got the lock: this process was stopped for longer than the ttl
        if token:
            # The server counts the ttl from the grant, which may have been long before this process read the reply.
            if self._runtime.now() - session.sent_at <= session.claim.ttl / 3:
                return session.grant(session.sent_at)
            return await self._sessions.confirm(session, deadline)
        if isinstance(locked, Rows) and locked.rows == [(b"0",)]:  # GET_LOCK timed out
            self._sessions.enqueue(session, deadline)
            return session.waiting()
        # GET_LOCK returned NULL: the statement was killed, deadlocked, or out of memory. That is never a grant.
        await self._sessions.end(session, deadline)
        raise EngineUnavailable(f"{self._pool.address} interrupted the wait: GET_LOCK returned NULL")

    async def abandon(self, claim: Claim) -> None:
        """Remove the claim from the queue, or release it if it was granted. Safe to repeat."""
        if len(self._abandoned) >= MAX_ABANDONED:
            for id in list(self._abandoned)[: MAX_ABANDONED // 2]:
                self._abandoned.pop(id, None)
        self._abandoned[claim.id] = None
        session = self._sessions.get(claim.id)
        if session is None:
            return
        deadline = Deadline(self._runtime.now, MIN_REPLY_TIMEOUT)
        if session.stage is Stage.HELD and await session.take(deadline.at_most(session.reply_timeout)):
            try:
                if not self._sessions.is_current(session):
                    return
                if session.connection.open and await self._sessions.unlock(session, deadline) is not None:
                    return
            finally:
                session.give()
        await self._sessions.end(session, deadline)

    # ------------------------------------------------------------------ renew and release

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Ask on the session of each grant who holds its lock. The server counts the ttl from that statement."""
        results = [Renewal.LOST] * len(grants)
        sessions: list[tuple[int, MySQLSession]] = []
        silent: list[MySQLSession] = []
        until = self._runtime.now() + MIN_TIMEOUT  # for all together: one busy session must not delay the others
        try:
            for index, grant in enumerate(grants):
                session = self._sessions.get(grant.claim.id)
                if session is None or session.token != grant.token or session.stage is not Stage.HELD:
                    continue
                if not await session.take(until - self._runtime.now()):
                    results[index] = Renewal.UNKNOWN
                elif self._sessions.is_current(session):
                    sessions.append((index, session))
                else:
                    session.give()  # released in the meantime
            requests = [
                (index, session, session.connection.send([sql.lock_holder(session.key)])) for index, session in sessions
            ]
            # The shortest timeout counts: one dead connection must not cost another session its lease.
            until = self._runtime.now() + min((session.reply_timeout for _, session in sessions), default=0.0)
            for index, session, replies in requests:
                received = await session.connection.receive(replies, until - self._runtime.now())
                if not received and session.connection.open:
                    results[index] = Renewal.UNKNOWN
                    silent.append(session)
                elif session.holds_lock(replies[0].value):
                    results[index] = Renewal.RENEWED
                else:
                    self._sessions.drop(session)
        finally:
            for _, session in sessions:
                session.give()
        self._sessions.drop_ended(silent)
        return results

    async def release(self, grant: Grant) -> bool:
        """Release the lock, which the server grants to the next waiter. Return False if this grant no longer held it."""
        session = self._sessions.get(grant.claim.id)
        if session is None or session.token != grant.token:
            return False
        held = None
        ended = False
        deadline = Deadline(self._runtime.now, session.reply_timeout)
        if await session.take(deadline.at_most(session.reply_timeout)):  # False: a renewal has no reply yet
            try:
                if not self._sessions.is_current(session):
                    return False
                ended = not session.connection.transport.alive()
                if not ended:
                    held = await self._sessions.unlock(session, deadline)
            finally:
                session.give()
        if held is None:
            await self._sessions.end(session, deadline)
            if not ended:
                raise OutcomeUnknown(
                    f"{self._pool.address}: no reply on the session of {grant.claim.name!r}", grant.claim.name
                )
        return bool(held)

    async def downgrade(self, grant: Grant) -> Grant:
        """Refuse: GET_LOCK has no readers."""
        raise GuaranteeUnavailable(f"{grant.claim.name!r}: GET_LOCK has no readers", grant.claim.name)

    # ------------------------------------------------------------------ end and fork

    async def close(self) -> None:
        """Close all connections; calls that wait on one fail."""
        self._pool.close()

    def after_fork(self) -> None:
        """Drop the parent's sessions and connections without sending anything on them."""
        self._sessions.clear()
        self._pool.detach_after_fork()
