"""All links to one server: having one that works, asking over any of them, and asking again when one is broken."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from os import urandom
from typing import Any

from fencelock.core.connect_once import ConnectOnce
from fencelock.core.runtime import NO_REPLY, Command, Runtime
from fencelock.engines.redis.dial import DIAL_SECONDS, RedisConnector, ServerError
from fencelock.engines.redis.greeting import before_tls, look_at
from fencelock.engines.redis.link import Link, all_there
from fencelock.engines.redis.scripts import Script
from fencelock.engines.redis.trouble import ANEW, check
from fencelock.errors import ClientClosed, EngineUnavailable, OutcomeUnknown

IDLE_SECONDS = 1.0
"""A link that was not used for so long is looked at before it is used: servers hang up on the idle."""
LINKS_KEPT = 8
OWED_KEPT = 1000


class Links:
    """All links to one server. Where the world can share a wire there is one, else one for each who uses it now."""

    def __init__(
        self,
        runtime: Runtime,
        connector: RedisConnector,
        namespace: str,
        patience: float = DIAL_SECONDS,
    ) -> None:
        self.address = connector.address
        self.run_id: bytes | None = None
        self.stuck = False
        """Whether the last link was given up because its server owed an answer for too long."""
        self.owed: deque[bytes] = deque(maxlen=OWED_KEPT)
        """What has to be undone there as soon as it can be reached again, rather than when its ttl is over."""
        self._patience = patience
        self._runtime = runtime
        self._shared = runtime.shares_connections
        self._now = runtime.now
        self._connector = connector
        self._namespace = namespace
        self._idle: list[Link] = []
        self._all: set[Link] = set()
        self._dialling = ConnectOnce(runtime, f"Redis at {self.address}", self.connect)
        self._closed = False

    # ------------------------------------------------------------------ having one

    async def take(self, patience: float) -> Link:
        """Return a link that works, as far as can be told without asking; whoever takes one gives it back."""
        return self.idle(patience) or await self.make()

    async def pay(self, link: Link, within: float = 0.0) -> None:
        """Have undone what could not be undone before; all of that may be repeated. For so long answers are waited for.

        What is refused, or lost with the link meanwhile, is still owed.
        """
        debts = []
        with suppress(IndexError):  # another thread may be at it
            while True:
                debts.append((link.connection, self.owed.popleft()))
        try:
            answers = await self._runtime.request_all(
                debts, within or self._patience, all_there if within else _at_once
            )
        except BaseException:  # cancelled: whether they arrived is not known
            self.owed.extend(debt for _, debt in debts)
            raise
        for (connection, debt), answer in zip(debts, answers, strict=True):
            if isinstance(answer, ServerError) or (answer is NO_REPLY and not connection.open):
                self.owed.append(debt)

    async def settle(self, within: float) -> None:
        """Have it undone before the end, if the server can be reached: nobody will come back to do it."""
        with suppress(EngineUnavailable, ClientClosed):
            for _ in range(2):  # the first link may be one that the server has closed
                link = self.idle(within) or await self.make(within)
                try:
                    await self.pay(link, within)
                finally:
                    self.give(link)
                if not self.owed:
                    return

    async def make(self, within: float = inf) -> Link:
        """Return a new link, or where wires are shared the one that others are making."""
        if not self._shared:
            return await self.connect(within)
        return await self._dialling.once(self._last, self._keep, within)

    @property
    def connected(self) -> bool:
        """Whether there is a link, idle or in use."""
        return bool(self._all)

    def idle(self, patience: float) -> Link | None:
        """Return a link that was made before, if there is one that works."""
        while True:
            try:
                link = self._idle[-1] if self._shared else self._idle.pop()
            except IndexError:
                break
            if self.usable(link, patience):
                return link
            self.drop(link)
        if self._closed:
            raise ClientClosed("this client is closed; connect again")
        return None

    def usable(self, link: Link, patience: float) -> bool:
        """Return whether a link works: one that has owed an answer for longer than we would wait is given up.

        Not if it only is as slow as ever: another would be no faster, and others may have the patience to use this one.
        """
        connection, now = link.connection, self._now()
        since = connection.oldest_pending_since
        if since is not None and now - since >= max(patience, 2 * connection.pace):
            # The answer may be there: whoever had enough of them does not read the rest.
            if not connection.alive():
                return False
            since = connection.oldest_pending_since
            if since is not None and now - since >= max(patience, 2 * connection.pace):
                self.stuck = True
                return False
        idle, link.used = now - link.used, now
        return connection.open if idle < IDLE_SECONDS else connection.alive()

    def give(self, link: Link) -> None:
        """Give a link back, for the next who needs one."""
        if self._shared:
            return
        if link.connection.open and len(self._idle) < LINKS_KEPT:
            if link.calls:
                link.calls.clear()
            self._idle.append(link)
            return
        if not link.connection.open:
            for other in list(self._idle):
                other.used = -inf  # whatever broke this one may have broken them all: look before they are used
        self.drop(link)

    def drop(self, link: Link) -> None:
        """Close a link for good."""
        self.owed.extend(link.undos)
        link.undos.clear()
        self._all.discard(link)
        if self._shared and link in self._idle:
            self._idle.remove(link)
        link.connection.close()

    def _last(self) -> Link | None:
        return self._idle[-1] if self._idle and self._idle[-1].connection.open else None

    def _keep(self, link: Link) -> None:
        self._idle[:] = [link]

    async def connect(self, within: float = inf) -> Link:
        """Connect, and see that the server is one that we can work with; both take no longer than that, or our patience."""
        link = Link(f"{self._namespace.replace(':', '/')}/call/{urandom(12).hex()}")
        link.connection = await self._runtime.connect(self._connector.within(within), link.heard, link.ended)
        self._all.add(link)
        try:
            patience = min(self._patience, within)
            info = await before_tls(self._runtime, link, self.address, self._namespace, patience)
            self.run_id = look_at(info, self.run_id, self.address)
            if self._closed:
                raise ClientClosed("this client is closed; connect again")
        except BaseException:
            self.drop(link)
            raise
        link.used = self._runtime.now()
        self.stuck = False
        return link

    # ------------------------------------------------------------------ asking

    async def run(
        self,
        script: Script,
        command: bytes,
        patience: float,
        silent: float | None = None,
    ) -> Any:
        """Run a script, on any link; repeat it right away when a connection turns out to be broken, twice at most.

        A server that has owed an answer for longer than `silent`, or cannot be reached, is not waited for any longer
        than that either.
        """
        again = 2
        while True:
            link = self.idle(patience) or await self.make(inf if silent is None else silent)
            if (
                silent is not None
                and (since := link.connection.oldest_pending_since) is not None
                and self._now() - since >= silent
            ):
                patience = min(patience, silent)
            try:
                answer = await link.connection.request(command, patience)
                return (
                    answer
                    if type(answer) is not ServerError
                    else await self.mend(link, script, command, patience, answer)
                )
            except OutcomeUnknown:
                self.doubt(link)
                if not again or link.connection.open:
                    raise
                again -= 1  # an idle connection that the server had closed
            finally:
                self.give(link)

    async def run_once(self, script: Script, command: bytes, patience: float) -> Any:
        """Run a script that must not run twice; raise OutcomeUnknown if its reply is lost."""
        link = self.idle(patience)
        if (
            link is not None and not link.connection.alive()
        ):  # whatever its age: nothing was sent, so another may be used
            self.drop(link)
            link = None
        link = link or await self.make()
        try:
            answer = await link.connection.request(command, patience)
            if type(answer) is ServerError:  # NOSCRIPT: it did not run
                answer = await self.mend(link, script, command, patience, answer)
            return answer
        except OutcomeUnknown:
            self.doubt(link)
            raise
        finally:
            self.give(link)

    async def run_many(self, script: Script, calls: Sequence[bytes], patience: float, silent: float) -> list[Any]:
        """Run a script several times, all sent at once; otherwise like `run`."""
        if len(calls) == 1:
            return [await self.run(script, calls[0], patience, silent)]
        again = True
        while True:
            link = self.idle(patience) or await self.make(silent)
            try:
                return await self._run_on(link, script, calls, patience)
            except OutcomeUnknown:
                if not again or link.connection.open:
                    raise
                again = False  # an idle connection that the server had closed; everything may be repeated
            finally:
                self.give(link)

    async def plain(self, command: Command, patience: float) -> Any:
        """Send a command that may be repeated, on any link."""
        again = True
        while True:
            link = await self.take(patience)
            try:
                answer = await link.connection.request(command, patience)
                self.check(answer, link)
                return answer
            except OutcomeUnknown:
                if not again or link.connection.open:
                    raise
                again = False
            finally:
                self.give(link)

    async def _run_on(self, link: Link, script: Script, calls: Sequence[bytes], patience: float) -> list[Any]:
        answers = await self._runtime.request_all([(link.connection, call) for call in calls], patience, all_there)
        for place, answer in enumerate(answers):
            if type(answer) is ServerError and answer.kind == "NOSCRIPT":
                answers[place] = answer = await link.connection.request(script.teach(calls[place]), patience)
            self.check(answer, link)
        return answers

    def doubt(self, link: Link) -> None:
        """Use no link again that was last used before this one went silent."""
        self._drop_idle([other for other in self._idle if other.used < link.used])

    def _drop_idle(self, links: list[Link]) -> None:
        for link in links:
            with suppress(ValueError):  # another thread has just taken it, and will see for itself
                self._idle.remove(link)
                self.drop(link)

    async def mend(self, link: Link, script: Script, command: bytes, patience: float, error: ServerError) -> Any:
        """Teach the server a script that it does not know, and return the answer; raise what else is wrong."""
        answer: Any = error
        if error.kind == "NOSCRIPT":
            answer = await link.connection.request(script.teach(command), patience)
        self.check(answer, link)
        return answer

    async def scan(self, pattern: str, patience: float) -> set[str]:
        """Return all keys that match a pattern."""
        found: set[str] = set()
        cursor = 0
        while True:
            after, keys = await self.plain(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000), patience)
            found.update(key.decode() for key in keys)
            cursor = int(after)
            if not cursor:
                return found

    def check(self, answer: Any, link: Link) -> None:
        """Raise what is to be raised for a server's error."""
        if isinstance(answer, ServerError) and answer.kind in ANEW:
            self.drop(link)
            self._drop_idle(list(self._idle))  # they lead to the same server
        check(answer, self.address)

    # ------------------------------------------------------------------ the end

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
        self._all = set()
        self._idle.clear()
        self._dialling.forget()
        self.owed.clear()


def _at_once(_: Sequence[Any]) -> bool:
    return True


def literally(text: str) -> str:
    """Return a pattern that matches the text and nothing else."""
    return "".join(f"\\{character}" if character in "*?[]\\^-" else character for character in text)
