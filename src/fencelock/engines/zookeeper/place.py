"""A claim's place in line: its node, whom it waits for, and how whoever waits is woken."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from fencelock.core.runtime import Event, Runtime
from fencelock.core.sessions import Session
from fencelock.engines.zookeeper.link import Link
from fencelock.model import Claim


class News(NamedTuple):
    """Whether a claim that waits may hold its name, as soon as it hears of a node ahead that …"""

    gone: bool
    """… it is gone, and nothing more."""
    passed: bool
    """… it held the name, alone, and gave it back: all before it are gone, too."""


class Place:
    """A claim of ours, on its session. Its node has no name before ZooKeeper has answered."""

    __slots__ = (
        "_ahead",
        "_bell",
        "_called",
        "claim",
        "first",
        "gone",
        "kept",
        "looked",
        "node",
        "parent",
        "seen",
        "session",
        "token",
        "zxid",
    )

    def __init__(self, claim: Claim, session: Session[Link], parent: str) -> None:
        self.claim = claim
        self.kept = Claim(claim.name, session.ttl, *claim[2:])
        """The claim as the engine keeps it: for as long as its session."""
        self.session = session
        self.parent = parent
        self.node: str | None = None
        self.zxid = 0
        """ZooKeeper's number of the change that made the node: those ahead of it were made before, and not changed since."""
        self.token = 0
        """Of the layout that the node was made under: that may be another by the time of the grant."""
        self.gone = False
        """Whether the node is known to be gone: taken away, or over with its session."""
        self.first = False
        """Whether it came to hold its name alone, and so all before it are gone for ever."""
        self._called: str | None = None
        """The node of ours for which the last one that stood in the way is known to be gone: a later one is further back."""
        self.seen: list[str] | None = None
        """Who else is there, if somebody has looked for us."""
        self.looked = 0.0
        """When it was last asked whether the node is there, or made."""
        self._bell: Event | None = None
        self._ahead: dict[str, News] = {}

    @property
    def path(self) -> str:
        """The claim's node."""
        return f"{self.parent}/{self.node}"

    @property
    def called(self) -> bool:
        """Whether nobody stands in the way of the claim's node any more."""
        return self._called is not None and self._called == self.node

    def ring(self) -> None:
        """Wake whoever waits."""
        if self._bell is not None:
            self._bell.set()

    async def listen(self, timeout: float) -> None:
        """Wait until one ahead is gone, or may be."""
        if self._bell is not None:
            await self.session.handle.attend(self._bell, timeout)

    def hush(self) -> None:
        """Forget that a bell rang: we look now."""
        self._called = self.seen = None
        if self._bell is not None:
            self._bell.clear()

    def watch(self, runtime: Runtime, ahead: dict[str, News]) -> None:
        """Have these nodes, and no others, wake us when one goes; each with what that means."""
        if self._bell is None:
            self._bell = runtime.event()
        link = self.session.handle
        before, self._ahead = self._ahead, {f"{self.parent}/{node}": news for node, news in ahead.items()}
        for path in before.keys() - self._ahead.keys():
            link.unwatch(path, self)
        for path in self._ahead.keys() - before.keys():
            link.watch(path, self, partial(self._heard, path, self.node), zxid=self.zxid)

    def _heard(self, path: str, node: str | None, gone: bool | None) -> None:
        news = self._ahead.pop(path, None)
        if news is not None and gone is not None:
            if news.gone if gone else news.passed:
                self._called = node
            else:
                # Straight from whoever read it: whoever waits need not wake only to ask this.
                self.session.handle.look(self.parent, self._looked)
                return
        self.ring()

    def _looked(self, children: list[str] | None) -> None:
        self.seen = children
        self.ring()

    def leave(self) -> None:
        """Watch nothing any more."""
        before, self._ahead = self._ahead, {}
        for path in list(before):
            self.session.handle.unwatch(path, self)
