"""One connection: statements go out in order, and answers come back in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from fencelock.backends.mysql.packets import QUIT, query
from fencelock.core.world import NO_ANSWER, Wire, World


class Reply:
    """The answer to one statement, once it is there."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: Any = NO_ANSWER


class Link:
    """One session of the server's."""

    __slots__ = ("_due", "_world", "bell", "first", "greeting", "host", "id", "made", "pooled", "ttl", "used", "wire")

    def __init__(self, world: World) -> None:
        self._world = world
        self.greeting = Reply()
        self._due: deque[Reply] = deque((self.greeting,))
        self.bell = world.bell()
        self.id = 0
        self.host = ""
        """Where the server sees us: with the number of the session, what tells it from all others there ever were."""
        self.first = 0
        """A token from before this session: all that are minted in it are above, unless somebody has emptied the table."""
        self.made = world.now()
        self.ttl = 0
        """Seconds after which the server ends the session if nothing is heard of it."""
        self.used = 0.0
        self.pooled = False
        """Whether it was used before: the server may have hung up on it meanwhile."""
        self.wire: Wire

    @property
    def open(self) -> bool:
        """Whether it can be used."""
        return self.wire.open

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
            self.wire.close()

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
        self.wire.tell(b"".join([query(statement) for statement in statements]))
        return replies

    async def hear(self, replies: Sequence[Reply], timeout: float) -> bool:
        """Wait for answers, for so long at most; return whether all are there."""
        last = replies[-1]
        until = self._world.now() + timeout
        while last.answer is NO_ANSWER and self.wire.open:
            left = until - self._world.now()
            if left <= 0:
                self.wire.alive()  # if the process was stopped meanwhile, they are there
                break
            self.bell.clear()
            await self._world.listen([self.wire], self.bell, left)
        return last.answer is not NO_ANSWER

    def close(self) -> None:
        """End the session."""
        if self.wire.open and self.idle:
            self.wire.tell(QUIT)
        self.wire.close()


async def hear_all(world: World, asked: Sequence[tuple[Link, Reply]], timeout: float) -> None:
    """Wait for one answer on each of several links, for so long at most."""
    until = world.now() + timeout
    bell = world.bell()
    for link, _ in asked:
        link.bell = bell
    left = list(asked)
    while left and (rest := until - world.now()) > 0:
        bell.clear()
        left = [(link, reply) for link, reply in left if reply.answer is NO_ANSWER and link.open]
        if left:
            await world.listen([link.wire for link, _ in left], bell, rest)
    for link, reply in asked:
        if reply.answer is NO_ANSWER:
            link.wire.alive()  # if the process was stopped meanwhile, it is there
        link.bell = world.bell()  # not to be shared any longer: whoever clears it would clear it for the others
