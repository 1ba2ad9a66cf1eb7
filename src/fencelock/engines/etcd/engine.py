"""etcd: a claim is a key under the session's lease, the queue is the order of creation, and waiting is a watch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from math import inf

from fencelock.core.clock import Deadline
from fencelock.core.runtime import Runtime
from fencelock.engines.etcd.asking import Asking, Limit
from fencelock.engines.etcd.claims import Claims, Hold
from fencelock.engines.etcd.facts import Facts
from fencelock.engines.etcd.keys import Keys
from fencelock.engines.etcd.layout import Layout
from fencelock.engines.etcd.leaving import Leaving
from fencelock.engines.etcd.line import REFUSED_PAUSE, Line, Seat
from fencelock.engines.etcd.links import Links
from fencelock.engines.etcd.looks import Looks
from fencelock.engines.etcd.messages import Status
from fencelock.engines.etcd.namespace import Namespace
from fencelock.engines.etcd.place import Place
from fencelock.engines.etcd.records import EtcdRecords
from fencelock.engines.etcd.sessions import Sessions, patience
from fencelock.engines.etcd.taking import Taking
from fencelock.errors import EngineUnavailable, GuaranteeUnavailable, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Snapshot, TokenGuarantee, Traits, Waiting

TRAITS = Traits(
    engine="etcd",
    guarantee=TokenGuarantee.CONSENSUS,
    fair=True,
    loss_pushed=True,
    session=True,
    ttl_min=1.0,
)


class EtcdEngine:
    """`fencelock.core.engine.Watchful` on etcd."""

    traits = TRAITS

    def __init__(self, runtime: Runtime, place: Place, namespace: str) -> None:
        layout = Layout(place.prefix, namespace)
        self.facts = facts = Facts(self._past_changed)
        self._runtime = runtime
        self._links = links = Links(runtime, place)
        self._keys = keys = Keys(layout)
        self._claims = claims = Claims(runtime, links, layout, keys, self._tell)
        self._sessions = sessions = Sessions(
            runtime, links, facts, layout.about, keys, claims.session_ended, claims.purged, claims.tomb
        )
        self._asking = asking = Asking(runtime, links, facts, sessions)
        self._namespace = Namespace(links, layout, asking)
        self._leaving = Leaving(runtime, links, layout, keys, claims, sessions, asking)
        self._taking = Taking(runtime, layout, self._namespace, keys, claims, sessions, asking, self._leaving)
        self._line = Line(runtime, links, sessions, layout, keys)
        self._looks = Looks(links, layout, asking)
        self.records = EtcdRecords(layout, asking, self._namespace.read)

    @staticmethod
    def on_gone(id: str) -> None:
        """Replaced by the client: to be called with the id of a held claim that is gone."""

    # ------------------------------------------------------------------ taking it

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Take the lock or a place in line."""
        return await self._attempt(
            claim, queue=enqueue, patience=None if deadline.at is None else deadline.at_most(inf)
        )

    async def _attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Waiting:
        limit = Limit(self._runtime, claim.ttl, patience, met=self._namespace.about is not None)
        while True:
            self._asking.check_open()
            key = self._keys.give(claim)
            try:
                session = self._claims.session_of(claim.id) or self._sessions.current(claim.ttl)
                if session is None:
                    session = await self._sessions.make(claim.ttl, limit.left)
                about = self._namespace.about or await self._namespace.read(limit.left)
                await self._sessions.purge_all(limit.left)
                self._asking.check_open()  # a session that was made while close() ended the others is ended by nobody
                outcome = await self._taking.claim(claim, key, queue, session, about, limit)
                if outcome is not None:
                    return outcome
            finally:
                if self._leaving.is_left(claim.id):
                    self._keys.end(claim.id, again=False)

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Watch whom we wait for."""
        outcome = await self._wait(waiting, timeout, timeout)
        return outcome if isinstance(outcome, Grant) else None

    async def downgrade(self, grant: Grant) -> Grant:
        """Refuse."""
        raise GuaranteeUnavailable("not built yet", grant.claim.name)

    async def _wait(self, waiting: Waiting, timeout: float, patience: float | None = None) -> Grant | Waiting:
        """Watch whom we wait for; look again in the end."""
        claim, seat = waiting.claim, waiting.engine_state
        now = self._runtime.now()
        until = None if patience is None else now + patience
        if not isinstance(seat, Seat):
            await self._runtime.sleep(min(timeout, REFUSED_PAUSE))  # our own tombstone is in the way
        if not isinstance(seat, Seat) or not seat.session.alive(now):
            return await self._attempt(claim, queue=True, patience=self._left(until))
        seat.session.attach(claim.id, now, seat.session.ttl)
        look = partial(self._taking.look, claim, seat, lambda: self._left(until))
        outcome = await self._line.watch(seat, timeout, look)
        return outcome or await self._attempt(claim, queue=True, patience=self._left(until))

    def _left(self, until: float | None) -> float | None:
        return None if until is None else max(0.0, until - self._runtime.now())

    async def abandon(self, claim: Claim) -> None:
        """Leave nothing behind."""
        await self._leaving.abandon(claim)

    # ------------------------------------------------------------------ keeping it, giving it back

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Keep the sessions alive; what is gone of the claims on them is known already."""
        sessions = list({grant.engine_state.session: None for grant in grants})
        sent = self._runtime.now()
        answers = dict(zip(sessions, await self._sessions.renew(sessions), strict=True))
        renewals = []
        for grant in grants:
            hold: Hold = grant.engine_state
            answer = answers[hold.session]
            if answer is Renewal.RENEWED:
                id = grant.claim.id
                if id not in self._claims.holds or not hold.session.extend(id, sent, hold.session.ttl):
                    answer = Renewal.LOST
            renewals.append(answer)
        return renewals

    async def release(self, grant: Grant) -> bool:
        """Give back the lock; whoever watches it sees that."""
        hold: Hold = grant.engine_state
        self._claims.drop(grant.claim.id)
        deleted, tries = await self._leaving.delete(grant.claim, hold.key, hold.revision, patience(grant.claim.ttl))
        if not deleted and tries > 1:
            raise OutcomeUnknown(f"{self._links.address}: an earlier try may have given {grant.claim.name!r} back")
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
