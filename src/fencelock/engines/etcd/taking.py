"""Taking a lock: one transaction puts the claim's key and says who is ahead, and the line says what that means for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fencelock.engines.etcd import messages as m
from fencelock.engines.etcd.asking import Asking, Limit
from fencelock.engines.etcd.claims import Claims, Hold
from fencelock.engines.etcd.layout import About, Layout, Spot, is_of, spot
from fencelock.engines.etcd.line import Seat
from fencelock.engines.etcd.link import Refused
from fencelock.errors import EngineUnavailable, OutcomeUnknown
from fencelock.model import Admitted, Claim, Grant, Waiting, admit

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime
    from fencelock.engines.etcd.keys import ClaimKey, Keys
    from fencelock.engines.etcd.leaving import Leaving
    from fencelock.engines.etcd.messages import Header, Pair
    from fencelock.engines.etcd.namespace import Namespace
    from fencelock.engines.etcd.sessions import Lease, Sessions


class Taking:
    """How a client's claims come into line, and what they find there."""

    def __init__(
        self,
        runtime: Runtime,
        layout: Layout,
        namespace: Namespace,
        keys: Keys,
        claims: Claims,
        sessions: Sessions,
        asking: Asking,
        leaving: Leaving,
    ) -> None:
        self._runtime = runtime
        self._layout = layout
        self._namespace = namespace
        self._keys = keys
        self._claims = claims
        self._sessions = sessions
        self._asking = asking
        self._leaving = leaving

    async def claim(
        self, claim: Claim, place: ClaimKey, queue: bool, session: Lease, about: About, limit: Limit
    ) -> Grant | Waiting | None:
        """Do the one transaction; None if something has changed, and it has to be done anew."""
        id, key = claim.id, place.key
        encoded, tomb = key.encode(), self._layout.tomb(id).encode()
        prefix = self._layout.queue(claim.name).encode()
        compares = [m.absent(encoded), m.absent(tomb), m.created(self._layout.about, m.EQUAL, about.revision)]
        if not queue and not claim.shared:
            compares.append(m.none_below(prefix))
        line = m.below(prefix, order=m.DESCENDING, limit=2, bare=True) if not claim.shared else m.below(prefix)
        then = [m.do_put(m.put(encoded, place.value, session.handle)), m.do_range(line)]
        body = m.txn(
            compares,
            then,
            [m.do_range(m.find(encoded)), m.do_range(m.find(tomb)), m.do_range(m.find(self._layout.about))],
        )
        # Whether etcd may have the claim already, from an earlier attempt that was answered or from one that was not.
        known = self._sessions.end_of([id]) is not None
        session.attach(id, self._runtime.now(), session.ttl)
        # Once an attempt got no answer, it may arrive at any time until the claim is abandoned.
        doubtful = id in self._claims.doubt
        self._claims.doubt[id] = session
        try:
            answer, tries = await self._asking.ask_alive(session, m.TXN, body, m.read_txn, limit)
        except OutcomeUnknown:
            raise
        except (Refused, EngineUnavailable) as error:
            if not doubtful:
                self._claims.doubt.pop(id, None)
                if not known:
                    session.remove(id)
            if isinstance(error, EngineUnavailable):
                raise
            if error.no_lease:
                self._sessions.ended(session)
                return None
            raise self._asking.told(error) from error
        if tries == 1 and not doubtful:
            self._claims.doubt.pop(id, None)
        if answer.succeeded:
            line_up, revision = answer.found(1), answer.header.revision
            place.created = revision
        else:
            own = [pair for pair in answer.found(0) if is_of(pair, claim)]
            taken = bool(answer.found(0)) and not own
            """Whether another claim has the key, as when etcd's past was changed: it stays, and we take another key."""
            outdated = not answer.found(2) or answer.found(2)[0].created != about.revision
            if outdated:
                self._namespace.about = None
            if not own:
                if id in self._claims.doubt:
                    if not outdated:
                        await self._leaving.abandon(claim)  # an earlier try may still arrive
                        session.remove(id)
                else:
                    self._sessions.let_go(id)
                    self._keys.end(id, again=not taken)
                    if taken:
                        return None
                # Somebody has the lock, and we did not want to queue; or we were abandoned long ago.
                return None if outdated else Waiting(claim, session.since)
            revision = place.created = own[0].created
            before = self._sessions.find(own[0].lease)
            if outdated or before is None:
                # Its token would count from another base; or its session is over by our clock, not by etcd's.
                await self._leaving.delete(claim, key, revision, limit.left)
                return None
            if before is not session:
                session.remove(id)
                session = before
            header, line_up = await self._look_up(claim, revision, session, limit, renew=True)
            answer = answer._replace(header=header)
        outcome = await self._decide(claim, key, session, revision, line_up, answer.header)
        if isinstance(outcome, Waiting) and not queue:
            await self._leaving.abandon(claim)
        return outcome

    async def look(
        self, claim: Claim, seat: Seat, left: Callable[[], float | None], at_least: int
    ) -> Grant | Waiting | None:
        """Look where we are in line, at this revision or later, or now if it is 0; None if we are no longer in it."""
        self._asking.check_open()
        limit = Limit(self._runtime, claim.ttl, left())
        now = self._runtime.now()
        if not seat.session.alive(now):
            return None
        seat.session.attach(claim.id, now, seat.session.ttl)
        await self._sessions.purge_all(limit.left)
        header, line_up = await self._look_up(claim, seat.revision, seat.session, limit, at_least=at_least)
        return await self._decide(claim, seat.key, seat.session, seat.revision, line_up, header)

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
            header, found = m.read_range(await self._asking.request(m.RANGE, m.local(body), limit.left))
            if header.revision >= at_least and header.cluster == self._asking.facts.cluster:
                return header, found.pairs
        try:
            (header, found), _ = await self._asking.ask_alive(session, m.RANGE, body, m.read_range, limit, renew)
        except Refused as refusal:
            raise self._asking.told(refusal) from refusal
        return header, found.pairs

    async def _decide(
        self, claim: Claim, key: str, session: Lease, revision: int, line_up: list[Pair], header: Header
    ) -> Grant | Waiting | None:
        """Say what the line means for a claim; None if it is no longer in it."""
        places = sorted((spot(pair) for pair in line_up), key=_by_creation)
        me = next((place for place in places if place.id == key and place.lease == session.handle), None)
        about = self._namespace.about
        if me is None or me.created != revision or about is None or session.ended:
            return None
        if claim.ttl != session.ttl:
            claim = claim._replace(ttl=session.ttl)
        ahead = [place for place in places if place.created < revision]
        mine = Spot(key, claim.shared, claim.limit, claim.owner, revision, session.handle)
        verdict = admit([*ahead, mine], mine)
        session.attach(claim.id, self._runtime.now(), session.ttl)
        if isinstance(verdict, Admitted):
            hold = Hold(session, key, revision)
            if not self._claims.hold(claim.id, hold):
                return None
            return Grant(
                claim, about.token(revision), session.since, hold, attempt_in_flight=claim.id in self._claims.doubt
            )
        return Waiting(claim, session.since, None, Seat(session, key, revision, verdict, header.revision))


def _by_creation(place: Spot) -> int:
    return place.created
