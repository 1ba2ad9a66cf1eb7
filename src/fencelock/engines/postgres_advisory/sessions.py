"""The sessions of all claims of a client: pings, unlocking, and sessions that were given up without a reply (orphans)."""

from __future__ import annotations

from collections.abc import Sequence

from fencelock.core import dedicated
from fencelock.core.clock import Deadline
from fencelock.core.engine import MIN_REPLY_TIMEOUT
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.connection import PostgresConnection
from fencelock.engines.postgres.errors import ServerError, translate
from fencelock.engines.postgres.pool import PostgresPool
from fencelock.engines.postgres_advisory import statements as sql
from fencelock.engines.postgres_advisory.session import SHORTEST_REPLY_TIMEOUT, AdvisorySession
from fencelock.errors import FencelockError, OutcomeUnknown
from fencelock.model import Claim, Renewal

CANCEL_AGAIN_SECONDS = 0.05
"""Seconds after which a cancel without effect is sent again."""


class AdvisorySessions(dedicated.DedicatedSessions[AdvisorySession]):
    """All sessions of a client that have a lock or wait for one. A caller takes the session's turn before it uses one."""

    def __init__(self, runtime: Runtime, pool: PostgresPool) -> None:
        super().__init__(runtime)
        self._pool = pool
        self._orphans: dict[str, list[int]] = {}
        """The process ids of sessions that were given up without a reply, by claim: they may still get the lock."""

    def send_ping(self, session: AdvisorySession) -> None:
        """Send a ping, unless the reply to an earlier request is still pending after an interrupt."""
        connection = session.connection
        session.previous_pending = connection.pending
        if not session.previous_pending and connection.open:
            try:
                connection.send(sql.PING, ())
            except OutcomeUnknown:
                pass  # the connection is closed now, which `read_ping` notices

    async def read_ping(self, session: AdvisorySession, until: float) -> Renewal:
        """Wait for the reply to a ping. If that of an earlier request was pending, read it, and send the ping now."""
        connection = session.connection
        try:
            if not connection.open:
                raise OutcomeUnknown("its session has ended")
            if session.previous_pending:
                await connection.drain(until - self._runtime.now(), keep=True)
                connection.send(sql.PING, ())
            await connection.read_reply(until - self._runtime.now(), keep=True)
        except OutcomeUnknown:
            if connection.open:
                return Renewal.UNKNOWN
        except ServerError:
            pass
        else:
            return Renewal.RENEWED
        self.drop(session)
        return Renewal.LOST

    async def unlock(self, session: AdvisorySession) -> bool:
        """Release the lock, in whichever mode; the pool gets the connection back only if the server confirmed that."""
        connection = session.connection
        self.pop(session.claim.id, None)
        try:
            await connection.drain(session.reply_timeout)
            if not connection.is_alive():
                self._pool.drop(connection)
                return False  # the session has ended, and the lock with it
            await connection.request(sql.UNLOCK, (self._pool.default_idle_timeout,), session.reply_timeout)
        except ServerError as error:
            self._pool.drop(connection)
            raise translate(error, self._pool.address) from error
        except FencelockError:
            self._pool.drop(connection)  # the server ends the session when it notices, or after the ttl
            raise
        except BaseException:
            self.orphan(session)  # the interrupted caller abandons the claim next, which terminates the session
            raise
        self._pool.keep(connection)
        return True

    async def withdraw(self, session: AdvisorySession, deadline: Deadline) -> None:
        """Leave the server's queue, or release the lock. A session that does not do so in time becomes an orphan."""
        connection, claim = session.connection, session.claim
        self.pop(claim.id, None)
        if not connection.open:
            return
        try:
            if session.token is None and session.enqueued:
                await self._cancel_wait(connection, deadline)
            await connection.drain(SHORTEST_REPLY_TIMEOUT)
            await connection.request(sql.UNLOCK, (self._pool.default_idle_timeout,), SHORTEST_REPLY_TIMEOUT)
            self._pool.keep(connection)
        except (FencelockError, ServerError):
            self.orphan(session)
        except BaseException:
            self.orphan(session)
            raise

    async def _cancel_wait(self, connection: PostgresConnection, deadline: Deadline) -> None:
        """Cancel LOCK_WAIT. A cancel that the server gets before the statement itself has no effect: then send it again."""
        until = self._runtime.now() + deadline.at_most(SHORTEST_REPLY_TIMEOUT) / 2  # the rest is for TERMINATE
        while connection.pending:
            await self._pool.run(sql.CANCEL, (connection.pid,), SHORTEST_REPLY_TIMEOUT, deadline=deadline)
            try:
                await connection.read_reply(CANCEL_AGAIN_SECONDS, keep=True)
            except ServerError:
                return  # cancelled; the server may have granted the lock nevertheless
            except OutcomeUnknown:
                if not connection.open or self._runtime.now() >= until:
                    raise

    def drop(self, session: AdvisorySession) -> None:
        """Forget a session, and close its connection: the server ends the session when it notices."""
        self.pop(session.claim.id, None)
        self._pool.drop(session.connection)

    def orphan(self, session: AdvisorySession) -> None:
        """Give up a session that may still get the lock: `terminate_orphans` ends it, or the server after the ttl."""
        self._orphans.setdefault(session.claim.id, []).append(session.connection.pid)
        self._pool.drop(session.connection)

    def hang_up(self, session: AdvisorySession) -> None:
        """Give up a session while another caller has its turn; that caller gets an error."""
        self.pop(session.claim.id, None)
        self._orphans.setdefault(session.claim.id, []).append(session.connection.pid)
        session.connection.hang_up()

    async def terminate_orphans(self, claim: Claim, deadline: Deadline) -> None:
        """Terminate the sessions that may still get the lock for a claim."""
        for pid in self._orphans.get(claim.id, ()):
            await self._pool.run(sql.TERMINATE, (pid,), MIN_REPLY_TIMEOUT, deadline=deadline)
        self._orphans.pop(claim.id, None)

    async def look_up(self, sessions: Sequence[AdvisorySession], deadline: Deadline) -> list[bool]:
        """Read the server's table of locks."""
        pids = ",".join(str(session.connection.pid) for session in sessions)
        rows = await self._pool.run(sql.HELD_LOCKS, (f"{{{pids}}}",), deadline=deadline)
        held = {(int(pid or 0), int(key or 0)) for pid, key in rows}
        return [(session.connection.pid, session.key) in held for session in sessions]

    def detach_after_fork(self) -> None:
        """Start empty in a forked child: the parent's sessions must not be terminated by it."""
        self.clear()
        self._orphans.clear()
