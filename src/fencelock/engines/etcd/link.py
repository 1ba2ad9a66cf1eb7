"""One link: a wire to a member, and gRPC's calls over it. What a member refuses is judged here, in one place."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote

from fencelock.core.runtime import Connection, Event, Runtime
from fencelock.engines.etcd.http2 import REFUSED, Frame, Http2Connection, Stream
from fencelock.engines.etcd.watch import Watches
from fencelock.errors import EngineUnavailable, FencelockError, OutcomeUnknown

CANCELLED, UNKNOWN, INVALID, TIMED_OUT, NOT_FOUND, DENIED, EXHAUSTED = 1, 2, 3, 4, 5, 7, 8
PRECONDITION, INTERNAL, UNAVAILABLE, UNAUTHENTICATED = 9, 13, 14, 16

MAYBE = frozenset({CANCELLED, UNKNOWN, TIMED_OUT, INTERNAL, UNAVAILABLE})
"""After these it may have been done all the same."""
NOT_DONE = ("no leader", "not capable", "too many requests", "not begun")
"""Words of those refusals that come before anything is done. "server stopped" is not among them: a member that stops says it
of proposals that it has made, and the others may carry them out."""
LOG_IN_AGAIN = ("revision of auth store is old", "revision in header is old", "user name is empty")
"""Words of refusals that a new login helps against: some tokens name a revision of the users and roles, which has changed."""
HINTS = {
    "no leader": "too few of its members are running or see each other",
    "space exceeded": "compact and defragment it, then `etcdctl alarm disarm`",
    "user name is empty": "give user and password in the URL",
    "invalid user ID or password": "user or password is wrong",
    "authentication is not enabled": "it has no users: leave them out of the URL",
    "permission denied": "the user needs a role that may read and write all keys that begin with the prefix and namespace",
}


class Refused(Exception):
    """What a member answered instead; inside this engine only."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code

    @property
    def maybe(self) -> bool:
        """Whether it may have been done all the same."""
        words = str(self)
        return self.code in MAYBE and not any(some in words for some in NOT_DONE)

    @property
    def elsewhere(self) -> bool:
        """Whether another member, or the same a little later, may do it."""
        return self.code in MAYBE or "too many requests" in str(self)

    @property
    def stranger(self) -> bool:
        """Whether we have to log in, anew perhaps: tokens run out, and roles change."""
        words = str(self)
        return self.code == UNAUTHENTICATED or any(some in words for some in LOG_IN_AGAIN)

    @property
    def no_lease(self) -> bool:
        """Whether the session is gone."""
        return self.code == NOT_FOUND and "lease" in str(self)

    def told(self, address: str) -> FencelockError:
        """Return the error that users see."""
        words = str(self)
        hint = next((hint for some, hint in HINTS.items() if some in words), None)
        said = f"etcd at {address} refused: {words or f'code {self.code}'}" + (f" ({hint})" if hint else "")
        return (OutcomeUnknown if self.maybe else EngineUnavailable)(said)


class Call:
    """A call that was sent, and the bell that rings when it is answered."""

    __slots__ = ("bell", "stream")

    def __init__(self, bell: Event) -> None:
        self.bell = bell
        self.stream = Stream(self._news)

    def _news(self) -> None:
        if self.stream.closed:
            self.bell.set()


class Link:
    """One wire. In the blocking world it is one thread's at a time, else everybody's."""

    def __init__(self, runtime: Runtime, address: str, member: int, block: Callable[[str], bytes]) -> None:
        self.address = address
        self.member = member
        """Which of the endpoints it leads to."""
        self.used = self.heard = runtime.now()
        """When it was last taken, and when the member last said anything at all."""
        self.retired = False
        """Whether nobody may begin anything on it any more."""
        self.connection: Connection
        self.watches = Watches(self)
        self._block = block
        self._runtime = runtime
        self._http = Http2Connection()

    def begin(self, connection: Connection) -> None:
        """Take over a wire that has just been connected."""
        self.connection = connection
        connection.tell(self._http.hello())

    # ------------------------------------------------------------------ calls

    def start(self, method: str, body: bytes) -> Call:
        """Send a question."""
        call = Call(self._runtime.push_event())
        self.open(call.stream, method, body, end=True)
        return call

    async def finish(self, call: Call, timeout: float) -> bytes:
        """Return the answer; raise OutcomeUnknown or Refused."""
        stream, bell = call.stream, call.bell
        try:
            if not stream.closed:
                await self._runtime.wait_for_push([self.connection], bell, timeout)
        except BaseException:
            # Whatever interrupts a thread may have come between any two bytes; a task is cancelled at an await only.
            if self._runtime.shares_connections:
                self.give_up(call)
            else:
                self.connection.close()
            raise
        if not stream.closed:
            self.give_up(call)
            raise OutcomeUnknown(f"etcd at {self.address}: no answer within {timeout:.3g} s")
        status = stream.status
        if status == 0 and stream.messages:
            return stream.messages[0]
        if status:
            raise Refused(status, unquote(stream.headers.get("grpc-message", "")))
        if stream.reset == REFUSED:
            raise Refused(UNAVAILABLE, "not begun: the server is about to stop")
        if (http := stream.headers.get(":status", "200")) != "200":
            raise Refused(PRECONDITION, f"HTTP {http}: this is no etcd")
        raise OutcomeUnknown(f"etcd at {self.address}: the connection broke before the answer came")

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        """Ask."""
        return await self.finish(self.start(method, body), timeout)

    def give_up(self, call: Call) -> None:
        """Wait no longer for an answer."""
        self.cancel(call.stream)

    def cancel(self, stream: Stream) -> None:
        """Break a stream off."""
        if data := self._http.cancel(stream):
            self.connection.tell(data)

    def open(self, stream: Stream, method: str, body: bytes, *, end: bool = False) -> None:
        """Open a stream with a first message; it is closed at once if that cannot be."""
        if not self.connection.open or self._http.retiring:
            stream.closed, stream.reset = True, REFUSED
        elif data := self._unsaid() + self._http.open(stream, self._block(method), body, end=end):
            self.connection.tell(data)

    def say(self, stream: Stream, *bodies: bytes) -> None:
        """Send more messages on a stream."""
        if data := self._http.say(stream, *bodies):
            self.connection.tell(data)

    def _unsaid(self) -> bytes:
        stream, bodies = self.watches.unsaid()
        return self._http.say(stream, *bodies) if stream is not None and bodies else b""

    # ------------------------------------------------------------------ what comes

    @property
    def usable(self) -> bool:
        """Whether something may be begun on it."""
        return not self.retired and self.connection.open and not self._http.retiring

    def heard_within(self, seconds: float) -> bool:
        """Whether the member has said something lately."""
        return self._runtime.now() - self.heard < seconds

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer on it."""
        return not self._http.streams

    def take(self, frame: Frame) -> None:
        """Take in a frame."""
        self.heard = self._runtime.now()
        if data := self._http.take(frame):
            self.connection.tell(data)
        if self._http.retiring and not self.retired:
            self.retired = True
            self.watches.close()

    def ended(self) -> None:
        """Tell all who wait that the wire is gone."""
        self._http.broken()
        self.watches.close()
