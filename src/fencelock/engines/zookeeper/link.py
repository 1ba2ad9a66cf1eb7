"""One session's connection: asks in order, tells of nodes that go, and knows how long the session must still live."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from threading import RLock
from typing import Any

from kazoo.protocol.serialization import Create2, Delete, Exists, GetData, SetData, Sync, Transaction
from kazoo.protocol.states import KazooState

from fencelock.core.runtime import Event, Runtime
from fencelock.core.sessions import Session
from fencelock.engines.zookeeper import messages
from fencelock.engines.zookeeper.address import Address
from fencelock.engines.zookeeper.answers import Answer
from fencelock.engines.zookeeper.driver import CreateContainer, Driver
from fencelock.engines.zookeeper.layout import Layout
from fencelock.engines.zookeeper.signs import SHARE, Signs
from fencelock.errors import EngineUnavailable, OutcomeUnknown

Listener = Callable[[bool | None], None]
"""Told once of a node: True if it is gone, False if something else changed, None if nobody watches it any more."""

BY_LEADER = frozenset(request.type for request in (Create2, CreateContainer, Delete, SetData, Sync, Transaction))


class Link:
    """A connection that lives as long as its session.

    kazoo's thread calls `_made` and `_changed`, and whoever reads calls `_fired` and whatever listens; that must not wait.
    """

    def __init__(self, runtime: Runtime, address: Address, seconds: float, on_end: Callable[[], None]) -> None:
        self.address = address
        self.seconds = seconds
        """The session's timeout: what was asked for, then what the ensemble gives."""
        self.connected = False
        self.session: Session[Link] = Session(self, seconds * SHARE, runtime.now())
        self.stopped = False
        """Whether nothing more will come from kazoo's thread."""
        self.layout = Layout(0, 0)
        self.doubts: list[bool | None] = [None]
        """Empty while `layout` is watched and was neither changed nor removed: a server tells of that before it answers
        whatever it carries out later, as it sends events and answers in the order of its changes."""
        self._runtime = runtime
        self._on_end = on_end
        self._signs: Signs | None = None
        self._mutex = RLock()  # a signal handler may release a lease in the middle of this
        self._waiting: set[Event] = set()
        self._held: dict[str, Listener] = {}
        self._listeners: dict[str, dict[object, Listener]] = {}
        self._driver = Driver(address, seconds, runtime.now, self._made, self._changed, self._fired)
        self._turns = self._driver.turns

    @property
    def id(self) -> int | None:
        """The session's number."""
        return self._driver.id

    @property
    def acl(self) -> Any:
        """What others may do with our nodes: everything without a login, else nothing."""
        return self._driver.acl

    @property
    def packed_acl(self) -> bytes:
        """The same, as it is sent."""
        return self._driver.packed_acl

    @property
    def last(self) -> int:
        """The latest of the ensemble's numbers of changes that was heard of."""
        return self._driver.last

    def is_under(self, layout: Answer, zxid: int) -> bool:
        """Return whether a change was made under the layout that we count tokens by, given what was read after it."""
        return not layout.missing and layout.get()[1].czxid == self.layout.czxid < zxid

    def start(self) -> None:
        """Begin to connect."""
        self._driver.start()

    # ------------------------------------------------------------------ asking

    async def ready(self, patience: float) -> bool:
        """Wait for a connection, for so long at most; return whether there is one."""
        until = self._runtime.now() + patience
        event = self._runtime.event()
        self._waiting.add(event)
        try:
            while not self._settled() and (left := until - self._runtime.now()) > 0:
                await event.wait(left)
                event.clear()  # it rings for the end of a connection, too
        finally:
            self._waiting.discard(event)
        return self.connected

    def _settled(self) -> bool:
        return self.connected or self.session.ended

    async def request(self, *requests: Any, patience: float) -> list[Answer]:
        """Ask for all of them, back to back, and wait for the last answer: the others come before it.

        If any goes by way of the leader, the first does.
        Raise EngineUnavailable if nothing was sent, Unanswered if not everything was answered.
        """
        line = self._turns.line
        if line is not None and line.tangled():
            self._driver.desert(line)
            self.connected = False  # a signal handler must not wait for what it has interrupted
        if not self.connected and not await self.ready(patience):
            raise self.away()
        event = self._runtime.event()
        last = Answer(event)
        asked = [(request, Answer()) for request in requests[:-1]]
        asked.append((requests[-1], last))
        sent = self._runtime.now()
        try:
            self._driver.post(*asked)
        except BaseException:
            self._driver.nudge()
            raise
        await self.attend(event, patience)
        if not last.done:
            raise OutcomeUnknown(f"{self.address.name}: no answer within {patience:g} s")
        if last.error is not None and not last.heard:
            last.get()
        self._heard(sent, requests[0].type in BY_LEADER)
        return [answer for _, answer in asked]

    def attend(self, event: Event, timeout: float) -> Awaitable[bool]:
        """Wait for an event that may come of what is read."""
        return self._runtime.attend(self._turns, event, timeout)

    async def fresh(self, since: float, patience: float) -> bool:
        """Have the session's claims live for their ttl from `since`; return whether they do."""
        until = self._runtime.now() + patience
        while self.session.since < since:
            await self.request(Sync("/"), patience=patience)
            if self.session.since < since:
                # The server may not have reported to its leader for a while: give it the time to.
                left = until - self._runtime.now()
                if left <= 0 or self.session.ended:
                    return False
                await self._runtime.sleep(min(left, self.seconds / 50))
        return True

    def _heard(self, sent: float, by_leader: bool) -> None:
        assert self._signs is not None
        since = self._signs.answered(sent, self._runtime.now(), by_leader)
        if since is not None:
            self.session.confirm_alive(since)

    def away(self) -> EngineUnavailable:
        if self.session.ended:
            return OutcomeUnknown(f"{self.address.name}: the session ended")
        return EngineUnavailable(f"{self.address.name}: no connection; {self._driver.trouble}")

    # ------------------------------------------------------------------ watching

    def watch(self, path: str, key: object, listener: Listener, *, ours: bool = False, zxid: int | None = None) -> None:
        """Have the listener told when the node goes; nobody waits for that here. `ours` has to be of this session.

        With `zxid` also if it was changed later than that.
        """
        with self._mutex:
            # Put there in one step: a signal handler that forgets the last of the others takes their table away.
            self._listeners[path] = {**self._listeners.get(path, {}), key: listener}

        def answered(answer: Answer) -> None:
            if answer.error is not None:
                self._tell(path, True if answer.missing else None)
            elif ours and not self._is_ours(answer.value[1]):
                self._tell(path, True)

        request = GetData(path, True) if zxid is None else messages.watch(path, zxid)
        self._driver.post((request, Answer(then=answered)))

    def look(self, parent: str, listener: Callable[[list[str] | None], None]) -> None:
        """Have the listener told who is there, None if that is not to be had; nobody waits for that here."""
        self._driver.post((messages.children(parent), Answer(then=lambda answer: listener(answer.value))))

    def check(self, path: str, listener: Listener) -> None:
        """Have the listener told if the node is not there, or not of this session; nobody waits for that here."""

        def answered(answer: Answer) -> None:
            if answer.heard and (answer.value is None or not self._is_ours(answer.value)):
                listener(True)

        self._driver.post((Exists(path, None), Answer(then=answered)))

    def _is_ours(self, stat: Any) -> bool:
        """Return whether a node is of this session, and as it was made: writing to it is how a lock is passed on."""
        return stat.ephemeralOwner == self.id and stat.mzxid == stat.czxid  # type: ignore[no-any-return]

    def unwatch(self, path: str, key: object) -> None:
        """Forget a listener. The server's watch stays until the node goes: one for each path, however many asked."""
        with self._mutex:
            listeners = self._listeners.get(path, {})
            listeners.pop(key, None)
            if not listeners:
                self._listeners.pop(path, None)

    def hold(self, path: str, listener: Listener) -> None:
        """Have the listener told when a node of this session goes: watched from the next beat of the session's pulse on."""
        self._held[path] = listener

    def let_go(self, path: str) -> None:
        """Forget a node that was held."""
        if self._held.pop(path, None) is not None:
            self.unwatch(path, self)

    def rewatch(self) -> None:
        """Watch every node that is held and not watched: it is new, or the connection is."""
        for path, listener in list(self._held.items()):
            if self not in self._listeners.get(path, ()):
                self.watch(path, self, listener, ours=True)

    def _tell(self, path: str, gone: bool | None) -> None:
        with self._mutex:
            listeners = self._listeners.pop(path, {})
        for listener in listeners.values():
            listener(gone)

    def _fired(self, path: str, gone: bool) -> None:
        self._tell(path, gone)

    # ------------------------------------------------------------------ kazoo's thread

    def _made(self, begun: float, seconds: float) -> None:
        if self._signs is None:
            self.seconds, self._signs = seconds, Signs(seconds, begun)
            self.session.ttl, self.session.since = seconds * SHARE, begun
        elif seconds != self.seconds:
            # Another member of the ensemble has other bounds, and our deadlines would no longer hold.
            self.end(tell=False)
            self._on_end()
        else:
            self._signs.connected(begun)
            self.session.confirm_alive(begun)
        self.connected = not self.session.ended
        self._ring()

    def _changed(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            return  # `_made` comes a little later, when the login is done, too
        self.connected = False
        if state == KazooState.LOST:
            self.stopped = True
            if not self.session.ended:
                self.session.ended = True
                self._driver.end(tell=False)  # kazoo would go on with a new session
                self._on_end()
        with self._mutex:
            paths = list(self._listeners)
        for path in paths:
            self._tell(path, None)
        self._ring()

    def _ring(self) -> None:
        for event in list(self._waiting):
            event.set()

    # ------------------------------------------------------------------ the end

    def nudge(self) -> None:
        """See to it that what was asked for is sent, even if whoever asked was interrupted in the middle."""
        self._driver.nudge()

    def reset(self) -> None:
        """Connect anew, to another member if there is one: this one does not answer."""
        self._driver.reset()

    def end(self, *, tell: bool) -> None:
        """Give the session up. The server is told only where nobody may still trust a lease: else it has to run out."""
        if not self.session.ended:
            tell = tell and self.connected
            self.connected, self.session.ended = False, True
            self._driver.end(tell)
            self._ring()

    async def over(self, patience: float) -> None:
        """Wait until a session that was given up is over, for so long at most."""
        event = self._runtime.event()
        self._waiting.add(event)
        if not self.stopped:
            await event.wait(patience)
        self._waiting.discard(event)

    def forget(self) -> None:
        """Let go of it in a forked child."""
        self.connected, self.session.ended = False, True
        self._driver.forget()
