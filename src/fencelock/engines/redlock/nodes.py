"""The nodes of a Redlock: asked all at once, while none of them knows of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fencelock.core.clock import PATIENT, Deadline
from fencelock.core.engine import FIRST_CONNECT_TIMEOUT
from fencelock.core.runtime import NO_REPLY, Runtime
from fencelock.engines.redis.dial import RedisConnector, ServerError
from fencelock.engines.redis.link import Link
from fencelock.engines.redis.scripts import Script
from fencelock.engines.redlock.node import Node
from fencelock.errors import EngineUnavailable, InvalidURL, OutcomeUnknown

LEAST = 0.2
"""Seconds that a node has for its answer at least, when the caller's time is over."""
STRAGGLERS = 0.1
"""Seconds for which the rest is waited for at the first connection, once a majority is there."""
LOOK_SOON = 0.002

Enough = Callable[[Sequence[Any]], bool]
"""Tells whether more answers would change nothing."""


class Nodes:
    """All of them, and what a majority is."""

    def __init__(self, runtime: Runtime, connectors: Sequence[RedisConnector], prefix: str) -> None:
        self._runtime = runtime
        self._nodes = [Node(runtime, connector, prefix) for connector in connectors]
        self.majority = len(connectors) // 2 + 1
        self.met = False
        """Whether they were connected to, as far as they could be."""
        self._run_ids: list[bytes | None] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    async def take(self, patience: float, limit: Deadline = PATIENT) -> list[Link | None]:
        """Return a link to every node that can be reached; raise nothing if there are too few.

        All that have to be dialled share one patience: some that hang must not cost each its own, as leases run out
        meanwhile. Nothing is begun after the limit.
        """
        links: list[Link | None] = []
        if not self.met:
            await self._meet(patience, limit)
        dialling = self._share(patience, limit)
        try:
            for node in self._nodes:
                ready = node.links.idle(patience) if node.error is None and not node.links.owed else None
                links.append(ready or await node.take(patience, dialling))
            if links.count(None) > len(links) - self.majority:
                await self._insist(links, patience, limit)
            self._tell_apart()
        except BaseException:
            self.give(links)
            raise
        return links

    async def refresh(self, links: list[Link | None], patience: float, limit: Deadline) -> None:
        """See that there is a link that works to every node that can be reached."""
        dialling = self._share(patience, limit)
        for place, (node, link) in enumerate(zip(self._nodes, links, strict=True)):
            if link is not None and node.links.usable(link, patience):
                continue
            if link is not None:
                links[place] = None
                node.links.drop(link)
            links[place] = await node.take(patience, dialling)

    def _share(self, patience: float, limit: Deadline) -> Deadline:
        return Deadline(self._runtime.now, limit.at_most(patience))

    async def _meet(self, patience: float, limit: Deadline) -> None:
        """Connect to all of them at once: one that hangs must not hold up the others."""
        for node in self._nodes:
            if node.is_new:
                node.connect(patience, FIRST_CONNECT_TIMEOUT)
        now = self._runtime.now
        until = now() + limit.at_most(FIRST_CONNECT_TIMEOUT + STRAGGLERS)
        while (left := sum(node.is_dialled for node in self._nodes)) and now() < until:
            if len(self._nodes) - left - sum(node.error is not None for node in self._nodes) >= self.majority:
                until = min(until, now() + STRAGGLERS)
            await self._runtime.sleep(LOOK_SOON)
        self.met = True

    async def _insist(self, links: list[Link | None], patience: float, limit: Deadline) -> None:
        """Dial the nodes that are out of reach, as there are too few without them."""
        until = self._share(patience, limit)
        for place in sorted(range(len(links)), key=lambda place: self._nodes[place].failed):
            if links.count(None) <= len(links) - self.majority or until.passed:
                break
            if links[place] is None:
                links[place] = await self._nodes[place].insist(patience, until, limit)

    def _tell_apart(self) -> None:
        """Refuse a server that is named twice: it would count as two nodes of the majority."""
        run_ids = [node.links.run_id for node in self._nodes]
        if run_ids == self._run_ids:
            return
        seen: dict[bytes, Node] = {}
        for node, run_id in zip(self._nodes, run_ids, strict=True):
            if run_id is not None and (other := seen.setdefault(run_id, node)) is not node:
                raise InvalidURL(
                    f"{other.links.address} and {node.links.address} are the same Redis server; Redlock needs nodes that "
                    "fail on their own"
                )
        self._run_ids = run_ids

    def give(self, links: Sequence[Link | None]) -> None:
        """Give back what was taken."""
        for node, link in zip(self._nodes, links, strict=False):
            if link is not None:
                node.links.give(link)

    async def fan(
        self,
        script: Script,
        calls: Sequence[bytes],
        links: list[Link | None],
        patience: float,
        enough: Enough,
        owe: bytes | None = None,
        certain: bool = False,
        repeat: bool = True,
        limit: Deadline = PATIENT,
    ) -> list[Any]:
        """Run a script on every node that has a link, with a call for each; one answer for each node.

        Where a connection turns out to be broken, asked again over a new one, which takes its place in `links`: a server
        hangs up on the idle, and what it had done before it broke must not be left there. With `owe`, a node that could
        not be reached, or refused, or has not answered when its connection breaks, is asked that as soon as it is back.
        With `certain`, 0 from a node that was asked again counts as no answer: it may have done it the first time. Without
        `repeat` no node is asked again.
        """
        answers = await self._fan_once(script, calls, links, patience, enough)
        if repeat and not enough(answers):
            again: list[Link | None] = [None] * len(links)
            dialling = self._share(patience, limit)
            for place, (node, link) in enumerate(zip(self._nodes, links, strict=True)):
                if link is not None and answers[place] is NO_REPLY and not link.connection.open:
                    links[place] = None
                    node.links.give(link)
                    links[place] = again[place] = await node.take(patience, dialling)
            if any(again):
                more = await self._fan_once(script, calls, again, patience, lambda more: enough([*answers, *more]))
                answers = [
                    old if new is NO_REPLY or (certain and new == 0) else new
                    for old, new in zip(answers, more, strict=True)
                ]
        undo = None if owe is None or all(map(is_answer, answers)) else script.teach(owe)
        for place, (node, link, answer) in enumerate(zip(self._nodes, links, answers, strict=True)):
            if undo is not None and answer is NO_REPLY and link is not None and link.connection.open:
                node.sent_undo(link, undo)
            elif undo is not None and not is_answer(answer):
                node.links.owed.append(undo)
            if answer is not NO_REPLY and link is not None and not node.answered(answer, link):
                links[place] = None
        return answers

    async def _fan_once(
        self, script: Script, calls: Sequence[bytes], links: Sequence[Link | None], patience: float, enough: Enough
    ) -> list[Any]:
        if enough is at_once:  # what nobody waits for cannot be repeated if the script has to be taught first
            calls = [script.teach(call) for call in calls]
        asked = [(link.connection, call) for link, call in zip(links, calls, strict=True) if link is not None]
        answers = await self._runtime.request_all(asked, patience, enough)
        unknown = [at for at, answer in enumerate(answers) if type(answer) is ServerError and answer.kind == "NOSCRIPT"]
        if unknown:
            taught = [(connection, script.teach(call)) for connection, call in (asked[at] for at in unknown)]
            for at, answer in zip(unknown, await self._runtime.request_all(taught, patience, never), strict=True):
                answers[at] = answer
        if len(asked) == len(links):
            return answers
        found = iter(answers)
        return [NO_REPLY if link is None else next(found) for link in links]

    async def most(
        self,
        script: Script,
        call: bytes,
        patience: float,
        enough: Enough | None = None,
        *,
        owe: bool = False,
        certain: bool = False,
        repeat: bool = True,
        limit: Deadline = PATIENT,
    ) -> list[Any]:
        """Run a script on all nodes; raise unless a majority answered. They are waited for as long as it is not `enough`.

        The limit is for connecting.
        """
        links = await self.take(patience, limit)
        try:
            calls, undo = [call] * len(links), call if owe else None
            answers = await self.fan(script, calls, links, patience, enough or never, undo, certain, repeat, limit)
        finally:
            self.give(links)
        reached = sum(map(is_answer, answers))
        if reached < self.majority:
            raise self.too_few(reached, answers, sent=True)
        return answers

    def too_few(self, reached: int, answers: Sequence[Any] = (), *, sent: bool = False) -> EngineUnavailable:
        """Say who is out of reach, and why."""
        reasons = []
        for place, node in enumerate(self._nodes):
            answer = answers[place] if answers else NO_REPLY
            if isinstance(answer, ServerError):
                reasons.append(f"{node.links.address}: {answer}")
            elif not is_answer(answer):
                reasons.append(str(node.error) if node.error is not None else f"{node.links.address}: no answer")
        kind = OutcomeUnknown if sent else EngineUnavailable
        return kind(
            f"{reached} of {len(self._nodes)} Redlock nodes answered, and {self.majority} are needed: {'; '.join(reasons)}"
        )

    def close(self) -> None:
        """Close all connections."""
        for node in self._nodes:
            node.links.close()

    def forget(self) -> None:
        """Begin anew in a forked child."""
        self.met = False
        for node in self._nodes:
            node.forget()


def is_answer(answer: Any) -> bool:
    """Return whether a node said what it was asked for, rather than nothing or an error."""
    return answer is not NO_REPLY and type(answer) is not ServerError


def reply_timeout(limit: Deadline, patience: float) -> float:
    """Return what is left for an answer: connecting, which took its time, must not leave a node none."""
    return max(limit.at_most(patience), min(patience, LEAST))


def at_once(_: Sequence[Any]) -> bool:
    """Wait for nobody."""
    return True


def never(_: Sequence[Any]) -> bool:
    """Wait for all."""
    return False
