"""The places in line of a client's claims: kept with their sessions, granted, given up, and what is heard of their end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fencelock.core.engine import reply_timeout
from fencelock.core.runtime import Runtime
from fencelock.core.sessions import Session
from fencelock.engines.zookeeper.link import Link
from fencelock.engines.zookeeper.nodes import delete, pass_on, queue_of
from fencelock.engines.zookeeper.place import Place
from fencelock.model import Grant

SHORTEST = 0.2
"""Seconds that an answer is waited for at the least."""


class Places(dict[str, Place]):
    """All places of a client, by the ids of their claims. `on_gone` is told, in any thread, of a claim that is gone."""

    def __init__(self, runtime: Runtime, on_gone: Callable[[str], None]) -> None:
        super().__init__()
        self._runtime = runtime
        self._on_gone = on_gone

    def keep(self, place: Place) -> None:
        """Have a claim last for as long as its session would, from now on."""
        place.session.attach(place.claim.id, self._runtime.now(), place.session.ttl)

    def stands(self, place: Place) -> bool:
        """Return whether the claim must still have its node, unless somebody took it away unheard."""
        return not place.gone and place.session.alive(self._runtime.now())

    def granted(self, place: Place) -> Grant:
        """Return what is held, and listen for its end."""
        place.leave()
        session = place.session
        place.first = not place.claim.shared
        session.handle.hold(place.path, partial(self.lost_if, place))
        self.keep(place)
        return Grant(place.kept, place.token, session.since, place)

    async def remove(self, place: Place, patience: float) -> bool:
        """Take the claim's node away, for certain; return whether it was there."""
        link = place.session.handle
        there = False
        if place.node is not None:
            there = await (pass_on if place.first else delete)(link, place.path, patience)
        else:
            for node in await queue_of(link, place.parent, patience):
                if node.id == place.claim.id:
                    there |= await delete(link, f"{place.parent}/{node.name}", patience)
        self.forget(place)
        return there

    def forget(self, place: Place) -> None:
        """Forget a claim whose node is gone, or goes with its session."""
        place.leave()
        if place.node is not None:
            place.session.handle.let_go(place.path)
        place.session.remove(place.claim.id)
        place.gone = True
        if self.get(place.claim.id) is place:
            self.pop(place.claim.id, None)
        place.ring()  # another thread may wait with it, which a close() ends

    async def expire(self, session: Session[Link], id: str) -> None:
        """Take away a claim that is over: nobody has renewed it, or its removal was not answered."""
        place = self.get(id)
        if place is None or place.session is not session:
            session.remove(id)
        else:
            place.gone = True  # first: whoever waits, and has slept past its end, is not let in meanwhile
            await self.remove(place, reply_timeout(session.ttl, SHORTEST))
            self._on_gone(id)  # unless it was a moment before

    def lost_if(self, place: Place, gone: bool | None) -> None:
        """Take in what became of a node that was held. kazoo's thread calls this.

        That it was written to is as good as gone: whoever is next has taken that for its being passed on.
        """
        if gone is not None:
            place.gone = True
            self._on_gone(place.claim.id)

    def ended(self, session: Session[Link]) -> None:
        """Take in that a session is over, and all its claims with it."""
        for id, place in list(self.items()):
            if place.session is session:
                place.gone = True
                self.pop(id, None)
                place.ring()
                self._on_gone(id)
