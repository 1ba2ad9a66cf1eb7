"""The claims of a client: which of them it holds, and which may be on their way to etcd without its knowing.

Nothing is asked here: whoever learns what became of a claim, or of its session, has it noted. Everything is noted under the
claim's id, never under its key: a later claim may have the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fencelock.engines.etcd.held import Held
from fencelock.engines.etcd.sessions import Lease

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime
    from fencelock.engines.etcd.keys import Keys
    from fencelock.engines.etcd.layout import Layout
    from fencelock.engines.etcd.links import Links


class Hold(NamedTuple):
    """A grant's handle: the session and the key of its claim, and the revision at which the key was created."""

    session: Lease
    key: str
    revision: int


class Claims:
    """All of a client."""

    def __init__(
        self, runtime: Runtime, links: Links, layout: Layout, keys: Keys, on_gone: Callable[[str], None]
    ) -> None:
        self.doubt: dict[str, Lease] = {}
        """By id, attempts that were sent and not answered: they may still arrive."""
        self.holds: dict[str, Hold] = {}
        """By id, what is held."""
        self.held = Held(runtime, links, layout.about, self._deleted)
        self._runtime = runtime
        self._layout = layout
        self._keys = keys
        self._on_gone = on_gone

    def session_of(self, id: str) -> Lease | None:
        """Return the session of an attempt that got no answer: whatever arrives of it then hangs on one session only."""
        session = self.doubt.get(id)
        now = self._runtime.now()
        if session is None or not session.alive(now):
            return None
        session.attach(id, now, session.ttl)
        return session

    def hold(self, id: str, hold: Hold) -> bool:
        """Note that a claim is held; return False if its session has ended meanwhile, and the claim with it.

        The claim is noted first and the session checked afterwards: whoever ends the session does it the other way round, so
        that one of the two notices.
        """
        self.holds[id] = hold
        self.held.add(hold.key, id, hold.revision, hold.session.ttl)
        if hold.session.ended:
            self.drop(id)
            return False
        return True

    def settled(self, id: str, session: Lease) -> None:
        """Note that nothing of a claim is on etcd, or on its way there."""
        self.doubt.pop(id, None)
        session.remove(id)

    def tomb(self, id: str) -> bytes | None:
        """Return where a claim's tombstone has to stand, if it may still be on its way."""
        return self._layout.tomb(id).encode() if id in self.doubt else None

    def drop(self, id: str) -> None:
        """Look after a claim no longer: what becomes of it is our own doing."""
        self.holds.pop(id, None)
        self.held.drop(id)

    def _deleted(self, id: str) -> None:
        """Pass on that a claim was deleted by somebody else."""
        if self.holds.pop(id, None) is not None:
            self._on_gone(id)

    def session_ended(self, session: Lease) -> None:
        """Pass on that all claims of a session are gone."""
        for id, hold in list(self.holds.items()):
            if hold.session is session:
                self.held.drop(id)
                self._keys.end(id, again=False)
                self.doubt.pop(id, None)  # what still comes finds no lease
                self._deleted(id)

    def purged(self, ids: Sequence[str]) -> None:
        """Forget claims that were over by our clock."""
        for id in ids:
            self.drop(id)
            self.doubt.pop(id, None)
            self._keys.end(id, again=False)

    def forget(self) -> None:
        """Begin anew in a forked child: the parent's claims are not ours."""
        self.doubt, self.holds = {}, {}
        self._keys.forget()
        self.held.forget()
