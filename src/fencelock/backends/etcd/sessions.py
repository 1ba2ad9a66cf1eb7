"""Sessions: a lease of etcd's for each rung of the ladder of ttls, and the keep-alives that they share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from os import urandom
from typing import TYPE_CHECKING

from fencelock.backends.etcd.facts import Facts
from fencelock.backends.etcd.link import Call, Link, Refused
from fencelock.backends.etcd.messages import (
    GRANT,
    KEEP_ALIVE,
    LESS,
    RANGE,
    REVOKE,
    TXN,
    count,
    created,
    do_delete,
    do_put,
    grant,
    of_lease,
    put,
    read_lease,
    read_range,
    read_txn,
    txn,
)
from fencelock.core.backend import LONGEST, answer_time
from fencelock.core.session import Session, rung
from fencelock.errors import EngineUnavailable, FencelockError, InvalidTTL
from fencelock.model import Renewal

if TYPE_CHECKING:
    from fencelock.backends.etcd.links import Links
    from fencelock.core.world import Event, World

Lease = Session[int]

LADDER = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 25, 30, 40, 50, 60, 75, 90, 120, 150, 180, 240, 300, 450, 600, 900, 1200, 1800,
    2700, 3600, 5400, 7200, 10800, 14400, 21600, 28800, 43200, 86400,
)  # fmt: skip
"""The ttls that sessions have, in whole seconds as etcd counts: not as many sessions as there are ttls."""
FRESH = 0.25
"""A session that was heard of within this share of its ttl needs no sign of life along with an attempt."""
PURGE_AT_ONCE = 60
"""Keys that one transaction deletes, and puts a tombstone for: etcd allows 128 steps."""
SHORTEST = 0.3
"""Seconds that an answer is waited for at the least."""
GOODBYE_SECONDS = 2.0
GIVEN_UP_KEPT = 100


def patience(ttl: float) -> float:
    """Return how long an answer is waited for."""
    return answer_time(ttl, SHORTEST)


class Sessions:
    """All sessions of a client."""

    def __init__(
        self,
        world: World,
        links: Links,
        facts: Facts,
        witness: bytes,
        on_ended: Callable[[Lease], None],
        on_purged: Callable[[Sequence[str]], None],
        tomb: Callable[[str], bytes | None],
    ) -> None:
        self._world = world
        self._links = links
        self._facts = facts
        self._witness = witness
        """A key to ask for, whatever it holds: that it can be read shows that the leader is the leader."""
        self._on_ended = on_ended
        self._on_purged = on_purged
        self._tomb = tomb
        """Where the tombstone of a claim has to stand, if it may still be on its way."""
        self._by_ttl: dict[int, Lease] = {}
        self._retired: list[Lease] = []
        """Sessions with tombstones: no new claims are made on them, so that they end, and what may still be on its way."""
        self._adopted: dict[int, Lease] = {}
        self._given_up: deque[int] = deque(maxlen=GIVEN_UP_KEPT)
        self._making: dict[int, Event] = {}

    def _all(self) -> list[Lease]:
        return [*self._by_ttl.values(), *self._retired, *self._adopted.values()]

    # ------------------------------------------------------------------ having one

    def current(self, ttl: float) -> Lease | None:
        """Return the session for a ttl, if there is one that is alive."""
        session = self._by_ttl.get(int(rung(ttl, LADDER)))
        return session if session is not None and session.alive(self._world.now()) else None

    async def make(self, ttl: float, within: float) -> Lease:
        """Return a new session, or the one that somebody else makes meanwhile, within so many seconds."""
        seconds = int(rung(ttl, LADDER))
        mine = self._world.event()
        try:
            while (other := self._making.setdefault(seconds, mine)) is not mine:
                await other.wait(within)
                if (session := self.current(ttl)) is not None:
                    return session
                if other.is_set():
                    continue
                break  # it takes too long: not all have to wait for one that hangs
            session = self.current(ttl)
            if session is None:
                self._tidy()
                self._leave(seconds)
                session = self._by_ttl[seconds] = await self._grant(seconds, within)
            return session
        finally:
            if self._making.get(seconds) is mine:
                del self._making[seconds]
            mine.set()

    async def _grant(self, seconds: int, within: float) -> Lease:
        # The number is ours, so that asking twice gives one lease; `since` lies before the first time it was asked for.
        number = int.from_bytes(urandom(8), "big") >> 1 or 1
        since = self._world.now()
        try:
            _, given = read_lease(await self._links.ask(GRANT, grant(number, seconds), within))
        except Refused as refusal:
            if "lease already exists" not in str(refusal):
                raise refusal.told(self._links.address) from refusal
            given = await self._ttl_of(number, within)
        session: Lease = Session(number, float(seconds), since)
        if given != seconds:
            await self._revoke([session])
            raise InvalidTTL(
                f"etcd at {self._links.address} keeps leases for {given} seconds at least, so {seconds} cannot be promised: "
                f"ask for a ttl of {given} or more, or give it a shorter --election-timeout"
            )
        return session

    async def _ttl_of(self, number: int, within: float) -> int:
        """Return the ttl of a lease whose grant was not answered the first time."""
        try:
            return read_lease(await self._links.ask(KEEP_ALIVE, of_lease(number), within))[1]
        except Refused as refusal:
            raise refusal.told(self._links.address) from refusal

    def _leave(self, seconds: int) -> None:
        """Give up a session that is over by our clock, and all that is left on it, whatever etcd's clock says."""
        old = self._by_ttl.pop(seconds, None)
        if old is not None:
            self._give_up([old])

    def _give_up(self, sessions: Sequence[Lease]) -> None:
        left = []
        now = self._world.now()
        for session in sessions:
            if not session.ended:
                if session.claims() or session.alive(now):
                    left.append(session)
                session.ended = True
                self._given_up.append(session.handle)
                self._on_ended(session)
        if left:
            self._world.spawn(self._revoke(left), "fencelock-revoke")

    def retire(self, session: Lease) -> None:
        """Make no more claims on a session: one that was abandoned may still arrive on it for as long as it lives.

        A tombstone keeps it away meanwhile. Both end with the session, and that when nothing else is left on it.
        """
        if self._by_ttl.get(int(session.ttl)) is session:
            del self._by_ttl[int(session.ttl)]
            self._retired.append(session)

    def _tidy(self) -> None:
        """Give up the retired sessions on which nothing is left, or whose time is over by our clock."""
        now = self._world.now()
        over = [session for session in self._retired if not session.claims() or not session.alive(now)]
        for session in over:
            if session in self._retired:
                self._retired.remove(session)
        self._give_up(over)

    def end_all(self) -> None:
        """Give up all sessions: etcd's past was changed, and nobody knows which claims there still are."""
        ours, others = [*self._by_ttl.values(), *self._retired], list(self._adopted.values())
        self._by_ttl, self._retired, self._adopted = {}, [], {}
        self._give_up(ours)
        for session in others:
            self.ended(session)

    def ended(self, session: Lease) -> None:
        """Take in that etcd has ended a session: all claims on it are gone."""
        if not session.ended:
            session.ended = True
            self._on_ended(session)
        if self._by_ttl.get(int(session.ttl)) is session:
            self._by_ttl.pop(int(session.ttl), None)
        if session in self._retired:
            self._retired.remove(session)

    def adopt(self, lease: int, ttl: float) -> Lease:
        """Return the session that another client made a claim on which is ours to go on with; nobody has heard of it yet."""
        for session in self._retired:
            if session.handle == lease:
                return session
        for number, session in list(self._adopted.items()):
            if session.ended or not session.claims():
                self._adopted.pop(number, None)
        return self._adopted.setdefault(lease, Session(lease, ttl, -inf))

    def given_up(self, lease: int) -> bool:
        """Return whether it was a session of ours, and is over by our clock."""
        return lease in self._given_up

    def end_of(self, keys: Sequence[str]) -> float | None:
        """Return when the first of these claims is over, of those that are ours."""
        ends = [end for session in self._all() for key in keys if (end := session.end_of(key)) is not None]
        return min(ends, default=None)

    def let_go(self, key: str) -> None:
        """Forget a claim that is no longer on etcd."""
        for session in self._all():
            session.let_go(key)

    def give_up(self, key: str) -> None:
        """Have a claim be over now: if whoever deletes it is interrupted, it goes before the next sign of life."""
        for session in self._all():
            if session.end_of(key) is not None:
                session.give_up(key)

    # ------------------------------------------------------------------ signs of life

    def stale(self, session: Lease, share: float = FRESH) -> bool:
        """Return whether an attempt should bring a sign of life along, and may: not while something has to go first."""
        now = self._world.now()
        return now - session.since > session.ttl * share and not session.over(now)

    def knock(self, session: Lease, link: Link) -> tuple[Call, float]:
        """Send a sign of life, along with a question for which a majority is asked."""
        return link.start(KEEP_ALIVE, of_lease(session.handle)), self._world.now()

    async def heard(self, session: Lease, link: Link, knock: tuple[Call, float], term: int, left: float) -> Renewal:
        """Take in the answer to a sign of life.

        Leases live in the memory of the leader alone, and one that was stopped, or cut off, goes on answering for them until
        it learns that there is a new one. So the answer counts only if a majority has answered another question, sent no
        earlier and to the same member, in the same term or an earlier one: whoever leads later began after we sent it, and
        gives every lease its whole ttl from there.
        """
        call, sent = knock
        known, ttl = 0, 0
        try:
            header, ttl = read_lease(await link.finish(call, left))
            known = header.term
        except Refused as refusal:
            if not refusal.no_lease:
                raise
        if ttl <= 0:
            self.ended(session)
            return Renewal.LOST
        if term > known:
            return Renewal.UNKNOWN
        session.ttl = float(ttl)
        session.answered(sent)
        return Renewal.RENEWED

    async def renew(self, sessions: Sequence[Lease]) -> list[Renewal]:
        """Keep sessions alive: one sign of life for each, all sent at once, and one question for a majority."""
        answers = dict.fromkeys(sessions, Renewal.UNKNOWN)
        asked = []
        now = self._world.now()
        for session in sessions:
            if session.ended:
                answers[session] = Renewal.LOST
            elif session.alive(now) and await self.purge(session):
                asked.append(session)
        if not asked:
            return list(answers.values())

        async def work(link: Link, left: float) -> None:
            until = self._world.now() + left
            knocks = [self.knock(session, link) for session in asked]
            floor = self._facts.revision
            question = link.start(RANGE, count(self._witness))
            header, _ = read_range(await link.finish(question, left))
            self._facts.take(header, floor)
            for session, knock in zip(asked, knocks, strict=True):
                rest = max(0.001, until - self._world.now())
                answers[session] = await self.heard(session, link, knock, header.term, rest)

        try:
            await self._links.run(work, patience(min(session.ttl for session in asked)))
        except Refused as refusal:
            raise refusal.told(self._links.address) from refusal
        return list(answers.values())

    # ------------------------------------------------------------------ what must not live on

    async def purge_all(self, within: float = LONGEST) -> None:
        """Delete what is over by our clock, of all sessions."""
        now = self._world.now()
        for session in self._all():
            if session.over(now):
                await self.purge(session, within)

    async def purge(self, session: Lease, within: float = LONGEST) -> bool:
        """Delete what is over by our clock; False if that cannot be, and the session must not be kept alive then."""
        over = session.over(self._world.now())
        if not over:
            return True
        # A claim that is made anew meanwhile, under the same id, has a later revision and is left alone.
        until = self._facts.revision + 1
        later: list[str] = []
        try:
            for start in range(0, len(over), PURGE_AT_ONCE):
                keys = over[start : start + PURGE_AT_ONCE]
                if not await self._delete(session, keys, until, within):
                    later += [key for key in keys if not await self._delete(session, [key], until, within)]
        except (EngineUnavailable, Refused):
            return False
        now = self._world.now()
        still = [key for key in over if (end := session.end_of(key)) is not None and end <= now]
        gone = [key for key in still if key not in later]
        for key in gone:
            session.let_go(key)
        self._on_purged(gone)
        return len(gone) == len(still)  # what came so late that we had not seen its revision goes the next time

    async def _delete(self, session: Lease, keys: Sequence[str], until: int, within: float) -> bool:
        encoded = [key.encode() for key in keys]
        tombs = [do_put(put(tomb, b"", session.handle)) for key in keys if (tomb := self._tomb(key)) is not None]
        if tombs:
            self.retire(session)
        steps = [*(do_delete(key) for key in encoded), *tombs]
        body = txn([created(key, LESS, until) for key in encoded], steps)
        floor = self._facts.revision
        answer = read_txn(await self._links.ask(TXN, body, within))
        self._facts.take(answer.header, floor)
        return answer.succeeded

    async def close(self) -> None:
        """Revoke all, and what is left on them with them."""
        now = self._world.now()
        left = [session for session in (*self._by_ttl.values(), *self._retired) if session.alive(now)]
        self._by_ttl, self._retired = {}, []
        await self._revoke(left)

    async def _revoke(self, sessions: Sequence[Lease]) -> None:
        async def work(link: Link, left: float) -> None:
            calls = [link.start(REVOKE, of_lease(session.handle)) for session in sessions]
            for call in calls:
                try:
                    await link.finish(call, left)
                except Refused as refusal:
                    if refusal.elsewhere:
                        raise

        if sessions:
            try:
                await self._links.run(work, GOODBYE_SECONDS)
            except (FencelockError, Refused):
                pass  # they run out by themselves

    def forget(self) -> None:
        """Begin anew in a forked child: the parent's sessions are not ours to end."""
        self._by_ttl, self._retired, self._adopted, self._making = {}, [], {}, {}
