"""One connection: statements go out in order, and answers come back in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from fencelock.core.runtime import NO_REPLY, Connection, Runtime
from fencelock.engines.mysql.packets import QUIT, query


class Reply:
    """The answer to one statement, once it is there."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: Any = NO_REPLY


class Link:
    """One session of the server's."""

    __slots__ = (
        "_due",
        "_runtime",
        "bell",
        "connection",
        "first",
        "greeting",
        "host",
        "id",
        "made",
        "pooled",
        "ttl",
        "used",
    )

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.greeting = Reply()
        self._due: deque[Reply] = deque((self.greeting,))
        self.bell = runtime.push_event()
        self.id = 0
        self.host = ""
        """Where the server sees us: with the number of the session, what tells it from all others there ever were."""
        self.first = 0
        """A token from before this session: all that are minted in it are above, unless somebody has emptied the table."""
        self.made = runtime.now()
        self.ttl = 0
        """Seconds after which the server ends the session if nothing is heard of it."""
        self.used = 0.0
        self.pooled = False
        """Whether it was used before: the server may have hung up on it meanwhile."""
        self.connection: Connection

    @property
    def open(self) -> bool:
        """Whether it can be used."""
        return self.connection.open

    @property
    def idle(self) -> bool:
        """Whether the server owes nothing."""
        return not self._due

    def heard(self, answer: Any) -> None:
        """Take in an answer. What nobody asked for is the server's good-bye: it was killed, or idle for too long."""
        if self._due:
            self._due.popleft().answer = answer
            self.bell.set()
        else:
            self.connection.close()

    def ended(self) -> None:
        """Wake whoever waits."""
        self.bell.set()

    def expect(self) -> Reply:
        """Return the answer to something that is said by other means."""
        reply = Reply()
        self._due.append(reply)
        return reply

    def expect_nothing(self) -> None:
        """Take back that a greeting is expected: it was heard before TLS began."""
        self._due.clear()

    def say(self, statements: Sequence[str]) -> list[Reply]:
        """Send statements, all at once; return their answers to come."""
        replies = [self.expect() for _ in statements]
        self.connection.tell(b"".join([query(statement) for statement in statements]))
        return replies

    async def hear(self, replies: Sequence[Reply], timeout: float) -> bool:
        """Wait for answers, for so long at most; return whether all are there."""
        last = replies[-1]
        until = self._runtime.now() + timeout
        while last.answer is NO_REPLY and self.connection.open:
            left = until - self._runtime.now()
            if left <= 0:
                self.connection.alive()  # if the process was stopped meanwhile, they are there
                break
            self.bell.clear()
            await self._runtime.wait_for_push([self.connection], self.bell, left)
        return last.answer is not NO_REPLY

    def close(self) -> None:
        """End the session."""
        if self.connection.open and self.idle:
            self.connection.tell(QUIT)
        self.connection.close()


async def hear_all(runtime: Runtime, asked: Sequence[tuple[Link, Reply]], timeout: float) -> None:
    """Wait for one answer on each of several links, for so long at most."""
    until = runtime.now() + timeout
    bell = runtime.push_event()
    for link, _ in asked:
        link.bell = bell
    left = list(asked)
    while left and (rest := until - runtime.now()) > 0:
        bell.clear()
        left = [(link, reply) for link, reply in left if reply.answer is NO_REPLY and link.open]
        if left:
            await runtime.wait_for_push([link.connection for link, _ in left], bell, rest)
    for link, reply in asked:
        if reply.answer is NO_REPLY:
            link.connection.alive()  # if the process was stopped meanwhile, it is there
        link.bell = runtime.push_event()  # not to be shared any longer: whoever clears it would clear it for the others
