"""The values that the layers exchange, and the one admission rule. No I/O and no clock.

A `Claim` is one request to hold a name. Engines keep the claims of a name in order of arrival; `blockers` decides which
of them may hold the name now. An admitted claim becomes a `Grant`; the user holds a `Lease` (`core/lease.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, StrEnum
from functools import lru_cache
from os import urandom
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

CLOCK_MARGIN_SHARE = 0.01
CLOCK_MARGIN_MIN = 0.002

TOKEN_MAX = 2**53 - 1
"""The largest token: JSON numbers and doubles are exact up to here."""


def new_id() -> str:
    """Return 128 random bits. The client makes the id before it sends anything, so a retry finds its own earlier claim."""
    return urandom(16).hex()


@lru_cache(1024)
def clock_margin(ttl: float) -> float:
    """Return the safety margin between the clocks of client and engine over a ttl: 1 % and 2 ms."""
    return ttl * CLOCK_MARGIN_SHARE + CLOCK_MARGIN_MIN


class Mode(StrEnum):
    """How a claim holds a name.

    >>> Mode.SHARED == "shared"
    True
    """

    EXCLUSIVE = "exclusive"
    """Alone: a lock, or the write side of a reader-writer lock."""
    SHARED = "shared"
    """Together with any number of readers."""
    PERMIT = "permit"
    """As one of at most `limit` holders of a semaphore."""

    @staticmethod
    def of(shared: bool, limit: int | None) -> Mode:
        """Return the mode of a claim that an engine stores as a flag and a limit."""
        return Mode.EXCLUSIVE if not shared else Mode.SHARED if limit is None else Mode.PERMIT


class _Claim(NamedTuple):
    name: str
    ttl: float
    owner: str
    mode: Mode
    limit: int | None
    value: str
    id: str


class Claim(_Claim):
    """One request to hold a name. `limit` is the number of permits in mode PERMIT; `value` is what an election stores."""

    __slots__ = ()

    def __new__(
        cls,
        name: str,
        ttl: float,
        owner: str = "",
        mode: Mode = Mode.EXCLUSIVE,
        limit: int | None = None,
        value: str = "",
        id: str | None = None,
    ) -> Claim:
        # Inlined `new_id` and NamedTuple.__new__: the calls would take half of the time.
        return tuple.__new__(cls, (name, ttl, owner, mode, limit, value, urandom(16).hex() if id is None else id))

    @property
    def shared(self) -> bool:
        """Whether others may hold the name at the same time."""
        return self.mode is not Mode.EXCLUSIVE

    def with_new_id(self) -> Claim:
        """Return the same claim with a new id, for when the engine no longer accepts the old one."""
        return self._replace(id=new_id())


class Grant(NamedTuple):
    """A claim that was admitted, with its token.

    The claim is the one that the engine stores: where claims share a session, its ttl may be below the requested one.
    `since` is a time on the client's clock that lies before the engine started to count the ttl.
    """

    claim: Claim
    token: int
    since: float
    engine_state: Any = None
    attempt_in_flight: bool = False
    """An attempt of this claim got no reply and may still reach the engine, even after the release: abandon the claim too."""

    @property
    def deadline(self) -> float:
        """When the holder must stop, by its own clock: always before the engine grants the lock to another claim."""
        return self.since + self.claim.ttl - clock_margin(self.claim.ttl)

    def downgraded(self, since: float) -> Grant:
        """Return the shared grant that a downgrade, sent at `since`, made of this one."""
        return self._replace(claim=self.claim._replace(mode=Mode.SHARED), since=since)


class Waiting(NamedTuple):
    """A claim that has to wait.

    `since` is when the client sent the last attempt that the engine answered. `retry_in` is the number of seconds until
    what the claim waits for expires unless it is renewed: the holders, for the first waiter; else the waiter ahead.
    """

    claim: Claim
    since: float
    retry_in: float | None = None
    engine_state: Any = None


class Renewal(Enum):
    """The result of a renewal. UNKNOWN (no reply) never moves a deadline."""

    RENEWED = "renewed"
    LOST = "lost"
    UNKNOWN = "unknown"


class LossReason(StrEnum):
    """How a lease was lost.

    >>> LossReason.EXPIRED == "expired"
    True
    """

    EXPIRED = "expired"
    """Its deadline passed: no renewal succeeded in time, or its process was stopped."""
    GONE = "gone"
    """The engine no longer has the claim: it was released by force or flushed, or its session ended."""
    MAX_HOLD = "max_hold"
    """It was held for `max_hold` seconds."""
    STALLED = "stalled"
    """Its holder did not call `lease.progress()` for `stall_after` seconds, so it was no longer renewed."""
    FORKED = "forked"
    """This is the copy in a forked child; the parent still holds the lease."""
    CLOSED = "closed"
    """The client was closed."""


class TokenGuarantee(StrEnum):
    """Why an engine's tokens always rise, from the strongest guarantee to the weakest."""

    CONSENSUS = "consensus"
    """A majority of members has agreed on the token; no failure of a minority makes it repeat."""
    DURABLE = "durable"
    """The counter is on disk before a token is used; no crash makes it repeat."""
    QUORUM = "quorum"
    """Tokens rise as long as a majority of nodes keeps its data."""
    CLOCKED = "clocked"
    """Tokens rise unless the engine loses its data and its clock goes back."""
    MEMORY = "memory"
    """Tokens rise within one process; a new process starts at the clock."""


CORRECT = frozenset({TokenGuarantee.CONSENSUS, TokenGuarantee.DURABLE})
"""The guarantees that `purpose="correctness"` accepts: tokens do not repeat after a failure."""


class Traits(NamedTuple):
    """What an engine promises. All differences between engines that a user can notice are declared here."""

    engine: str
    """Its name, such as "redis"."""
    guarantee: TokenGuarantee
    """Why its tokens always rise."""
    fair: bool
    """Waiters are served in the order in which they came."""
    loss_pushed: bool
    """The engine reports a lock that it dropped immediately; otherwise the next renewal finds out."""
    readers: bool = True
    """It has readers: `rwlock`, and `read=` of `multi`."""
    permits: bool = True
    """It has permits: `semaphore`."""
    session: bool = False
    """A claim lives as long as a session, not for a ttl of its own."""
    ttl_min: float = 0.1
    """The shortest ttl in seconds."""
    ttl_max: float = 86400.0
    """The longest ttl in seconds."""
    weakness: str = ""
    """The server's setting that weakens its tokens, and what to change; empty if there is none."""

    def weakened(self, weakness: str) -> Traits:
        """Return the traits of an engine whose server may lose commits in a crash: only its clock keeps tokens rising.

        >>> Traits("mysql", TokenGuarantee.DURABLE, True, False).weakened("set sync_binlog to 1").guarantee.value
        'clocked'
        """
        return self._replace(guarantee=TokenGuarantee.CLOCKED, weakness=weakness) if weakness else self


class Holder(NamedTuple):
    """A claim that holds the name, in a `Snapshot`."""

    owner: str
    """The label of its client."""
    token: int
    """Its fencing token."""
    expires_in: float
    """Seconds until it expires unless it is renewed, by the engine's clock."""
    mode: Mode = Mode.EXCLUSIVE
    """How it holds the name."""
    limit: int | None = None
    """The number of permits, for a semaphore."""
    held_for: float | None = None
    """Seconds since the engine granted it; None if the engine does not know."""
    value: str = ""
    """The value of an election's candidate."""


def held_for(token: int, clock: float) -> float | None:
    """Return the seconds since a token was minted, on engines whose tokens are the clock in µs; None without a token.

    It is 0 while the clock is behind the token, as after the clock was set back.

    >>> held_for(1_700_000_000_000_000, 1_700_000_002_500_000)
    2.5
    """
    return max(0.0, (clock - token) / 1e6) if token else None


class Waiter(NamedTuple):
    """A claim that waits for the name, in a `Snapshot`; in order of service if the engine is fair."""

    owner: str
    """The label of its client."""
    expires_in: float
    """Seconds until the engine drops it unless its client gives a sign of life."""
    mode: Mode = Mode.EXCLUSIVE
    """How it will hold the name."""
    limit: int | None = None
    """The number of permits, for a semaphore."""
    value: str = ""
    """The value of an election's candidate."""


StoredClaim = tuple[str, int | None, float, bool, int | None, str]
"""Owner, token (None while the claim waits), seconds left, shared, limit, and value."""


class Snapshot(NamedTuple):
    """The holders and waiters of a name at one moment; `inspect` returns it."""

    name: str
    """The name of the lock."""
    holders: tuple[Holder, ...] = ()
    """The claims that hold it: one, or several readers or permits."""
    waiters: tuple[Waiter, ...] = ()
    """The claims that wait for it."""

    @classmethod
    def of(cls, name: str, claims: Iterable[StoredClaim], clock: float) -> Snapshot:
        """Return the snapshot of the stored claims of a name, in queue order, at `clock` µs on the tokens' scale."""
        holders: list[Holder] = []
        waiters: list[Waiter] = []
        for owner, token, expires_in, shared, limit, value in claims:
            mode = Mode.of(shared, limit)
            if token is None:
                waiters.append(Waiter(owner, expires_in, mode, limit, value))
            else:
                holders.append(Holder(owner, token, expires_in, mode, limit, held_for(token, clock), value))
        return cls(name, tuple(holders), tuple(waiters))

    @property
    def token(self) -> int | None:
        """The highest token that holds the name now, or None when it is free."""
        return max((holder.token for holder in self.holders), default=None)

    @property
    def limits(self) -> tuple[int, ...]:
        """The limits that holders and waiters of a semaphore use, in order; more than one means that they disagree."""
        limits = [holder.limit for holder in self.holders] + [waiter.limit for waiter in self.waiters]
        return tuple(sorted({limit for limit in limits if limit is not None}))


class Contender(Protocol):
    """The part of a claim that admission needs. No other claim of the same queue has its `id`."""

    @property
    def id(self) -> str: ...
    @property
    def shared(self) -> bool: ...
    @property
    def limit(self) -> int | None: ...


def blockers(queue: Sequence[Contender], me: Contender) -> tuple[str, ...]:
    """Return the ids of the earlier claims that `me` has to watch; empty if `me` may hold the name now.

    This is the admission rule. `queue` has the claims in order of arrival; only those before `me` count, and no claim
    overtakes a blocked one. An exclusive claim waits for all earlier ones, a reader for the exclusive ones, a permit until
    fewer than its own `limit` are ahead. When one of the returned claims is gone, ask again: a departure wakes
    one writer, or all readers or permits that it blocked.

    >>> a, b = Claim("n", 30), Claim("n", 30)
    >>> blockers([a, b], a)
    ()
    >>> blockers([a, b], b) == (a.id,)
    True
    """
    ahead: list[Contender] = []
    for entry in queue:
        if entry.id == me.id:
            break
        ahead.append(entry)
    if not ahead:
        return ()
    if not me.shared:
        return (ahead[-1].id,)
    for entry in reversed(ahead):
        if not entry.shared:
            return (entry.id,)
    # Only readers and permits are ahead. A permit with fewer claims ahead of it than its limit holds the name.
    if all(entry.limit is None or place < entry.limit for place, entry in enumerate([*ahead, me])):
        return ()
    return tuple(entry.id for entry in ahead)


class QueueEntry(Contender, Protocol):
    """The part of a queued claim that `advance_queue` needs. `expires` is by the engine's clock; waiters have no token."""

    @property
    def token(self) -> int | None: ...
    @property
    def expires(self) -> float: ...


Q = TypeVar("Q", bound=QueueEntry)


class QueueUpdate(Generic[Q]):
    """The changes that an engine must write after `advance_queue`."""

    __slots__ = ("admitted", "expired", "first_blocked", "holders_end")

    def __init__(self) -> None:
        self.expired: list[Q] = []
        self.admitted: list[Q] = []
        self.first_blocked: Q | None = None
        """The first waiter: it alone sets a timer for the expiry of the holders."""
        self.holders_end: float | None = None
        """When the first holder expires, by the engine's clock."""


def advance_queue(queue: Iterable[Q], now: float) -> QueueUpdate[Q]:
    """Decide which claims have expired and which may hold the name now; the caller mints tokens and writes the changes.

    `queue` is every claim on the name, oldest first. It is read up to the first waiter that stays blocked, as no claim
    overtakes: a queue of thousands costs no more than one of two.
    """
    update: QueueUpdate[Q] = QueueUpdate()
    ahead: list[Q] = []
    for entry in queue:
        if entry.expires <= now:
            update.expired.append(entry)
            continue
        if entry.token is None:
            if blockers(ahead, entry):
                update.first_blocked = entry
                break
            update.admitted.append(entry)
        elif update.holders_end is None or entry.expires < update.holders_end:
            update.holders_end = entry.expires
        ahead.append(entry)
    return update
