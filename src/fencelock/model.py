"""What the parts of fencelock say to each other, and the one rule of admission. No I/O, no clock, no colour.

A `Claim` is one wish to hold a name. Engines keep claims in the order in which they came; `admit` says which of them may
hold the name now. A claim that may is a `Grant`; what the user gets to hold is a `Lease` (`core/lease.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, StrEnum
from functools import lru_cache
from os import urandom
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

DRIFT_SHARE = 0.01
DRIFT_FLOOR = 0.002

TOKEN_MAX = 2**53 - 1
"""Tokens stay exact in JSON and in a double."""


def new_id() -> str:
    """Return 128 random bits: made before anything is sent, so that a retry finds its own earlier claim."""
    return urandom(16).hex()


@lru_cache(1024)
def clock_margin(ttl: float) -> float:
    """Return how far two clocks may run apart, or be read late, over a ttl: 1 % and 2 ms."""
    return ttl * DRIFT_SHARE + DRIFT_FLOOR


class _Claim(NamedTuple):
    name: str
    ttl: float
    owner: str
    shared: bool
    limit: int | None
    id: str


class Claim(_Claim):
    """One wish to hold a name, exclusively, shared, or as one of `limit` permits."""

    __slots__ = ()

    def __new__(
        cls,
        name: str,
        ttl: float,
        owner: str = "",
        shared: bool = False,
        limit: int | None = None,
        id: str | None = None,
    ) -> Claim:
        # Past `new_id` and the named tuple's own __new__, which would only do this: they are half of the time.
        return tuple.__new__(cls, (name, ttl, owner, shared, limit, urandom(16).hex() if id is None else id))

    def again(self) -> Claim:
        """Return the same wish under a new id, for when the old one is beyond saving."""
        return self._replace(id=new_id())


class Grant(NamedTuple):
    """A claim that was admitted, with its token.

    The claim is as the engine keeps it: where claims share a session, its ttl may be less than what was asked for.
    `since` is a time on the client's clock that is known to lie before the engine started to count the ttl.
    """

    claim: Claim
    token: int
    since: float
    handle: Any = None
    attempt_in_flight: bool = False
    """An attempt of this claim got no answer and may yet arrive, after the release even: it has to be abandoned too."""

    @property
    def deadline(self) -> float:
        """When the holder must stop, by its own clock: always before the engine lets anybody else in."""
        return self.since + self.claim.ttl - clock_margin(self.claim.ttl)


class Waiting(NamedTuple):
    """A claim that has to wait.

    `since` is when the last sign of life that the engine answered was sent. `retry_in` is set for whoever is first in
    line: the seconds after which the holder will have run out if it is not heard of.
    """

    claim: Claim
    since: float
    retry_in: float | None = None
    handle: Any = None


class Renewal(Enum):
    """What an engine can say to a renewal. UNKNOWN is an answer of its own and never moves a deadline."""

    RENEWED = "renewed"
    HELD = "held"
    LOST = "lost"
    UNKNOWN = "unknown"


class LossReason(StrEnum):
    """How a lease was lost.

    >>> LossReason.EXPIRED == "expired"
    True
    """

    EXPIRED = "expired"
    """Its deadline passed: it could not be renewed in time, or its process was stopped."""
    GONE = "gone"
    """The engine no longer has it: released by force, flushed, or the session was ended there."""
    MAX_HOLD = "max_hold"
    """It was held for as long as `max_hold` allows."""
    FORKED = "forked"
    """This is the copy in a forked child; the parent goes on holding it."""
    CLOSED = "closed"
    """The client was closed."""


class TokenGuarantee(StrEnum):
    """What keeps an engine's tokens rising, from the strongest to the weakest."""

    CONSENSUS = "consensus"
    DURABLE = "durable"
    QUORUM = "quorum"
    CLOCKED = "clocked"
    MEMORY = "memory"


CORRECT = frozenset({TokenGuarantee.CONSENSUS, TokenGuarantee.DURABLE})
"""The strengths that `purpose="correctness"` accepts: tokens that do not repeat after a failure."""


class Traits(NamedTuple):
    """What an engine promises. Everything that differs between engines is declared here or does not differ."""

    engine: str
    guarantee: TokenGuarantee
    fair: bool
    push: bool
    """Waiters are woken by the engine; otherwise they poll with backoff."""
    loss_pushed: bool
    """A lock that the engine itself drops is told at once; otherwise at the next renewal."""
    shared: bool = True
    limit: bool = True
    session: bool = False
    """Liveness hangs on a session rather than on a time per claim."""
    ttl_min: float = 0.1
    ttl_max: float = 86400.0
    weakness: str = ""
    """The setting of the server that makes its tokens weaker than this engine's usually are, and what to change."""

    def weakened(self, weakness: str) -> Traits:
        """Return the traits of an engine whose server may forget commits in a crash: only its clock keeps tokens rising.

        >>> Traits("mysql", TokenGuarantee.DURABLE, True, True, False).weakened("set sync_binlog to 1").guarantee.value
        'clocked'
        """
        return self._replace(guarantee=TokenGuarantee.CLOCKED, weakness=weakness) if weakness else self


class Holder(NamedTuple):
    """One line of `inspect`: a claim that holds the name. `expires_in` is the engine's view, in seconds.

    `held_for` is the time since the engine granted it, in seconds; None on etcd and ZooKeeper, which do not record it.
    """

    owner: str
    token: int
    expires_in: float
    shared: bool = False
    limit: int | None = None
    held_for: float | None = None


def held_for(token: int, clock: float) -> float | None:
    """Return the seconds since a token was minted, on engines whose tokens are the clock in µs; None for no token.

    It is 0 while the clock is behind the token, as after the clock was set back.

    >>> held_for(1_700_000_000_000_000, 1_700_000_002_500_000)
    2.5
    """
    return max(0.0, (clock - token) / 1e6) if token else None


class Waiter(NamedTuple):
    """One line of `inspect`: a claim in the queue, in order of service if the engine has one."""

    owner: str
    expires_in: float
    shared: bool = False
    limit: int | None = None


class Snapshot(NamedTuple):
    """What `inspect` returns: who holds a name and who waits for it, at one moment."""

    name: str
    holders: tuple[Holder, ...] = ()
    waiters: tuple[Waiter, ...] = ()

    @property
    def token(self) -> int | None:
        """The highest token that holds the name now, or None when it is free."""
        return max((holder.token for holder in self.holders), default=None)


class Until(Enum):
    """Which of the claims in `Blocked.by` have to go before it is worth asking again."""

    ALL = "all"
    ANY = "any"


class Admitted:
    """The claim may hold the name now."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Admitted)

    def __hash__(self) -> int:
        return hash(Admitted)

    def __repr__(self) -> str:
        return "Admitted()"


class Blocked(NamedTuple):
    """The claim has to wait for these others; they are the only ones worth watching."""

    by: tuple[str, ...]
    until: Until


class Place(Protocol):
    """As much of a claim as admission looks at."""

    @property
    def id(self) -> str: ...
    @property
    def shared(self) -> bool: ...
    @property
    def limit(self) -> int | None: ...


ADMITTED = Admitted()


def admit(queue: Sequence[Place], me: Place) -> Admitted | Blocked:
    """Decide whether `me` may hold the name, given the claims that came before it, oldest first.

    Only what stands before `me` counts, so nobody overtakes. An exclusive claim waits for everybody ahead, a reader for
    the exclusive ones, a permit for a place. Whom to watch is chosen so that one departure wakes one waiter.

    >>> a, b = Claim("n", 30), Claim("n", 30)
    >>> admit([a, b], a)
    Admitted()
    >>> admit([a, b], b) == Blocked(by=(a.id,), until=Until.ALL)
    True
    """
    ahead: list[Place] = []
    for place in queue:
        if place.id == me.id:
            break
        ahead.append(place)
    if not ahead:
        return ADMITTED
    if not me.shared:
        return Blocked((ahead[-1].id,), Until.ALL)
    for place in reversed(ahead):
        if not place.shared:
            return Blocked((place.id,), Until.ALL)
    if me.limit is None or len(ahead) < me.limit:
        return ADMITTED
    if len(ahead) == me.limit:
        return Blocked(tuple(place.id for place in ahead), Until.ANY)
    return Blocked((ahead[-1].id,), Until.ALL)


class Queued(Place, Protocol):
    """As much of a queued claim as `settle` looks at: `expires` is by the engine's clock, `token` None while waiting."""

    @property
    def token(self) -> int | None: ...
    @property
    def expires(self) -> float: ...


Q = TypeVar("Q", bound=Queued)


class QueueUpdate(Generic[Q]):
    """What has to be written so that a queue is in order again."""

    __slots__ = ("admitted", "dead", "first", "holders_end")

    def __init__(self) -> None:
        self.dead: list[Q] = []
        self.admitted: list[Q] = []
        self.first: Q | None = None
        """The first in line: the one waiter that sets a timer for the holders."""
        self.holders_end: float | None = None
        """When the first of the holders runs out, by the engine's clock."""


def advance_queue(queue: Iterable[Q], now: float) -> QueueUpdate[Q]:
    """Decide who has run out and who may hold the name next; the caller mints the tokens and writes it down.

    `queue` is every claim on the name, oldest first. It is read only as far as the first waiter that stays blocked, as
    nobody overtakes: a queue of thousands costs no more than one of two.
    """
    settled: QueueUpdate[Q] = QueueUpdate()
    ahead: list[Q] = []
    for place in queue:
        if place.expires <= now:
            settled.dead.append(place)
            continue
        if place.token is None:
            if isinstance(admit(ahead, place), Blocked):
                settled.first = place
                break
            settled.admitted.append(place)
        elif settled.holders_end is None or place.expires < settled.holders_end:
            settled.holders_end = place.expires
        ahead.append(place)
    return settled


def limit_conflict(queue: Iterable[Place], me: Place) -> str | None:
    """Say how `me` contradicts the others on its name, or return None: shared claims must agree on the limit.

    >>> limit_conflict([Claim("n", 30, shared=True, limit=3)], Claim("n", 30, shared=True, limit=5))
    'others use it with 3 permits, not with 5 permits'
    """
    if me.shared:
        for place in queue:
            if place.shared and place.limit != me.limit:
                return f"others use it {_mode(place)}, not {_mode(me)}"
    return None


def _mode(place: Place) -> str:
    return "for any number of readers" if place.limit is None else f"with {place.limit} permits"
