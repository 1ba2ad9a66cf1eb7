"""Asking etcd: how long each question may take, and what an answer tells by the way, of the cluster and of a session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from fencelock.core.engine import FIRST_CONNECT_TIMEOUT, MAX_REPLY_TIMEOUT, MIN_REPLY_TIMEOUT
from fencelock.engines.etcd.link import Link, Refused
from fencelock.engines.etcd.sessions import FRESH, Lease, Sessions, patience
from fencelock.errors import ClientClosed, FencelockError, OutcomeUnknown

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime
    from fencelock.engines.etcd.facts import Facts
    from fencelock.engines.etcd.links import Links

SHORTEST_LEFT = 0.05
"""Seconds that the last question gets when the time is over: it may have an answer at once."""

A = TypeVar("A", bound=tuple[Any, ...])
"""What an answer is read as: its header comes first."""


class Limit:
    """How long an attempt may take. Each of its questions has a third of the ttl; who has less time, that for all.

    `met` is whether any member has ever answered.
    """

    def __init__(self, runtime: Runtime, ttl: float, within: float | None, *, met: bool = True) -> None:
        self._runtime = runtime
        self._each = patience(ttl)
        self._until = (
            inf if within is None else runtime.now() + max(within, MIN_REPLY_TIMEOUT if met else FIRST_CONNECT_TIMEOUT)
        )

    @property
    def left(self) -> float:
        """Seconds for the next question."""
        return max(SHORTEST_LEFT, min(self._each, self._until - self._runtime.now()))


class Asking:
    """What a client asks any member, until it is closed."""

    def __init__(self, runtime: Runtime, links: Links, facts: Facts, sessions: Sessions) -> None:
        self.facts = facts
        self.closed = False
        self._runtime = runtime
        self._links = links
        self._sessions = sessions

    def check_open(self) -> None:
        """Raise if the client is closed."""
        if self.closed:
            raise ClientClosed("this client is closed; connect again")

    def told(self, refusal: Refused) -> FencelockError:
        """Return the error to raise for what every member would refuse."""
        return refusal.told(self._links.address)

    async def request(self, method: str, body: bytes, seconds: float = MAX_REPLY_TIMEOUT) -> bytes:
        """Ask what may be asked twice."""
        return (await self.ask_counted(method, body, seconds))[0]

    async def ask_counted(self, method: str, body: bytes, seconds: float = MAX_REPLY_TIMEOUT) -> tuple[bytes, int]:
        """Ask, again if there is no reply; return the reply and how often it was asked.

        After the first time, a transaction that failed may have failed because an earlier try was carried out.
        """
        self.check_open()
        tries = 0

        def work(link: Link, left: float) -> Awaitable[bytes]:
            nonlocal tries
            tries += 1
            return link.call(method, body, left)

        try:
            return await self._links.run(work, seconds), tries
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
            until = self._runtime.now() + left
            knock = self._sessions.knock(session, link)
            try:
                answer = read(await link.call(method, body, left))
            except BaseException:
                link.give_up(knock[0])
                raise
            rest = max(0.001, until - self._runtime.now())
            try:
                await self._sessions.heard(session, link, knock, answer[0].term, rest)
            except (OutcomeUnknown, Refused):
                pass  # then the session is as old as it was
            return answer

        answer = await self._links.run(work, limit.left)
        self.facts.take(answer[0], floor)
        return answer, tries
