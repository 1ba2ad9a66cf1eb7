"""The claims of a client: which of them it holds, and which may be on their way to etcd without its knowing.

Nothing is asked here: whoever learns what became of a claim, or of its session, has it noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fencelock.backends.etcd.held import Held
from fencelock.backends.etcd.sessions import Lease

if TYPE_CHECKING:
    from fencelock.backends.etcd.keys import Keys
    from fencelock.backends.etcd.layout import Layout
    from fencelock.backends.etcd.links import Links
    from fencelock.core.world import World


class Hold(NamedTuple):
    """A grant's handle."""

    session: Lease
    key: str


class Claims:
    """All of a client."""

    def __init__(self, world: World, links: Links, layout: Layout, keys: Keys, on_gone: Callable[[str], None]) -> None:
        self.doubt: dict[str, Lease] = {}
        """By key, attempts that were sent and not answered: they may still arrive."""
        self.holds: dict[str, Hold] = {}
        """By id, what is held."""
        self.held = Held(world, links, layout.about, self._deleted)
        self._world = world
        self._layout = layout
        self._keys = keys
        self._on_gone = on_gone

    def session_of(self, key: str) -> Lease | None:
        """Return the session of an attempt that got no answer: whatever arrives of it then hangs on one session only."""
        session = self.doubt.get(key)
        now = self._world.now()
        if session is None or not session.alive(now):
            return None
        session.keep(key, now, session.ttl)
        return session

    def settled(self, key: str, session: Lease) -> None:
        """Note that nothing of a claim is on etcd, or on its way there."""
        self.doubt.pop(key, None)
        session.let_go(key)

    def tomb(self, key: str) -> bytes | None:
        """Return where a claim's tombstone has to stand, if it may still be on its way."""
        id = self._keys.id_of(key)
        return self._layout.tomb(id).encode() if id is not None and key in self.doubt else None

    def drop(self, id: str, key: str) -> None:
        """Look after a claim no longer: what becomes of it is our own doing."""
        self.holds.pop(id, None)
        self.held.drop(key)

    def _deleted(self, id: str) -> None:
        """Pass on that a claim was deleted by somebody else."""
        if self.holds.pop(id, None) is not None:
            self._on_gone(id)

    def session_ended(self, session: Lease) -> None:
        """Pass on that all claims of a session are gone."""
        for id, hold in list(self.holds.items()):
            if hold.session is session:
                self.held.drop(hold.key)
                self._keys.end(id, again=False)
                self.doubt.pop(hold.key, None)  # what still comes finds no lease
                self._deleted(id)

    def purged(self, keys: Sequence[str]) -> None:
        """Forget claims that were over by our clock."""
        for key in keys:
            id = self._keys.id_of(key) or ""
            self.drop(id, key)
            self.doubt.pop(key, None)
            self._keys.end(id, again=False)

    def forget(self) -> None:
        """Begin anew in a forked child: the parent's claims are not ours."""
        self.doubt, self.holds = {}, {}
        self._keys.forget()
        self.held.forget()
