"""What is true of a namespace: written down once, by whoever comes first, and anew when etcd's past was changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.core.clock import wall_us
from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.engines.etcd import messages as m
from fencelock.engines.etcd.layout import About, Layout, about, read_about

if TYPE_CHECKING:
    from fencelock.engines.etcd.asking import Asking
    from fencelock.engines.etcd.links import Links


class Namespace:
    """One namespace, as far as this client knows it."""

    def __init__(self, links: Links, layout: Layout, asking: Asking) -> None:
        self.about: About | None = None
        """None if it has to be read."""
        self._links = links
        self._layout = layout
        self._asking = asking
        self._outdated: About | None = None
        """What was true before etcd's past was changed: tokens from there on may have been given before."""

    async def read(self, seconds: float = MAX_REPLY_TIMEOUT) -> About:
        """Return what is true; write it down if nobody has."""
        key = self._layout.about
        if (old := self._outdated) is not None:
            # The clock has gone on, so that tokens which begin there have not been given before.
            body = m.txn([m.created(key, m.EQUAL, old.revision)], [m.do_delete(key)])
            m.read_txn(await self._asking.request(m.TXN, body, seconds))
            if self._outdated is old:
                self._outdated = None
        body = m.txn(
            [m.absent(key)],
            [m.do_put(m.put(key, about(wall_us()), 0)), m.do_range(m.find(key))],
            [m.do_range(m.find(key))],
        )
        answer = m.read_txn(await self._asking.request(m.TXN, body, seconds))
        self.about = found = read_about(answer.found(-1)[0], self._links.address)
        return found

    def outdate(self) -> None:
        """Take in that etcd's past was changed."""
        self._outdated, self.about = self.about or self._outdated, None
