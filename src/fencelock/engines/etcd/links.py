"""All links to a cluster: the next member when one fails, logging in, and asking again what may be asked again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import TypeVar

from fencelock.core.connect_once import ConnectOnce
from fencelock.core.runtime import Endpoint, Runtime
from fencelock.engines.etcd.dial import EtcdConnector
from fencelock.engines.etcd.http2 import block
from fencelock.engines.etcd.link import Link, Refused
from fencelock.engines.etcd.messages import AUTHENTICATE, login, read_token
from fencelock.engines.etcd.place import Place
from fencelock.errors import ClientClosed, EngineUnavailable, FencelockError, OutcomeUnknown

T = TypeVar("T")

DIAL_SECONDS = 5.0
"""How long connecting to the members may take, all of them together."""
SHORTEST_DIAL = 0.05
"""Seconds that each of them is given even when the time is over."""
IDLE_SECONDS = 1.0
"""A link that was not used for so long is looked at before it is used."""
LINKS_KEPT = 8
LOGINS = 3
"""How often a call may log in again: each change of a role makes every token old, and may come between login and call."""
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two rounds of all members."""


class Links:
    """Where the world can share a wire there is one, to one of the members, else one for each who uses it now."""

    def __init__(self, runtime: Runtime, place: Place) -> None:
        self._runtime = runtime
        self._shared = runtime.shares_connections
        self._place = place
        seconds = DIAL_SECONDS if len(place.members) == 1 else max(1.0, DIAL_SECONDS / len(place.members))
        self._connectors = [EtcdConnector(Endpoint(*member, place.tls, seconds)) for member in place.members]
        self._at = int(runtime.random() * len(self._connectors))
        """The member to go to; which one it is at first is left to chance, so that not all clients go to the same."""
        self._token = ""
        self._blocks: dict[tuple[str, str], bytes] = {}
        """By token and method, the headers of a call: a login that another thread makes never leaves an old token here."""
        self._idle: list[Link] = []
        self._all: set[Link] = set()
        self._dialling = ConnectOnce(runtime, f"etcd at {self.address}", self._dial)
        self._closed = False

    @property
    def address(self) -> str:
        """The members, for people."""
        return ",".join(connector.address for connector in self._connectors)

    @property
    def members(self) -> int:
        """How many members the URL names."""
        return len(self._connectors)

    # ------------------------------------------------------------------ asking

    async def request(self, method: str, body: bytes, patience: float) -> bytes:
        """Ask any member what may be asked twice; raise Refused for what every member would refuse."""

        def work(link: Link, left: float) -> Awaitable[bytes]:
            return link.call(method, body, left)

        return await self.run(work, patience)

    async def run(self, work: Callable[[Link, float], Awaitable[T]], patience: float, *, repeat: bool = True) -> T:
        """Have something done, by the next member where one cannot do it.

        Without `repeat` it is done once at most: raise OutcomeUnknown as soon as it may have happened.
        """
        now = self._runtime.now
        until = now() + patience
        tries, maybe, logins = 0, False, 0
        while True:
            link = self._free() or await self._make(maybe, until - now())
            began, token = now(), self._token
            try:
                return await work(link, max(0.001, until - began))
            except OutcomeUnknown as error:
                failure: FencelockError = error
                maybe = True
                self.forsake(link, began)
                if not repeat:
                    raise
            except Refused as refusal:
                if refusal.stranger and self._place.user and logins < LOGINS:
                    logins += 1
                    if self._token == token:  # else somebody has logged in meanwhile
                        self._token = ""  # so that `_free` gives no link, and whoever makes one logs in
                        self._retire(link)
                    continue
                if not refusal.elsewhere:
                    if maybe:  # an earlier try may have been carried out
                        raise OutcomeUnknown(str(refusal.told(link.address))) from refusal
                    raise
                failure = refusal.told(link.address)
                failure.__cause__ = refusal
                maybe = maybe or refusal.maybe
                self._turn(link)
                if maybe and not repeat:
                    raise failure from refusal
            finally:
                self.give(link)
            tries += 1
            rounds, rest = divmod(tries, len(self._connectors))
            pause = (
                0.0
                if rest
                else min(FIRST_PAUSE * 2 ** (rounds - 1), LONGEST_PAUSE) * (0.5 + self._runtime.random() / 2)
            )
            if now() + pause >= until or self._closed:
                if maybe and not isinstance(failure, OutcomeUnknown):
                    raise OutcomeUnknown(str(failure)) from failure
                raise failure
            if pause:
                await self._runtime.sleep(pause)

    async def take(self) -> Link:
        """Return a link that works, as far as can be told without asking; whoever takes one gives it back."""
        return self._free() or await self._make(False, DIAL_SECONDS)

    def give(self, link: Link) -> None:
        """Give a link back, for the next who needs one."""
        if not link.usable:
            if not link.connection.open or not self._shared or link.idle:
                self._drop(link)
        elif not self._shared:
            if self._closed or len(self._idle) >= LINKS_KEPT:
                self._drop(link)
            else:
                self._idle.append(link)

    def quiet(self) -> None:
        """Have etcd tell no more of what nobody waits for: in the blocking world nobody reads it."""
        for _ in range(len(self._idle)):
            try:
                link = self._idle[-1] if self._shared else self._idle.pop(0)
            except IndexError:
                break
            link.watches.rest()
            if not self._shared:
                self.give(link)

    def avoid(self, link: Link) -> None:
        """Go to another member, if there is one: this one has lost the others, or does not let us do what we have to."""
        self._turn(link)

    def leave(self, link: Link) -> None:
        """Close a link that was visited."""
        self._drop(link)

    # ------------------------------------------------------------------ having links

    def _free(self) -> Link | None:
        """Return a link that nobody uses, or that all share; None if one has to be made, if only to log in over it."""
        while self._idle and (self._token or not self._place.user):
            try:
                link = self._idle[-1] if self._shared else self._idle.pop()
            except IndexError:  # another thread was quicker
                break
            now = self._runtime.now()
            idle, link.used = now - link.used, now
            if link.usable and (idle < IDLE_SECONDS or (link.connection.alive() and link.usable)):
                return link
            self._retire(link)
        return None

    async def _make(self, maybe: bool, within: float) -> Link:
        try:
            if not self._shared:
                return await self._dial(within)
            return await self._dialling.once(self._free, self._keep, within)
        except OutcomeUnknown:
            raise
        except EngineUnavailable as error:
            if maybe:
                raise OutcomeUnknown(str(error)) from error
            raise

    def _keep(self, link: Link) -> None:
        self._idle[:] = [link]

    async def _dial(self, within: float) -> Link:
        """Connect to the first member that can be reached, and log in."""
        until = self._runtime.now() + within
        errors: list[EngineUnavailable] = []
        for _ in self._connectors:
            at = self._at % len(self._connectors)
            try:
                return await self.visit(at, max(SHORTEST_DIAL, until - self._runtime.now()))
            except EngineUnavailable as error:
                errors.append(error)
                self._at = at + 1
        if len(errors) == 1:
            raise errors[0]
        raise EngineUnavailable("; ".join(str(error) for error in errors)) from errors[0]

    async def visit(self, at: int, within: float = DIAL_SECONDS) -> Link:
        """Return a new link to this member."""
        connector = self._connectors[at].within(within)
        if self._closed:
            raise ClientClosed("this client is closed; connect again")
        link = Link(self._runtime, connector.address, at, self._block)
        connection = await self._runtime.connect(connector, link.take, link.ended)
        try:
            link.begin(connection)
            self._all.add(link)
            if self._place.user and not self._token:
                await self._log_in(link, min(within, DIAL_SECONDS))
        except BaseException:
            self._all.discard(link)
            connection.close()
            raise
        return link

    async def _log_in(self, link: Link, within: float) -> None:
        place = self._place
        try:
            answer = await link.call(AUTHENTICATE, login(place.user, place.password), within)
        except OutcomeUnknown as error:
            raise EngineUnavailable(f"etcd at {link.address}: no answer to the log-in") from error
        except Refused as refusal:
            if refusal.elsewhere:
                raise EngineUnavailable(str(refusal.told(link.address))) from refusal
            raise refusal.told(link.address) from refusal
        self._blocks.clear()
        self._token = read_token(answer)

    def _block(self, method: str) -> bytes:
        """Return the headers of a call. A member that has lost its leader is to say so rather than to wait."""
        token = self._token
        found = self._blocks.get((token, method))
        if found is None:
            headers = [
                (":method", "POST"), (":scheme", "http" if self._place.tls is None else "https"), (":path", method),
                (":authority", self._connectors[0].address), ("te", "trailers"), ("content-type", "application/grpc"),
                ("hasleader", "true"),
            ]  # fmt: skip
            if token and method != AUTHENTICATE:
                headers.append(("token", token))
            found = self._blocks[token, method] = block(tuple(headers))
        return found

    # ------------------------------------------------------------------ leaving them

    def forsake(self, link: Link, began: float) -> None:
        """Take in that a question got no answer: a member that said nothing else since is not to be asked again."""
        if link.connection.open and link.heard > began and len(self._connectors) == 1:
            return  # it is only slow, and there is no other
        silent = link.heard <= began or not link.connection.open
        if not self._shared:
            for other in list(self._idle):
                if other.member == link.member:
                    other.used = -inf  # whatever broke this one may have broken them all: look before they are used
        self._turn(link)
        if silent:
            self._drop(link)

    def _turn(self, link: Link) -> None:
        """Go to the next member."""
        if len(self._connectors) > 1:
            if self._at % len(self._connectors) == link.member:
                self._at = link.member + 1
            self._retire(link)
            for other in list(self._idle):
                if other.member == link.member and not self._shared:
                    other.retired = True

    def _retire(self, link: Link) -> None:
        """Let what is under way on a link end, and begin nothing more there."""
        link.retired = True
        if self._shared and link in self._idle:
            self._idle.remove(link)
        link.watches.close()
        if link.idle or not link.connection.open:
            self._drop(link)

    def _drop(self, link: Link) -> None:
        self._all.discard(link)
        if self._shared and link in self._idle:
            self._idle.remove(link)
        link.connection.close()

    def close(self) -> None:
        """Close all links; whoever waits on one learns of it."""
        self._closed = True
        for link in list(self._all):
            link.connection.close()
        self._all.clear()
        self._idle.clear()

    def forget(self) -> None:
        """Begin anew in a forked child."""
        for link in self._all:
            link.connection.forget()
        self._all, self._idle = set(), []
        self._dialling.forget()
