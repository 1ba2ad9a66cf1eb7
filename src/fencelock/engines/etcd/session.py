"""Sessions: one etcd lease for each step of ttl, the keep-alives of all their claims, and when a keep-alive counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import urandom
from typing import TYPE_CHECKING, Any, TypeVar

from fencelock.core.sessions import Session, ttl_step
from fencelock.engines.etcd import messages as m
from fencelock.engines.etcd.client import timeout_for
from fencelock.engines.etcd.rpc_errors import RpcError
from fencelock.errors import FencelockError, InvalidTTL, OutcomeUnknown
from fencelock.model import Renewal

if TYPE_CHECKING:
    from fencelock.core.runtime import Event, Runtime
    from fencelock.engines.etcd.client import EtcdClient
    from fencelock.engines.etcd.grpc import Call, EtcdConnection

EtcdSession = Session[int]
R = TypeVar("R", bound=tuple[Any, ...])
"""A decoded reply; its header comes first."""

TTL_STEPS = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 25, 30, 40, 50, 60, 75, 90, 120, 150, 180, 240, 300, 450, 600, 900, 1200, 1800,
    2700, 3600, 5400, 7200, 10800, 14400, 21600, 28800, 43200, 86400,
)  # fmt: skip
"""The ttls of sessions, in whole seconds as etcd counts: there are fewer sessions than ttls."""
FRESH_SHARE = 0.25
"""An attempt sends a keep-alive along if the last one is older than this share of the ttl."""
REVOKE_TIMEOUT = 2.0


def new_lease_id() -> int:
    """Return a random id for a lease. The client chooses it, so a repeated grant makes one lease."""
    return int.from_bytes(urandom(8), "big") >> 1 or 1


class Sessions:
    """All sessions of a client."""

    def __init__(
        self, runtime: Runtime, client: EtcdClient, probe_key: bytes, on_ended: Callable[[EtcdSession], None]
    ) -> None:
        self._runtime = runtime
        self._client = client
        self._probe_key = probe_key
        """A key to read: the read succeeds only if the leader still has a majority."""
        self._on_ended = on_ended
        self.detach_after_fork()

    def detach_after_fork(self) -> None:
        """Start without sessions: in a forked child, the sessions are the parent's."""
        self._sessions: dict[int, EtcdSession] = {}
        """Every session that has not ended, by its lease id. Ids never repeat, so no thread or signal handler can
        overwrite the session of another one."""
        self._current: dict[int, EtcdSession] = {}
        """The session for new claims, by ttl."""
        self._creating: dict[int, Event] = {}

    def find(self, lease: int) -> EtcdSession | None:
        """Return the session with this lease, if it is one of this client's and has not ended."""
        return self._sessions.get(lease)

    def all(self) -> list[EtcdSession]:
        """Return all sessions that have not ended."""
        return list(self._sessions.values())

    # ------------------------------------------------------------------ starting

    async def get(self, ttl: float, timeout: float) -> EtcdSession:
        """Return the live session for a ttl; create it, or wait for the attempt that is creating it."""
        if (session := self._live(ttl)) is not None:
            return session
        seconds = int(ttl_step(ttl, TTL_STEPS))
        mine = self._runtime.event()
        try:
            while (other := self._creating.setdefault(seconds, mine)) is not mine:
                await other.wait(timeout)
                if (session := self._live(ttl)) is not None:
                    return session
                if not other.is_set():
                    break  # it takes too long: a session of our own may be faster
            session = self._live(ttl)
            if session is None:
                self._end_unused()
                session = self._store(seconds, await self._grant(seconds, timeout))
            return session
        finally:
            if self._creating.get(seconds) is mine:
                del self._creating[seconds]
            mine.set()

    def _live(self, ttl: float) -> EtcdSession | None:
        session = self._current.get(int(ttl_step(ttl, TTL_STEPS)))
        return session if session is not None and session.alive(self._runtime.now()) else None

    def _store(self, seconds: int, new: EtcdSession) -> EtcdSession:
        """Store and return a new session; or return the live one that another attempt has stored, and revoke the new one."""
        self._sessions[new.handle] = new
        old = self._current.setdefault(seconds, new)
        if old is new:
            return new
        if old.alive(self._runtime.now()):
            self._end([new])
            return old
        self._current[seconds] = new
        self._end([old])
        return new

    async def _grant(self, seconds: int, timeout: float) -> EtcdSession:
        id, since = new_lease_id(), self._runtime.now()
        try:
            _, granted = m.read_lease(await self._client.request(m.GRANT, m.grant_lease(id, seconds), timeout))
        except FencelockError as error:
            if "lease already exists" not in str(error):
                raise
            # The reply to the first request was lost.
            _, granted = m.read_lease(await self._client.request(m.KEEP_ALIVE, m.lease_request(id), timeout))
        session: EtcdSession = Session(id, float(seconds), since)
        if granted != seconds:
            await self._revoke([session])
            raise InvalidTTL(
                f"etcd at {self._client.address} keeps leases for {granted} seconds at least, so {seconds} cannot be "
                f"promised: ask for a ttl of {granted} or more, or give it a shorter --election-timeout"
            )
        return session

    # ------------------------------------------------------------------ ending

    def refuse_claims(self, session: EtcdSession) -> None:
        """Put no more claims on a session, as a late attempt of an abandoned claim may arrive for as long as it lives.

        Meanwhile the key `abandoned/<claim id>` keeps that attempt away. It is attached to the same lease, so it lives for as
        long as the attempt can create anything.
        """
        for seconds, other in list(self._current.items()):
            if other is session:
                self._current.pop(seconds, None)

    def _end_unused(self) -> None:
        """End the sessions that get no new claims and are empty, or whose time is over by our clock."""
        now = self._runtime.now()
        current = list(self._current.values())
        refusing = [session for session in self.all() if session not in current]
        self._end([session for session in refusing if not session.claims() or not session.alive(now)])

    def _end(self, sessions: Sequence[EtcdSession]) -> None:
        """End sessions with all their claims, and revoke their leases in the background."""
        now = self._runtime.now()
        revoke = [session for session in sessions if not session.ended and (session.claims() or session.alive(now))]
        for session in sessions:
            self.report_gone(session)
        if revoke:
            self._runtime.spawn(self._revoke(revoke), "fencelock-revoke")

    def end_all(self) -> None:
        """End all sessions: etcd's history has changed, and nobody knows which claims still exist."""
        self._end(self.all())

    def report_gone(self, session: EtcdSession) -> None:
        """Report that a session, and every claim on it, is gone."""
        self._sessions.pop(session.handle, None)
        self.refuse_claims(session)
        if not session.ended:
            session.ended = True  # before `_on_ended`: see `OwnClaims.hold`
            self._on_ended(session)

    async def close(self) -> None:
        """Revoke all sessions, and so remove their claims."""
        now = self._runtime.now()
        sessions = self.all()
        self._sessions.clear()
        self._current.clear()
        await self._revoke([session for session in sessions if session.alive(now)])

    async def _revoke(self, sessions: Sequence[EtcdSession]) -> None:
        async def work(connection: EtcdConnection, left: float) -> None:
            for call in [connection.start(m.REVOKE, m.lease_request(session.handle)) for session in sessions]:
                try:
                    await connection.finish(*call, left)
                except RpcError as error:
                    if error.retryable:
                        raise

        if sessions:
            try:
                await self._client.run(work, REVOKE_TIMEOUT)
            except FencelockError:
                pass  # they expire by themselves

    # ------------------------------------------------------------------ keep-alives

    async def request(
        self,
        session: EtcdSession,
        method: str,
        message: bytes,
        read: Callable[[bytes], R],
        timeout: float,
        *,
        keep_alive: bool = False,
    ) -> tuple[R, int]:
        """Send a request that needs a majority, with a keep-alive if it is due; return the reply, and how often it was sent.

        If it was sent twice, the first one may still arrive. Raises LeaseNotFound and other FencelockErrors.
        """
        seen = self._client.revision

        async def work(connection: EtcdConnection, left: float) -> R:
            if not self._keep_alive_due(session, 0.0 if keep_alive else FRESH_SHARE):
                return read(await connection.call(method, message, left))
            until = self._runtime.now() + left
            kept = self.send_keep_alive(session, connection)
            try:
                reply = read(await connection.call(method, message, left))
            except BaseException:
                connection.cancel(kept[0])
                raise
            try:
                rest = max(0.001, until - self._runtime.now())
                await self.finish_keep_alive(session, connection, kept, reply[0].term, rest)
            except (OutcomeUnknown, RpcError):
                pass  # the session is as old as before
            return reply

        reply, sent = await self._client.run(work, timeout)
        self._client.check_header(reply[0], seen)
        return reply, sent

    def _keep_alive_due(self, session: EtcdSession, share: float) -> bool:
        """Return whether a keep-alive is older than a share of the ttl, and no expired claim has to be removed first."""
        now = self._runtime.now()
        return now - session.since > session.ttl * share and not session.expired_ids(now)

    def send_keep_alive(self, session: EtcdSession, connection: EtcdConnection) -> tuple[Call, Event, float]:
        """Send a keep-alive; return its call, and a time before it was sent.

        The time is read first: a process that is stopped in between must not believe that its lease is younger.
        """
        sent = self._runtime.now()
        return *connection.start(m.KEEP_ALIVE, m.lease_request(session.handle)), sent

    async def finish_keep_alive(
        self,
        session: EtcdSession,
        connection: EtcdConnection,
        sent_call: tuple[Call, Event, float],
        term: int,
        timeout: float,
    ) -> Renewal:
        """Wait for the reply to a keep-alive, and judge it by the `term` of a majority's reply.

        Leases live in the memory of the leader, and a leader that was stopped or cut off keeps answering for them until it
        learns that there is a new one. So a keep-alive counts only if a majority has answered another request, sent no
        earlier and to the same member, in the same term or an earlier one: any later leader was elected after the keep-alive
        was sent, and gives every lease its full ttl from then on.
        """
        call, event, sent = sent_call
        lease_term, ttl = 0, 0
        try:
            header, ttl = m.read_lease(await connection.finish(call, event, timeout))
            lease_term = header.term
        except RpcError as error:
            if not error.lease_not_found:
                raise
        if ttl <= 0:
            self.report_gone(session)
            return Renewal.LOST
        if term > lease_term:
            return Renewal.UNKNOWN
        session.ttl = float(ttl)
        session.confirm_alive(sent)
        return Renewal.RENEWED

    async def keep_alive(self, sessions: Sequence[EtcdSession]) -> dict[EtcdSession, Renewal]:
        """Send a keep-alive for each session, all at once, and one read that needs a majority."""
        results = dict.fromkeys(sessions, Renewal.UNKNOWN)

        async def work(connection: EtcdConnection, left: float) -> None:
            until = self._runtime.now() + left
            sent = [self.send_keep_alive(session, connection) for session in sessions]
            seen = self._client.revision
            header, _ = m.read_range(await connection.call(m.RANGE, m.count_key(self._probe_key), left))
            self._client.check_header(header, seen)
            for session, call in zip(sessions, sent, strict=True):
                rest = max(0.001, until - self._runtime.now())
                results[session] = await self.finish_keep_alive(session, connection, call, header.term, rest)

        if sessions:
            await self._client.run(work, timeout_for(min(session.ttl for session in sessions)))
        return results
