"""Dedicated sessions: the connection on which a claim holds its lock or waits for it, and what is sent on it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import ceil
from typing import Any

from fencelock.core import dedicated
from fencelock.core.clock import NO_DEADLINE, Deadline
from fencelock.core.runtime import NO_REPLY, Runtime
from fencelock.engines.mysql import statements as sql
from fencelock.engines.mysql.connection import MySQLConnection, Reply
from fencelock.engines.mysql.packets import Ok, Rows, ServerError
from fencelock.engines.mysql.pool import MySQLPool, rows_of
from fencelock.errors import EngineUnavailable, OutcomeUnknown
from fencelock.model import Claim, Grant, Waiting

MIN_TIMEOUT = 0.3
"""Seconds that the engine waits for a reply at least, however short the ttl is."""
MAX_LOCK_WAIT = 3600
"""The longest timeout of one GET_LOCK; after that the claim waits again, behind the other waiters."""


class Stage(Enum):
    """What a claim does on its session."""

    TRYING = "trying"
    WAITING = "waiting"
    HELD = "held"


class MySQLSession(dedicated.DedicatedSession):
    """A claim and its connection. When the connection ends, the server releases the lock."""

    __slots__ = ("checked_at", "connection", "key", "replies", "sent_at", "stage", "statements", "token")

    def __init__(
        self, runtime: Runtime, claim: Claim, connection: MySQLConnection, statements: sql.LockStatements
    ) -> None:
        super().__init__(runtime, claim, MIN_TIMEOUT)
        self.connection = connection
        self.statements = statements
        self.key = statements.key
        self.stage = Stage.TRYING
        self.replies: list[Reply] = []
        self.token = 0
        self.sent_at = self.checked_at = runtime.now()

    def grant(self, since: float) -> Grant:
        """Return the grant of the lock that this session holds."""
        return Grant(self.claim, self.token, since)

    def waiting(self) -> Waiting:
        """Return that the claim has to wait."""
        return Waiting(self.claim, self.sent_at)

    def holds_lock(self, value: Any) -> bool:
        """Return whether a reply to `lock_holder` names this session, and not one that a proxy has opened for us."""
        return rows_of(value) == [(str(self.connection.id).encode(),)]

    def is_idle(self) -> bool:
        """Return whether the session holds the lock, so that no reply is expected on it."""
        return self.stage is Stage.HELD

    def is_alive(self) -> bool:
        """Return whether the connection is still open; nothing is sent."""
        return self.connection.transport.alive()


class MySQLSessions(dedicated.DedicatedSessions[MySQLSession]):
    """All sessions of a client that hold a lock or wait for one. A caller has taken the session's turn."""

    def __init__(self, runtime: Runtime, pool: MySQLPool) -> None:
        super().__init__(runtime)
        self._pool = pool

    def enqueue(self, session: MySQLSession, deadline: Deadline) -> None:
        """Send a GET_LOCK that waits for as long as the caller does."""
        seconds = ceil(deadline.at_most(MAX_LOCK_WAIT))
        session.stage = Stage.WAITING
        session.sent_at = session.checked_at = self._runtime.now()
        session.replies = session.connection.send(session.statements.wait_for_lock(seconds))

    async def read_token(self, session: MySQLSession) -> int:
        """Return the token if the replies grant the lock, else 0.

        Raises EngineUnavailable if the server refused a statement, OutcomeUnknown if it interrupted one; the session
        then holds nothing.
        """
        values = [reply.value for reply in session.replies]
        for value in values:
            if isinstance(value, ServerError):
                session.connection.ttl = 0  # the statement that sets it may be the one that failed
                if await self.unlock(session) is None:
                    await self.end(session)
                if value.code == sql.TABLE_FULL and (await self._pool.run(sql.DELETE_STALE_HOLDERS))[0].affected:
                    raise OutcomeUnknown(f"{self._pool.address}: {value}; there is room now") from value
                if value.code in sql.INTERRUPTED:
                    raise OutcomeUnknown(f"{self._pool.address} interrupted the statement: {value}") from value
                self._pool.check(value)
        minted = values[-1]
        if not isinstance(minted, Ok) or not minted.affected:
            return 0
        try:
            await self._pool.reserve(session.connection, minted.insert_id, session.reply_timeout)
        except OutcomeUnknown:
            raise
        except EngineUnavailable:
            await self.end(session)
            raise
        session.stage, session.token = Stage.HELD, minted.insert_id
        return session.token

    async def confirm(self, session: MySQLSession, deadline: Deadline) -> Grant | None:
        """Ask the server whether the session still holds its lock, which restarts its ttl; None if it does not."""
        sent_at = self._runtime.now()
        replies = session.connection.send([sql.lock_holder(session.key)])
        timeout = deadline.at_most(session.reply_timeout)
        if not await session.connection.receive(replies, timeout) and session.connection.open:
            raise OutcomeUnknown(f"{self._pool.address}: no reply within {timeout:.3g} s")
        return session.grant(sent_at) if session.holds_lock(replies[0].value) else None

    async def unlock(self, session: MySQLSession, deadline: Deadline = NO_DEADLINE) -> bool | None:
        """Release the lock on the session; return whether it held the lock.

        None means that the outcome is unknown, and that the caller has to end the session.
        """
        value = await self._request(session, sql.release(session.connection.id), deadline)
        if value is NO_REPLY:
            return None
        held = isinstance(value, Ok) and value.affected > 0
        if not held:
            # The row of the holder is missing, or the table takes no writes. The lock has to be released all the same.
            failed = isinstance(value, ServerError)
            value = await self._request(session, sql.RELEASE_ALL, deadline)
            if not isinstance(value, Rows):
                return None
            held = value.rows != [(b"0",)]
            if failed and not held:
                return None  # the failed statement may have released it
        self.finish(session)
        return held

    async def _request(self, session: MySQLSession, statement: str, deadline: Deadline) -> Any:
        """Return the reply to a statement, or NO_REPLY."""
        (reply,) = session.connection.send([statement])
        await session.connection.receive([reply], deadline.at_most(session.reply_timeout))
        return reply.value

    def finish(self, session: MySQLSession) -> None:
        """Remove a session that neither holds nor waits, and return its connection to the pool."""
        if self.pop(session.claim.id, None) is not None:
            self._pool.put(session.connection)

    def drop(self, session: MySQLSession) -> None:
        """Remove a session that has ended on the server, and close its connection."""
        self.pop(session.claim.id, None)
        self._pool.discard(session.connection)

    async def end(self, session: MySQLSession, deadline: Deadline = NO_DEADLINE) -> None:
        """End a session on the server, and with it whatever it holds or waits for. Raises OutcomeUnknown."""
        await self._pool.end_session(session.connection, session.reply_timeout, deadline)
        if self.is_current(session):
            del self[session.claim.id]

    async def look_up(self, sessions: Sequence[MySQLSession], deadline: Deadline) -> list[bool]:
        """Ask who holds the locks of the sessions."""
        found = await self._pool.run(*(sql.lock_holder(session.key) for session in sessions), deadline=deadline)
        return [session.holds_lock(value) for session, value in zip(sessions, found, strict=True)]
