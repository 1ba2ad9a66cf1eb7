"""Sessions: a lease of etcd's for each rung of the ladder of ttls, and the keep-alives that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import urandom
from typing import TYPE_CHECKING

from fencelock.core.engine import MAX_REPLY_TIMEOUT, reply_timeout
from fencelock.core.sessions import Session, ttl_step
from fencelock.engines.etcd.facts import Facts
from fencelock.engines.etcd.link import Call, Link, Refused
from fencelock.engines.etcd.messages import (
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
    do_range,
    find,
    grant,
    of_lease,
    put,
    read_lease,
    read_range,
    read_txn,
    txn,
    valued,
)
from fencelock.errors import EngineUnavailable, FencelockError, InvalidTTL
from fencelock.model import Renewal

if TYPE_CHECKING:
    from fencelock.core.runtime import Event, Runtime
    from fencelock.engines.etcd.keys import Keys
    from fencelock.engines.etcd.links import Links

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


def patience(ttl: float) -> float:
    """Return how long an answer is waited for."""
    return reply_timeout(ttl, SHORTEST)


class Sessions:
    """All sessions of a client."""

    def __init__(
        self,
        runtime: Runtime,
        links: Links,
        facts: Facts,
        witness: bytes,
        keys: Keys,
        on_ended: Callable[[Lease], None],
        on_purged: Callable[[Sequence[str]], None],
        tomb: Callable[[str], bytes | None],
    ) -> None:
        self._runtime = runtime
        self._links = links
        self._facts = facts
        self._witness = witness
        """A key to ask for, whatever it holds: that it can be read shows that the leader is the leader."""
        self._keys = keys
        self._on_ended = on_ended
        self._on_purged = on_purged
        self._tomb = tomb
        """Where the tombstone of a claim has to stand, if it may still be on its way."""
        self.forget()

    def forget(self) -> None:
        """Begin anew in a forked child: the parent's sessions are not ours to end."""
        self._sessions: dict[int, Lease] = {}
        """By the number of etcd's lease, every session that was not ended. A number is never used twice, so no session can
        take another's place here, whichever threads and signal handlers make and end sessions at the same time: claims may
        hang on each of them."""
        self._current: dict[int, Lease] = {}
        """By ttl, the session for new claims."""
        self._making: dict[int, Event] = {}

    def _all(self) -> list[Lease]:
        return list(self._sessions.values())

    def find(self, lease: int) -> Lease | None:
        """Return the session that has this lease of etcd's, if it is one of ours and was not ended."""
        return self._sessions.get(lease)

    # ------------------------------------------------------------------ having one

    def current(self, ttl: float) -> Lease | None:
        """Return the session for a ttl, if there is one that is alive."""
        session = self._current.get(int(ttl_step(ttl, LADDER)))
        return session if session is not None and session.alive(self._runtime.now()) else None

    async def make(self, ttl: float, within: float) -> Lease:
        """Return a new session, or the one that somebody else makes meanwhile, within so many seconds."""
        seconds = int(ttl_step(ttl, LADDER))
        mine = self._runtime.event()
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
                session = self._store(seconds, await self._grant(seconds, within))
            return session
        finally:
            if self._making.get(seconds) is mine:
                del self._making[seconds]
            mine.set()

    def _store(self, seconds: int, new: Lease) -> Lease:
        """Store and return a new session, or return the live one that another attempt has stored and revoke the new one."""
        self._sessions[new.handle] = new
        old = self._current.setdefault(seconds, new)
        if old is new:
            return new
        if old.alive(self._runtime.now()):
            self._give_up([new])
            return old
        self._current[seconds] = new
        self._give_up([old])
        return new

    async def _grant(self, seconds: int, within: float) -> Lease:
        # The number is ours, so that asking twice gives one lease; `since` lies before the first time it was asked for.
        number = int.from_bytes(urandom(8), "big") >> 1 or 1
        since = self._runtime.now()
        try:
            _, given = read_lease(await self._links.request(GRANT, grant(number, seconds), within))
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
            return read_lease(await self._links.request(KEEP_ALIVE, of_lease(number), within))[1]
        except Refused as refusal:
            raise refusal.told(self._links.address) from refusal

    def _give_up(self, sessions: Sequence[Lease]) -> None:
        """End sessions and all that is left on them, whatever etcd's clock says."""
        left = []
        now = self._runtime.now()
        for session in sessions:
            self._sessions.pop(session.handle, None)
            if not session.ended:
                if session.claims() or session.alive(now):
                    left.append(session)
                session.ended = True  # before `_on_ended`: see `Claims.hold`
                self._on_ended(session)
        if left:
            self._runtime.spawn(self._revoke(left), "fencelock-revoke")

    def retire(self, session: Lease) -> None:
        """Make no more claims on a session: one that was abandoned may still arrive on it for as long as it lives.

        A tombstone keeps it away meanwhile. Both end with the session, and that when nothing else is left on it.
        """
        for seconds, other in list(self._current.items()):
            if other is session:
                self._current.pop(seconds, None)

    def _tidy(self) -> None:
        """Give up the sessions for no new claims on which nothing is left, or whose time is over by our clock."""
        now = self._runtime.now()
        current = list(self._current.values())
        retired = [session for session in self._all() if session not in current]
        self._give_up([session for session in retired if not session.claims() or not session.alive(now)])

    def end_all(self) -> None:
        """Give up all sessions: etcd's past was changed, and nobody knows which claims there still are."""
        self._give_up(self._take_all())

    def _take_all(self) -> list[Lease]:
        self._current.clear()
        return [session for number in list(self._sessions) if (session := self._sessions.pop(number, None)) is not None]

    def ended(self, session: Lease) -> None:
        """Take in that etcd has ended a session: all claims on it are gone."""
        self._sessions.pop(session.handle, None)
        self.retire(session)
        if not session.ended:
            session.ended = True  # before `_on_ended`: see `Claims.hold`
            self._on_ended(session)

    def end_of(self, ids: Sequence[str]) -> float | None:
        """Return when the first of these claims is over, of those that hang on a session."""
        ends = [end for session in self._all() for id in ids if (end := session.end_of(id)) is not None]
        return min(ends, default=None)

    def let_go(self, id: str) -> None:
        """Forget a claim that is no longer on etcd."""
        for session in self._all():
            session.remove(id)

    def give_up(self, id: str) -> None:
        """Have a claim be over now: if whoever deletes it is interrupted, it goes before the next sign of life."""
        for session in self._all():
            if session.end_of(id) is not None:
                session.expire_claim(id)

    # ------------------------------------------------------------------ signs of life

    def stale(self, session: Lease, share: float = FRESH) -> bool:
        """Return whether an attempt should bring a sign of life along, and may: not while something has to go first."""
        now = self._runtime.now()
        return now - session.since > session.ttl * share and not session.expired(now)

    def knock(self, session: Lease, link: Link) -> tuple[Call, float]:
        """Send a sign of life, along with a question for which a majority is asked; return it, and a time before it was sent.

        The time is read first: a process that is stopped between the two must not take its lease for younger than it is.
        """
        sent = self._runtime.now()
        return link.start(KEEP_ALIVE, of_lease(session.handle)), sent

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
        session.confirm_alive(sent)
        return Renewal.RENEWED

    async def renew(self, sessions: Sequence[Lease]) -> list[Renewal]:
        """Keep sessions alive: one sign of life for each, all sent at once, and one question for a majority."""
        answers = dict.fromkeys(sessions, Renewal.UNKNOWN)
        asked = []
        now = self._runtime.now()
        for session in sessions:
            if session.ended:
                answers[session] = Renewal.LOST
            elif session.alive(now) and await self.purge(session):
                asked.append(session)
        if not asked:
            return list(answers.values())

        async def work(link: Link, left: float) -> None:
            until = self._runtime.now() + left
            knocks = [self.knock(session, link) for session in asked]
            floor = self._facts.revision
            question = link.start(RANGE, count(self._witness))
            header, _ = read_range(await link.finish(question, left))
            self._facts.take(header, floor)
            for session, knock in zip(asked, knocks, strict=True):
                rest = max(0.001, until - self._runtime.now())
                answers[session] = await self.heard(session, link, knock, header.term, rest)

        try:
            await self._links.run(work, patience(min(session.ttl for session in asked)))
        except Refused as refusal:
            raise refusal.told(self._links.address) from refusal
        return list(answers.values())

    # ------------------------------------------------------------------ what must not live on

    async def purge_all(self, within: float = MAX_REPLY_TIMEOUT) -> None:
        """Delete what is over by our clock, of all sessions."""
        now = self._runtime.now()
        for session in self._all():
            if session.expired(now):
                await self.purge(session, within)

    async def purge(self, session: Lease, within: float = MAX_REPLY_TIMEOUT) -> bool:
        """Delete what is over by our clock; False if that cannot be, and the session must not be kept alive then."""
        over = session.expire(self._runtime.now())
        if not over:
            return True
        # A claim that is made anew meanwhile, under the same id, has a later revision and is left alone.
        until = self._facts.revision + 1
        later: set[str] = set()
        try:
            for start in range(0, len(over), PURGE_AT_ONCE):
                later |= await self._delete(session, over[start : start + PURGE_AT_ONCE], until, within)
        except (EngineUnavailable, Refused):
            return False
        now = self._runtime.now()
        still = [id for id in over if (end := session.end_of(id)) is not None and end <= now]
        gone = [id for id in still if id not in later]
        for id in gone:
            session.remove(id)
        self._on_purged(
            [id for id in gone if self.end_of([id]) is None]
        )  # it may have been made anew on another session
        return len(gone) == len(still)  # what came so late that we had not seen its revision goes the next time

    async def _delete(self, session: Lease, ids: Sequence[str], until: int, within: float) -> set[str]:
        """Delete the keys of claims; return the claims whose keys are left because they were created later than `until`.

        A key is deleted only with the claim's own value, which has its id. A claim without a key has nothing on etcd.
        """
        found = {id: key for id in ids if (key := self._keys.of(id)) is not None}
        later: set[str] = set()
        while found:
            keys = {id: key.key.encode() for id, key in found.items()}
            tombs = [do_put(put(tomb, b"", session.handle)) for id in keys if (tomb := self._tomb(id)) is not None]
            if tombs:
                self.retire(session)
            compares = [
                compare
                for id, key in keys.items()
                for compare in (valued(key, found[id].value), created(key, LESS, until))
            ]
            steps = [*(do_delete(key) for key in keys.values()), *tombs]
            floor = self._facts.revision
            body = txn(compares, steps, [*(do_range(find(key)) for key in keys.values()), *tombs])
            answer = read_txn(await self._links.request(TXN, body, within))
            self._facts.take(answer.header, floor)
            if answer.succeeded:
                break
            # At least one is gone, or another claim has its key, or it was created later: the others are tried again.
            pairs = {id: answer.found(step) for step, id in enumerate(keys)}
            there = {id for id, pair in pairs.items() if pair and pair[0].value == found[id].value}
            later |= {id for id in there if pairs[id][0].created >= until}
            found = {id: found[id] for id in there - later}
        return later

    async def close(self) -> None:
        """Revoke all, and what is left on them with them."""
        now = self._runtime.now()
        await self._revoke([session for session in self._take_all() if session.alive(now)])

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
