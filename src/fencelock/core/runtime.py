"""The runtime port: everything that the core and the engines need from the outside and that depends on how they are run.

Three runtimes implement it: `runtime/blocking.py`, `runtime/asyncio.py` and `sim/runtime.py`. The core and the engines are
written once, as coroutines, against these protocols. In the blocking runtime no await ever suspends: a coroutine runs to its
end in the caller's own thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from ssl import SSLContext  # a tenth of the start of a command that needs no server

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Command = tuple[str | int, ...]
"""What a server is asked: words, in its own protocol's order."""


class NoReply:
    """What stands for an answer that did not come, or not yet."""

    def __repr__(self) -> str:
        return "NO_ANSWER"


NO_REPLY: Final = NoReply()


PushHandler = Callable[[Any], bool | None]
"""Takes what looks like a push; returns True if it is the answer to a command after all."""


class Event(Protocol):
    """A flag that can be waited for. `set` may be called from any thread."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    async def wait(self, timeout: float | None) -> bool: ...


class WakeupEvent(Event, Protocol):
    """An event that has something of the system's, and so has to be given back."""

    def close(self) -> None: ...


class ProcessWakeup(Protocol):
    """A flag that another process can set, by its address. Rings may get lost: whoever waits looks again in the end."""

    address: str

    async def wait(self, timeout: float) -> bool: ...
    def close(self) -> None: ...


class CancelGuard(Protocol):
    """What stops the body of a `with` block whose lease is lost, where the colour can do that."""

    def interrupt(self) -> None: ...

    def leave(self) -> bool:
        """Withdraw from the body; return whether an exception that comes out of it is only our own interruption."""
        ...


class Endpoint(NamedTuple):
    """Where a server listens, for a world to connect to by itself."""

    name: str
    """A name, an address, or the path of a Unix socket, which begins with a slash and has no use for the port."""
    port: int
    tls: SSLContext | None = None
    seconds: float = 5.0
    """How long connecting may take."""
    before_tls: Callable[[bytes], bytes | None] | None = None
    """What is said in the clear before TLS begins: given all that the server has said, or None until that is enough."""


class Connector(Protocol):
    """How to reach one server, in either colour: a driver connects and logs in, and the wire takes over from there.

    `reach` is for engines without a driver: the world's own way to connect, which raises OSErrors.
    """

    address: str
    """For people, and for whoever needs to tell servers apart."""

    def connect(self, open_stream: Callable[[Endpoint], Any]) -> Any:
        """Return a connected socket, and block meanwhile; raise EngineUnavailable."""
        ...

    async def aconnect(self, open_stream: Callable[[Endpoint], Awaitable[Any]]) -> tuple[Any, object]:
        """Return a connected asyncio transport, and what has to be kept for as long as it is used."""
        ...

    def pack(self, command: Command) -> bytes: ...

    def parser(self) -> Parser: ...

    @property
    def pushes(self) -> type:
        """What was not asked for is of this type, and perhaps some answers are too (`World.wire`)."""
        ...


class Parser(Protocol):
    """Makes answers of bytes."""

    def feed(self, data: bytes, /) -> object: ...

    def gets(self) -> Any:
        """Return the next whole answer, or NO_ANSWER."""
        ...


class Connection(Protocol):
    """A connection to a server that answers in the order in which it is asked, and may push what nobody asked for.

    Where a server answers in any order, all that it says counts as pushed, and its engine finds out who it is for.

    An error that the server answers with is an answer. In the blocking world a wire belongs to one thread at a time; only
    `close` may be called by any.
    """

    @property
    def open(self) -> bool: ...

    @property
    def owed(self) -> Sized:
        """What the server still owes an answer to."""
        ...

    @property
    def oldest_pending_since(self) -> float | None:
        """When the oldest command that is not answered yet was sent; None if the server owes nothing."""
        ...

    @property
    def pace(self) -> float:
        """How long the server last took for an answer that was not waited for, or waited for in vain."""
        ...

    def alive(self) -> bool:
        """Return whether it is still good, as far as can be told without asking: servers hang up on the idle."""
        ...

    async def request(self, command: Command | bytes, timeout: float) -> Any:
        """Send a command, packed already or not, and return its answer; raise OutcomeUnknown if none came in time, or the
        connection broke.

        Only a broken wire is closed: an answer that comes later than its asker waits is skipped when it comes.
        """
        ...

    def tell(self, data: bytes) -> None:
        """Send bytes as they are, also while what is pushed is taken in; the server owes nothing for them.

        It does not raise: a wire that breaks is closed.
        """
        ...

    def close(self) -> None: ...

    def forget(self) -> None:
        """Let go of it in a forked child without a word to the server, which still serves the parent."""
        ...


class Source(Protocol):
    """What events come of: a driver's connection, which its own thread reads unless somebody who waits can do it.

    Everybody who waits enters and leaves, with a key of their own.
    """

    def enter(self, key: object) -> bool:
        """Come to wait; return whether it is ours to read."""
        ...

    def read_until(self, key: object, enough: Callable[[], bool], until: float) -> None:
        """Read, in this thread, until that is so, or nothing more can be read, or the time is over."""
        ...

    def wake(self) -> None:
        """Have whoever reads look whether it is enough; from any thread."""
        ...

    def leave(self, key: object) -> None: ...


class Runtime(Protocol):
    """One way to run the core."""

    shares_connections: bool
    """Whether several may ask over one wire at the same time; else each has to have its own."""

    def now(self) -> float:
        """Return seconds on a clock that never goes back and counts while the machine sleeps."""
        ...

    def check_usable(self) -> None:
        """Raise if the caller cannot use this world (another event loop, say). Called before anything is sent."""
        ...

    def random(self) -> float:
        """Return a number from 0 up to 1, for jitter."""
        ...

    def current_task(self) -> Hashable:
        """Return what identifies the running thread or task, for opt-in reentrancy."""
        ...

    def event(self) -> Event: ...

    def push_event(self) -> Event:
        """Return an event for `listen`: set only by what is pushed over wires, or by who closes them."""
        ...

    def wakeup_event(self) -> WakeupEvent:
        """Return an event for `listen` that any thread may set, to wake whoever listens."""
        ...

    def process_wakeup(self) -> ProcessWakeup | None:
        """Return a doorbell of one's own, or None where processes cannot ring each other."""
        ...

    @property
    def cancel_guard(self) -> Callable[[], CancelGuard] | None:
        """Makes a guard for the body of a `with` block that is being entered."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run in the background; it never keeps the process alive."""
        ...

    def call_user(self, function: Callable[[], None]) -> None:
        """Call a function of the user's, soon, where it delays nothing of ours: in a thread, or on the event loop."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def run_blocking(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a function that blocks, where that does no harm.

        It is awaited to its end even when the caller is cancelled, so that what follows comes after it.
        """
        ...

    async def shield(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run to the end, or for so long, whatever happens to the caller: a cancellation comes out afterwards.

        A thread runs it to its end in any case.
        """
        ...

    async def in_background(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run to the end in the background, and wait for the result for so long: raise TimeoutError then.

        Like `shield`, but a thread, too, is free to go on after the timeout.
        """
        ...

    async def connect(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> Connection:
        """Connect to a server. `on_push` takes what it pushes, `on_end` is called once when the wire is closed."""
        ...

    async def request_all(
        self,
        asked: Sequence[tuple[Connection, Command | bytes]],
        timeout: float,
        enough: Callable[[Sequence[Any]], bool],
    ) -> list[Any]:
        """Ask several servers at once and return their answers, NO_ANSWER for each that is missing.

        It ends as soon as `enough` says so of the answers so far, at once even, when all have answered, and at the latest
        after the timeout. What comes later is skipped when it comes. All is sent, wherever there is an open wire.
        """
        ...

    async def wait_for_push(self, connections: Sequence[Connection], bell: Event, timeout: float) -> bool:
        """Wait until something that is pushed over one of the wires sets the bell; return whether it is set.

        It ends early when a wire breaks, or has been broken already.
        """
        ...

    async def attend(self, source: Source, event: Event, timeout: float) -> bool:
        """Wait for an event that may come of what is read; read it here, where it is threads that wait."""

    async def readable(self, descriptor: int, timeout: float, *, write: bool = False) -> bool:
        """Wait until a descriptor can be read, or with `write` also until it can be written; return whether it can.

        For drivers that speak their protocol without waiting (libpq). One at a time may wait for a descriptor, and nobody
        closes it meanwhile.
        """
        ...

    async def close(self) -> None:
        """Give back what the world itself holds: threads, sockets."""
        ...

    def after_fork(self) -> None:
        """Forget everything that belongs to the parent process."""
        ...
