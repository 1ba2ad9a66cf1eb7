"""Asking etcd: how long each question may take, and what an answer tells by the way, of the cluster and of a session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from fencelock.backends.etcd.link import Link, Refused
from fencelock.backends.etcd.sessions import FRESH, Lease, Sessions, patience
from fencelock.core.backend import FIRST_CONTACT, GRACE, LONGEST
from fencelock.errors import ClientClosed, FencelockError, Unanswered

if TYPE_CHECKING:
    from fencelock.backends.etcd.facts import Facts
    from fencelock.backends.etcd.links import Links
    from fencelock.core.world import World

SHORTEST_LEFT = 0.05
"""Seconds that the last question gets when the time is over: it may have an answer at once."""

A = TypeVar("A", bound=tuple[Any, ...])
"""What an answer is read as: its header comes first."""


class Limit:
    """How long an attempt may take. Each of its questions has a third of the ttl; who has less time, that for all.

    `met` is whether any member has ever answered.
    """

    def __init__(self, world: World, ttl: float, within: float | None, *, met: bool = True) -> None:
        self._world = world
        self._each = patience(ttl)
        self._until = inf if within is None else world.now() + max(within, GRACE if met else FIRST_CONTACT)

    @property
    def left(self) -> float:
        """Seconds for the next question."""
        return max(SHORTEST_LEFT, min(self._each, self._until - self._world.now()))


class Asking:
    """What a client asks any member, until it is closed."""

    def __init__(self, world: World, links: Links, facts: Facts, sessions: Sessions) -> None:
        self.facts = facts
        self.closed = False
        self._world = world
        self._links = links
        self._sessions = sessions

    def check_open(self) -> None:
        """Raise if the client is closed."""
        if self.closed:
            raise ClientClosed("this client is closed; connect again")

    def told(self, refusal: Refused) -> FencelockError:
        """Return the error to raise for what every member would refuse."""
        return refusal.told(self._links.address)

    def ask(self, method: str, body: bytes, seconds: float = LONGEST) -> Coroutine[Any, Any, bytes]:
        """Ask what may be asked twice."""
        return self.run(lambda link, left: link.call(method, body, left), seconds)

    def ask_once(self, method: str, body: bytes) -> Coroutine[Any, Any, bytes]:
        """Ask what must not be carried out twice; raise Unanswered if the answer is lost."""
        return self.run(lambda link, left: link.call(method, body, left), LONGEST, repeat=False)

    async def run(
        self, work: Callable[[Link, float], Awaitable[bytes]], seconds: float, *, repeat: bool = True
    ) -> bytes:
        """Have something asked, once or, if `repeat`, again when the answer was lost."""
        self.check_open()
        try:
            return await self._links.run(work, seconds, repeat=repeat)
        except Refused as refusal:
            raise self.told(refusal) from refusal

    async def ask_alive(
        self,
        session: Lease,
        method: str,
        body: bytes,
        read: Callable[[bytes], A],
        limit: Limit,
        renew: bool = False,
    ) -> tuple[A, int]:
        """Ask for a majority's answer, along with a sign of life if the last one is some time ago.

        Return it, and how often it was asked for: the earlier times may still arrive.
        """
        floor = self.facts.revision
        tries = 0

        async def work(link: Link, left: float) -> A:
            nonlocal tries
            tries += 1
            if not self._sessions.stale(session, 0.0 if renew else FRESH):
                return read(await link.call(method, body, left))
            until = self._world.now() + left
            knock = self._sessions.knock(session, link)
            try:
                answer = read(await link.call(method, body, left))
            except BaseException:
                link.give_up(knock[0])
                raise
            rest = max(0.001, until - self._world.now())
            try:
                await self._sessions.heard(session, link, knock, answer[0].term, rest)
            except (Unanswered, Refused):
                pass  # then the session is as old as it was
            return answer

        answer = await self._links.run(work, limit.left)
        self.facts.take(answer[0], floor)
        return answer, tries
