"""The runtime protocol: how the core and the engines wait, connect, read clocks and run background work.

Three runtimes implement it: `runtime/blocking.py`, `runtime/asyncio.py` and `sim/runtime.py`. The core and the engines are
written once, as coroutines, against these protocols. In the blocking runtime no await ever suspends: a coroutine runs to its
end in the caller's own thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from ssl import SSLContext  # importing it takes a tenth of the start of a command without a server

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Command = tuple[str | int, ...]
"""A request before it is encoded: its words, in the order of the protocol."""


class NoReply:
    """Stands for a reply that has not arrived."""

    def __repr__(self) -> str:
        return "NO_REPLY"


NO_REPLY: Final = NoReply()


PushHandler = Callable[[Any], bool | None]
"""Handles a message of the type of pushes; returns True if it is the reply to a command instead."""


class Event(Protocol):
    """A flag to wait for. Any thread may call `set`."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    async def wait(self, timeout: float | None) -> bool: ...


class WakeupEvent(Event, Protocol):
    """An event with a descriptor, which must be closed."""

    def close(self) -> None: ...


class ProcessWakeup(Protocol):
    """A flag that another process can set by its address. Wake-ups may be lost, so a waiter also polls now and then."""

    address: str

    async def wait(self, timeout: float) -> bool: ...
    def close(self) -> None: ...


class CancelGuard(Protocol):
    """Stops the body of a `with` block whose lease is lost, in runtimes that can do that."""

    def interrupt(self) -> None: ...

    def leave(self) -> bool:
        """End the guard; return whether the body's exception is only this guard's interruption."""
        ...


class Endpoint(NamedTuple):
    """Where a server listens, for a runtime to connect to."""

    name: str
    """A host name, an address, or the path of a Unix socket, which begins with a slash and has no port."""
    port: int
    tls: SSLContext | None = None
    seconds: float = 5.0
    """Seconds that connecting may take."""
    before_tls: Callable[[bytes], bytes | None] | None = None
    """Called with all bytes of the server before TLS; returns the reply to send, or None until it has enough bytes."""

    @property
    def address(self) -> str:
        """Host and port, for messages."""
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


class Connector(Protocol):
    """How to connect to one server, blocking and asyncio: a driver connects and logs in, then the `Connection` takes over.

    `open_stream` is for engines without a driver: the runtime's own function to connect, which raises OSErrors.
    """

    address: str
    """The server's address, for messages and to tell servers apart."""

    def connect(self, open_stream: Callable[[Endpoint], Any]) -> Any:
        """Connect, blocking, and return the socket; raise EngineUnavailable."""
        ...

    async def aconnect(self, open_stream: Callable[[Endpoint], Awaitable[Any]]) -> tuple[Any, object]:
        """Connect; return an asyncio transport, and an object to keep for as long as the transport is used."""
        ...

    def pack(self, command: Command) -> bytes: ...

    def parser(self) -> Parser: ...

    @property
    def pushes(self) -> type:
        """The type of pushed messages. Some replies may have it too (`PushHandler`)."""
        ...


class Parser(Protocol):
    """Decodes replies from bytes."""

    def feed(self, data: bytes, /) -> object: ...

    def gets(self) -> Any:
        """Return the next complete reply, or NO_REPLY."""
        ...


class Connection(Protocol):
    """A connection to a server that replies in the order of the requests, and may push messages in between.

    If a server replies in any order, all its messages count as pushes, and the engine assigns them to requests.

    An error reply is a reply. In the blocking runtime one thread at a time waits on a connection; meanwhile
    other threads may call `send`, one at a time, and any thread may call `close`.
    """

    @property
    def open(self) -> bool: ...

    @property
    def pending(self) -> Sized:
        """The requests without a reply so far."""
        ...

    @property
    def oldest_pending_since(self) -> float | None:
        """When the oldest request without a reply was sent; None if there is none."""
        ...

    @property
    def last_latency(self) -> float:
        """Seconds that the server took for the last reply."""
        ...

    def alive(self) -> bool:
        """Return whether the server has not closed it, without a request: servers close idle connections."""
        ...

    async def request(self, command: Command | bytes, timeout: float) -> Any:
        """Send a command, encoded or not, and return its reply. Raise OutcomeUnknown if no reply came in time, or the
        connection broke.

        A timeout does not close the connection: the late reply is dropped when it arrives.
        """
        ...

    def send(self, data: bytes) -> None:
        """Send bytes that have no reply; also allowed inside a PushHandler.

        It does not raise: a connection that breaks is closed.
        """
        ...

    def close(self) -> None: ...

    def detach_after_fork(self) -> None:
        """Detach from it in a forked child without sending anything to the server, which still serves the parent."""
        ...


class Runtime(Protocol):
    """One way to run the core."""

    shares_connections: bool
    """Whether several tasks may use one connection at the same time; otherwise each thread needs its own."""

    def now(self) -> float:
        """Return seconds of a clock that never goes back and also runs while the machine is suspended."""
        ...

    def check_usable(self) -> None:
        """Raise if the caller cannot use this runtime (as in another event loop). Called before anything is sent."""
        ...

    def random(self) -> float:
        """Return a number from 0 up to 1, for jitter."""
        ...

    def current_task(self) -> Hashable:
        """Return what identifies the running thread or task, for opt-in reentrancy."""
        ...

    def event(self) -> Event:
        """Return an event. `wait_for_push` notices it only if a push or the end of a connection sets it."""
        ...

    def wakeup_event(self) -> WakeupEvent:
        """Return an event for `wait_for_push` that any thread may set to end the wait."""
        ...

    def process_wakeup(self) -> ProcessWakeup | None:
        """Return a new wake-up, or None on systems where processes cannot wake each other."""
        ...

    @property
    def cancel_guard(self) -> Callable[[], CancelGuard] | None:
        """A function that makes a guard for the body of a `with` block, or None if the runtime cannot interrupt a body."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run it in the background; it does not keep the process alive."""
        ...

    async def run_shared(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run work that others share, so that a cancellation of the caller does not end it: as a task, or in this thread.

        The caller waits for the result by an event: with asyncio, the work has only begun when this returns.
        """
        ...

    def call_user(self, function: Callable[[], None]) -> None:
        """Call a function of the user soon, where it does not delay renewals: in a new thread, or on the event loop."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def run_blocking(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a blocking function: in a thread for asyncio, otherwise in this thread.

        It is awaited to its end even if the caller is cancelled, so that later steps run after it.
        """
        ...

    async def shield(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run it to the end, at most `timeout` seconds, even if the caller is cancelled; raise the cancellation afterwards.

        The blocking runtime runs it to its end without a timeout.
        """
        ...

    async def run_with_time_limit(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run it in the background and wait for the result; raise TimeoutError after `timeout` seconds.

        Like `shield`, but in the blocking runtime too the caller continues after the timeout.
        """
        ...

    async def connect(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> Connection:
        """Connect to a server. `on_push` gets its pushes; `on_end` is called once when the connection is closed."""
        ...

    async def request_all(
        self,
        requests: Sequence[tuple[Connection, Command | bytes]],
        timeout: float,
        enough: Callable[[Sequence[Any]], bool],
    ) -> list[Any]:
        """Send to several servers at once and return their replies, NO_REPLY for each that is missing.

        It ends when `enough(replies)` is true (also before the first reply), when all have replied, or after the timeout.
        Late replies are dropped. Every request is sent whose connection is open.
        """
        ...

    async def wait_for_push(self, connections: Sequence[Connection], event: Event, timeout: float) -> bool:
        """Wait until a push on one of the connections sets the event; return whether it is set.

        It ends early when a connection is or becomes closed.
        """
        ...

    async def wait_for_io(self, descriptor: int, timeout: float, *, or_writable: bool = False) -> bool:
        """Wait until a descriptor can be read, or with `or_writable` until it can be read or written; return whether it can.

        For drivers with a non-blocking API (libpq). Only one caller at a time may wait for a descriptor, and it must stay
        open meanwhile.
        """
        ...

    async def close(self) -> None:
        """Close the runtime's own threads and sockets."""
        ...

    def after_fork(self) -> None:
        """Drop everything that belongs to the parent process."""
        ...
