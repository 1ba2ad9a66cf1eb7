"""etcd: a claim is a key under the session's lease, the queue is the order of creation, and waiting is a watch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

from fencelock.backends.etcd import messages as m
from fencelock.backends.etcd.facts import Facts
from fencelock.backends.etcd.held import Held
from fencelock.backends.etcd.keys import Keys
from fencelock.backends.etcd.layout import About, Layout, Spot, about, is_of, read_about, spot, value
from fencelock.backends.etcd.line import REFUSED_PAUSE, Line, Seat
from fencelock.backends.etcd.link import Link, Refused
from fencelock.backends.etcd.links import Links
from fencelock.backends.etcd.looks import Looks
from fencelock.backends.etcd.messages import Header, Pair, Status
from fencelock.backends.etcd.place import Place
from fencelock.backends.etcd.records import EtcdRecords
from fencelock.backends.etcd.sessions import FRESH, Lease, Sessions, patience
from fencelock.core.backend import GRACE, LONGEST
from fencelock.core.clock import wall_us
from fencelock.core.world import World
from fencelock.errors import ClientClosed, EngineUnavailable, LimitMismatch, Unanswered
from fencelock.model import (
    Admitted,
    Busy,
    Claim,
    Grant,
    Renewal,
    Snapshot,
    Strength,
    Traits,
    admit,
    contradiction,
)

TRAITS = Traits(
    engine="etcd",
    strength=Strength.CONSENSUS,
    fair=True,
    push=True,
    loss_pushed=True,
    session=True,
    ttl_min=1.0,
)

SHORTEST_LEFT = 0.05
"""Seconds that the last question gets when the time is over: it may have an answer at once."""

A = TypeVar("A", bound=tuple[Any, ...])
"""What an answer is read as: its header comes first."""


class Hold(NamedTuple):
    """A grant's handle."""

    session: Lease
    key: str


class Limit:
    """How long an attempt may take. Each of its questions has a third of the ttl; who has less time, that for all."""

    def __init__(self, world: World, ttl: float, within: float | None) -> None:
        self._world = world
        self._each = patience(ttl)
        self._until = inf if within is None else world.now() + max(within, GRACE)

    @property
    def left(self) -> float:
        """Seconds for the next question."""
        return max(SHORTEST_LEFT, min(self._each, self._until - self._world.now()))


class EtcdBackend:
    """`fencelock.core.backend.Watchful` on etcd."""

    traits = TRAITS

    def __init__(self, world: World, place: Place, namespace: str) -> None:
        self.facts = Facts(self._past_changed)
        self._world = world
        self._layout = Layout(place.prefix, namespace)
        self._links = Links(world, place)
        self._sessions = Sessions(
            world, self._links, self.facts, self._layout.about, self._session_ended, self._purged, self._tomb
        )
        self._held = Held(world, self._links, self._layout.about, self._tell)
        self._line = Line(world, self._links, self._sessions, self._layout)
        self._keys = Keys(self._layout)
        self._looks = Looks(self._links, self._layout, self._ask)
        self.records = EtcdRecords(self._layout, self._ask, self._read_about)
        self._about: About | None = None
        self._outdated: About | None = None
        """What was true of the namespace before etcd's past was changed: tokens from there on may have been given before."""
        self._doubt: dict[str, Lease] = {}
        """Attempts that were sent and not answered: they may still arrive."""
        self._holds: dict[str, Hold] = {}
        self._closed = False

    @staticmethod
    def on_gone(id: str) -> None:
        """Replaced by the client: to be called with the id of a held claim that is gone."""

    # ------------------------------------------------------------------ taking it

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Busy:
        """Take the lock or a place in line."""
        limit = Limit(self._world, claim.ttl, patience)
        while True:
            self._check_open()
            key = self._keys.give(claim)
            try:
                session = self._session_of(key) or self._sessions.current(claim.ttl)
                if session is None:
                    session = await self._sessions.make(claim.ttl, limit.left)
                about = self._about or await self._read_about(limit.left)
                await self._sessions.purge_all(limit.left)
                self._check_open()  # a session that was made while close() ended the others is ended by nobody
                outcome = await self._claim(claim, key, queue, session, about, limit)
                if outcome is not None:
                    return outcome
            finally:
                if not self._known(key):
                    self._keys.end(claim.id, again=True)

    def _known(self, key: str) -> bool:
        """Return whether something of a claim may be on etcd, or on its way there."""
        return key in self._doubt or self._sessions.end_of([key]) is not None

    def _session_of(self, key: str) -> Lease | None:
        """Return the session of an attempt that got no answer: whatever arrives of it then hangs on one session only."""
        session = self._doubt.get(key)
        now = self._world.now()
        if session is None or not session.alive(now):
            return None
        session.keep(key, now, session.ttl)
        return session

    async def _claim(
        self, claim: Claim, key: str, queue: bool, session: Lease, about: About, limit: Limit
    ) -> Grant | Busy | None:
        """Do the one transaction; None if something has changed, and it has to be done anew."""
        encoded, tomb = key.encode(), self._layout.tomb(claim.id).encode()
        prefix = self._layout.queue(claim.name).encode()
        compares = [m.absent(encoded), m.absent(tomb), m.created(self._layout.about, m.EQUAL, about.revision)]
        if not queue and not claim.shared:
            compares.append(m.none_below(prefix))
        line = m.below(prefix, order=m.DESCENDING, limit=2, bare=True) if not claim.shared else m.below(prefix)
        then = [m.do_put(m.put(encoded, value(claim), session.handle)), m.do_range(line)]
        body = m.txn(
            compares,
            then,
            [m.do_range(m.find(encoded)), m.do_range(m.find(tomb)), m.do_range(m.find(self._layout.about))],
        )
        session.keep(key, self._world.now(), session.ttl)
        # Once an attempt got no answer, it may arrive at any time until the claim is abandoned.
        doubtful = key in self._doubt
        self._doubt[key] = session
        try:
            answer, tries = await self._ask_alive(session, m.TXN, body, m.read_txn, limit)
        except Unanswered:
            raise
        except (Refused, EngineUnavailable) as error:
            if not doubtful:
                self._settled(key, session)
            if isinstance(error, EngineUnavailable):
                raise
            if error.no_lease:
                self._sessions.ended(session)
                return None
            raise error.told(self._links.address) from error
        if tries == 1 and not doubtful:
            self._doubt.pop(key, None)
        if answer.succeeded:
            line_up, revision = answer.found(1), answer.header.revision
        else:
            own = answer.found(0)
            if not answer.found(2) or answer.found(2)[0].created != about.revision:
                self._about = None
                session.let_go(key)
                return None
            if not own:
                if key in self._doubt:
                    await self.abandon(claim)  # an earlier try may still arrive
                session.let_go(key)
                return Busy(claim, session.since)  # taken, and we did not want to queue; or we were abandoned long ago
            if not is_of(own[0], claim) or self._sessions.given_up(own[0].lease):
                # What had the key before is there again, as the past was changed; or it is over by our clock, not by etcd's.
                await self._delete(claim.id, key, limit.left)
                return None
            if own[0].lease != session.handle:
                session.let_go(key)
                session = self._sessions.adopt(own[0].lease, session.ttl)
            revision = own[0].created
            header, line_up = await self._look_up(claim, revision, session, limit, renew=True)
            answer = answer._replace(header=header)
        outcome = await self._decide(claim, key, session, revision, line_up, answer.header)
        if isinstance(outcome, Busy) and not queue:
            await self.abandon(claim)
        return outcome

    def _settled(self, key: str, session: Lease) -> None:
        self._doubt.pop(key, None)
        session.let_go(key)

    async def _look_up(
        self, claim: Claim, revision: int, session: Lease, limit: Limit, *, renew: bool = False, at_least: int = 0
    ) -> tuple[Header, list[Pair]]:
        """Return who is in line up to a claim: all of it, or for an exclusive claim itself and the one ahead.

        If it is to be seen `at_least` at some revision, any member will do that has got there: nobody who has left comes
        ahead of us again, so what was once true of those ahead stays true. Of our own claim no answer says more than that
        it was there; its session is alive by our clock, and if somebody deletes it, its watch tells. Asking a majority would
        have us wait, between every two holders, for whatever is just being written to disk.
        """
        prefix = self._layout.queue(claim.name).encode()
        if claim.shared:
            body = m.below(prefix, until=revision)
        else:
            body = m.below(prefix, order=m.DESCENDING, limit=2, bare=True, until=revision)
        if at_least and not self._sessions.stale(session):
            header, found = m.read_range(await self._ask(m.RANGE, m.local(body), limit.left))
            if header.revision >= at_least and header.cluster == self.facts.cluster:
                return header, found.pairs
        try:
            (header, found), _ = await self._ask_alive(session, m.RANGE, body, m.read_range, limit, renew)
        except Refused as refusal:
            raise refusal.told(self._links.address) from refusal
        return header, found.pairs

    async def _decide(
        self, claim: Claim, key: str, session: Lease, revision: int, line_up: list[Pair], header: Header
    ) -> Grant | Busy | None:
        """Say what the line means for a claim; None if it is no longer in it."""
        places = sorted((spot(pair) for pair in line_up), key=_by_creation)
        me = next((place for place in places if place.id == key and place.lease == session.handle), None)
        if me is None or me.created != revision or self._about is None or session.ended:
            return None
        if claim.ttl != session.ttl:
            claim = claim._replace(ttl=session.ttl)
        ahead = [place for place in places if place.created < revision]
        mine = Spot(key, claim.shared, claim.limit, claim.owner, revision, session.handle)
        if claim.shared and (problem := contradiction(ahead, mine)) is not None:
            await self.abandon(claim)
            raise LimitMismatch(f"{claim.name!r}: {problem}", claim.name)
        verdict = admit([*ahead, mine], mine)
        session.keep(key, self._world.now(), session.ttl)
        if isinstance(verdict, Admitted):
            self._holds[claim.id] = hold = Hold(session, key)
            self._held.add(key, claim.id, revision, session.ttl)
            return Grant(claim, self._about.token(revision), session.since, hold, straggler=key in self._doubt)
        return Busy(claim, session.since, None, Seat(session, key, revision, verdict, header.revision))

    async def _ask_alive(
        self,
        session: Lease,
        method: str,
        body: bytes,
        read: Callable[[bytes], A],
        limit: Limit,
        renew: bool = False,
    ) -> tuple[A, int]:
        """Ask for a majority's answer, along with a sign of life if the last one is some time ago.

        Return it, and how often it was asked for: the earlier times may still arrive.
        """
        floor = self.facts.revision
        tries = 0

        async def work(link: Link, left: float) -> A:
            nonlocal tries
            tries += 1
            if not self._sessions.stale(session, 0.0 if renew else FRESH):
                return read(await link.call(method, body, left))
            until = self._world.now() + left
            knock = self._sessions.knock(session, link)
            try:
                answer = read(await link.call(method, body, left))
            except BaseException:
                link.give_up(knock[0])
                raise
            rest = max(0.001, until - self._world.now())
            try:
                await self._sessions.heard(session, link, knock, answer[0].term, rest)
            except (Unanswered, Refused):
                pass  # then the session is as old as it was
            return answer

        answer = await self._links.run(work, limit.left)
        self.facts.take(answer[0], floor)
        return answer, tries

    async def _read_about(self, seconds: float = LONGEST) -> About:
        """Return what is true of the namespace; write it down if nobody has."""
        key = self._layout.about
        if (old := self._outdated) is not None:
            # The clock has gone on, so that tokens which begin there have not been given before.
            body = m.txn([m.created(key, m.EQUAL, old.revision)], [m.do_delete(key)])
            m.read_txn(await self._ask(m.TXN, body, seconds))
            if self._outdated is old:
                self._outdated = None
        body = m.txn(
            [m.absent(key)],
            [m.do_put(m.put(key, about(wall_us()), 0)), m.do_range(m.find(key))],
            [m.do_range(m.find(key))],
        )
        answer = m.read_txn(await self._ask(m.TXN, body, seconds))
        self._about = found = read_about(answer.found(-1)[0], self._links.address)
        return found

    # ------------------------------------------------------------------ waiting for it

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
        look = partial(self._look, claim, seat, within)
        outcome = await self._line.watch(seat, timeout, look)
        return outcome or await self.attempt(claim, queue=True, patience=within)

    async def _look(self, claim: Claim, seat: Seat, within: float | None, at_least: int) -> Grant | Busy | None:
        """Look where we are in line, at this revision or later, or now if it is 0; None if we are no longer in it."""
        self._check_open()
        limit = Limit(self._world, claim.ttl, within)
        now = self._world.now()
        if not seat.session.alive(now):
            return None
        seat.session.keep(seat.key, now, seat.session.ttl)
        await self._sessions.purge_all(limit.left)
        header, line_up = await self._look_up(claim, seat.revision, seat.session, limit, at_least=at_least)
        return await self._decide(claim, seat.key, seat.session, seat.revision, line_up, header)

    async def abandon(self, claim: Claim) -> None:
        """Leave nothing behind."""
        key = self._keys.of(claim)
        limit = Limit(self._world, claim.ttl, GRACE)
        if key is None:
            await self._abandon_unknown(claim, limit)
            return
        self._drop(claim.id, key)
        self._sessions.give_up(key)
        session = self._doubt.get(key)
        if session is not None and not session.ended:
            # Whatever is still on its way comes with the same lease: if that is gone, it cannot do anything.
            self._sessions.retire(session)
            tomb = self._layout.tomb(claim.id)
            body = m.txn([], [m.do_delete(key.encode()), m.do_put(m.put(tomb.encode(), b"", session.handle))])
            try:
                m.read_txn(await self._links.ask(m.TXN, body, limit.left))
            except Refused as refusal:
                if not refusal.no_lease:
                    raise refusal.told(self._links.address) from refusal
                await self._delete(claim.id, key, limit.left)
            self._keys.end(claim.id, again=False)
            self._settled(key, session)
        else:
            # That ends it if nothing is in doubt, and the key may be another's by then.
            await self._delete(claim.id, key, limit.left)
            if session is not None:
                self._keys.end(claim.id, again=False)
                self._doubt.pop(key, None)

    async def _abandon_unknown(self, claim: Claim, limit: Limit) -> None:
        """Leave nothing behind of a claim that another client has made, if there is anything."""
        line = m.below(self._layout.queue(claim.name).encode())
        _, line_up = m.read_range(await self._ask(m.RANGE, line, limit.left))
        for pair in line_up.pairs:
            if is_of(pair, claim):
                body = m.txn([m.created(pair.key, m.EQUAL, pair.created)], [m.do_delete(pair.key)])
                m.read_txn(await self._ask(m.TXN, body, limit.left))

    def _tomb(self, key: str) -> bytes | None:
        """Return where a claim's tombstone has to stand, if it may still be on its way."""
        id = self._keys.id_of(key)
        return self._layout.tomb(id).encode() if id is not None and key in self._doubt else None

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
                if grant.claim.id not in self._holds or hold.session.end_of(hold.key) is None:
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
            return m.read_txn(await self._ask(m.TXN, body)).succeeded
        self._drop(grant.claim.id, key)
        deleted, tries = await self._delete(grant.claim.id, key, patience(grant.claim.ttl))
        if not deleted and tries > 1:
            raise Unanswered(f"{self._links.address}: an earlier try may have given {grant.claim.name!r} back")
        return deleted

    def _drop(self, id: str, key: str) -> None:
        """Look after a claim no longer: what becomes of it is our own doing."""
        self._holds.pop(id, None)
        self._held.drop(key)

    async def _delete(self, id: str, key: str, seconds: float = LONGEST) -> tuple[bool, int]:
        """Delete a key; return whether it was there, and how often that was asked for."""
        floor = self.facts.revision
        body = m.find(key.encode())
        tries = 0

        def work(link: Link, left: float) -> Awaitable[bytes]:
            nonlocal tries
            tries += 1
            self._keys.asked(id)
            return link.call(m.DELETE, body, left)

        header, deleted = m.read_deleted(await self._run(work, seconds))
        self._keys.answered(id)
        self.facts.take(header, floor)
        self._sessions.let_go(key)
        if not self._known(key):
            self._keys.end(id, again=True)
        return deleted > 0, tries

    def _tell(self, id: str) -> None:
        """Pass on that a claim was deleted by somebody else."""
        if self._holds.pop(id, None) is not None:
            self.on_gone(id)

    def _session_ended(self, session: Lease) -> None:
        """Pass on that all claims of a session are gone."""
        for id, hold in list(self._holds.items()):
            if hold.session is session:
                self._held.drop(hold.key)
                self._keys.end(id, again=False)
                self._doubt.pop(hold.key, None)  # what still comes finds no lease
                self._tell(id)

    def _past_changed(self) -> None:
        """Take in that etcd has gone back in time, or is another one: whoever holds something is told that it is gone."""
        self._outdated, self._about = self._about or self._outdated, None
        self._sessions.end_all()

    def _purged(self, keys: Sequence[str]) -> None:
        """Forget claims that were over by our clock."""
        for key in keys:
            id = self._keys.id_of(key) or ""
            self._drop(id, key)
            self._doubt.pop(key, None)
            self._keys.end(id, again=False)

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

    def _ask(self, method: str, body: bytes, seconds: float = LONGEST) -> Coroutine[Any, Any, bytes]:
        return self._run(lambda link, left: link.call(method, body, left), seconds)

    async def _run(self, work: Callable[[Link, float], Awaitable[bytes]], seconds: float) -> bytes:
        self._check_open()
        try:
            return await self._links.run(work, seconds)
        except Refused as refusal:
            raise refusal.told(self._links.address) from refusal

    # ------------------------------------------------------------------ the end

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("this client is closed; connect again")

    async def close(self) -> None:
        """Revoke the sessions and close all links; whoever still waits on one learns of it."""
        self._closed = True
        self._held.close()
        await self._sessions.close()
        self._links.close()

    def before_fork(self) -> None:
        """Nothing that must not be copied."""

    def after_fork(self, *, child: bool) -> None:
        """The child lets go of the parent's connections without a word, and has sessions of its own."""
        if child:
            self._doubt, self._holds = {}, {}
            self._keys.forget()
            self._held.forget()
            self._sessions.forget()
            self._links.forget()


def _by_creation(place: Spot) -> int:
    return place.created
