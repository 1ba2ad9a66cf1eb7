"""etcd: a claim is a key under the session's lease, the queue is the order of creation, and waiting is a watch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

from fencelock.backends.etcd import messages as m
from fencelock.backends.etcd.asking import Asking, Limit
from fencelock.backends.etcd.claims import Claims, Hold
from fencelock.backends.etcd.facts import Facts
from fencelock.backends.etcd.keys import Keys
from fencelock.backends.etcd.layout import Layout, value
from fencelock.backends.etcd.leaving import Leaving
from fencelock.backends.etcd.line import REFUSED_PAUSE, Line, Seat
from fencelock.backends.etcd.links import Links
from fencelock.backends.etcd.looks import Looks
from fencelock.backends.etcd.messages import Status
from fencelock.backends.etcd.namespace import Namespace
from fencelock.backends.etcd.place import Place
from fencelock.backends.etcd.records import EtcdRecords
from fencelock.backends.etcd.sessions import Sessions, patience
from fencelock.backends.etcd.taking import Taking
from fencelock.core.world import World
from fencelock.errors import EngineUnavailable, Unanswered
from fencelock.model import Busy, Claim, Grant, Renewal, Snapshot, Strength, Traits

TRAITS = Traits(
    engine="etcd",
    strength=Strength.CONSENSUS,
    fair=True,
    push=True,
    loss_pushed=True,
    session=True,
    ttl_min=1.0,
)


class EtcdBackend:
    """`fencelock.core.backend.Watchful` on etcd."""

    traits = TRAITS

    def __init__(self, world: World, place: Place, namespace: str) -> None:
        layout = Layout(place.prefix, namespace)
        self.facts = facts = Facts(self._past_changed)
        self._world = world
        self._links = links = Links(world, place)
        self._keys = keys = Keys(layout)
        self._claims = claims = Claims(world, links, layout, keys, self._tell)
        self._sessions = sessions = Sessions(
            world, links, facts, layout.about, claims.session_ended, claims.purged, claims.tomb
        )
        self._asking = asking = Asking(world, links, facts, sessions)
        self._namespace = Namespace(links, layout, asking)
        self._leaving = Leaving(world, links, layout, keys, claims, sessions, asking)
        self._taking = Taking(world, layout, self._namespace, claims, sessions, asking, self._leaving)
        self._line = Line(world, links, sessions, layout)
        self._looks = Looks(links, layout, asking.ask, asking.ask_once)
        self.records = EtcdRecords(layout, asking.ask, asking.ask_once, self._namespace.read)

    @staticmethod
    def on_gone(id: str) -> None:
        """Replaced by the client: to be called with the id of a held claim that is gone."""

    # ------------------------------------------------------------------ taking it

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Busy:
        """Take the lock or a place in line."""
        limit = Limit(self._world, claim.ttl, patience, met=self._namespace.about is not None)
        while True:
            self._asking.check_open()
            key = self._keys.give(claim)
            try:
                session = self._claims.session_of(key) or self._sessions.current(claim.ttl)
                if session is None:
                    session = await self._sessions.make(claim.ttl, limit.left)
                about = self._namespace.about or await self._namespace.read(limit.left)
                await self._sessions.purge_all(limit.left)
                self._asking.check_open()  # a session that was made while close() ended the others is ended by nobody
                outcome = await self._taking.claim(claim, key, queue, session, about, limit)
                if outcome is not None:
                    return outcome
            finally:
                if self._leaving.is_left(key):
                    self._keys.end(claim.id, again=True)

    async def wait(self, busy: Busy, timeout: float) -> Grant | Busy:
        """Watch whom we wait for; look again in the end."""
        claim, seat = busy.claim, busy.handle
        now = self._world.now()
        # Who waits for less than a third of the ttl has no more time: everybody else comes back to show a sign of life.
        within = None if timeout >= claim.ttl / 3 else 0.0
        if not isinstance(seat, Seat):
            await self._world.sleep(min(timeout, REFUSED_PAUSE))  # our own tombstone is in the way
        if not isinstance(seat, Seat) or not seat.session.alive(now):
            return await self.attempt(claim, queue=True, patience=within)
        seat.session.keep(seat.key, now, seat.session.ttl)
        look = partial(self._taking.look, claim, seat, within)
        outcome = await self._line.watch(seat, timeout, look)
        return outcome or await self.attempt(claim, queue=True, patience=within)

    async def abandon(self, claim: Claim) -> None:
        """Leave nothing behind."""
        await self._leaving.abandon(claim)

    # ------------------------------------------------------------------ keeping it, giving it back

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Keep the sessions alive; what is gone of the claims on them is known already."""
        sessions = list({grant.handle.session: None for grant in grants})
        sent = self._world.now()
        answers = dict(zip(sessions, await self._sessions.renew(sessions), strict=True))
        renewals = []
        for grant in grants:
            hold: Hold = grant.handle
            answer = answers[hold.session]
            if answer is Renewal.RENEWED:
                if grant.claim.id not in self._claims.holds or hold.session.end_of(hold.key) is None:
                    answer = Renewal.LOST
                else:
                    hold.session.keep(hold.key, sent, hold.session.ttl)
            renewals.append(answer)
        return renewals

    async def release(self, grant: Grant) -> bool:
        """Give back the lock; whoever watches it sees that."""
        key = self._keys.of(grant.claim)
        if key is None:  # it was given back, or is another client's; whoever has the key by now is to keep it
            held = grant.handle.key.encode()
            body = m.txn([m.valued(held, value(grant.claim))], [m.do_delete(held)])
            return m.read_txn(await self._asking.ask(m.TXN, body)).succeeded
        self._claims.drop(grant.claim.id, key)
        deleted, tries = await self._leaving.delete(grant.claim.id, key, patience(grant.claim.ttl))
        if not deleted and tries > 1:
            raise Unanswered(f"{self._links.address}: an earlier try may have given {grant.claim.name!r} back")
        return deleted

    def _tell(self, id: str) -> None:
        """Tell the client: it may have set `on_gone` at any time."""
        self.on_gone(id)

    def _past_changed(self) -> None:
        """Take in that etcd has gone back in time, or is another one: whoever holds something is told that it is gone."""
        self._namespace.outdate()
        self._sessions.end_all()

    # ------------------------------------------------------------------ looking at it

    async def inspect(self, name: str) -> Snapshot:
        """Look."""
        return await self._looks.inspect(name)

    def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what is in use."""
        return self._looks.names(prefix)

    async def force_release(self, name: str) -> int:
        """Drop the holders."""
        return await self._looks.force_release(name)

    async def health(self) -> list[Status | EngineUnavailable]:
        """Ask every member how it is. What was noticed by the way is in `facts`."""
        return await self._looks.health()

    # ------------------------------------------------------------------ the end

    async def close(self) -> None:
        """Revoke the sessions and close all links; whoever still waits on one learns of it."""
        self._asking.closed = True
        self._claims.held.close()
        await self._sessions.close()
        self._links.close()

    def before_fork(self) -> None:
        """Nothing that must not be copied."""

    def after_fork(self, *, child: bool) -> None:
        """The child lets go of the parent's connections without a word, and has sessions of its own."""
        if child:
            self._claims.forget()
            self._sessions.forget()
            self._links.forget()
