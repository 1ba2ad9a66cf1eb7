"""The checker: decides, in O(n log n) per name, whether a history keeps what fencelock promises."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import NamedTuple, TypeVar

from fencelock.sim.check_records import Validity, cached_values, jobs, rate_limits, schedules
from fencelock.sim.history import Group, History, Kind, Observation, Op, Outcome, Term, Write

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Invariants:
    """What must hold in a history. An engine that loses its data keeps fewer of them."""

    exclusion: bool = True
    tokens: bool = True
    order: bool = True
    """First come, first served; only where operations carry the engine's tickets."""
    resource: bool = True
    free_at_most: float = inf
    """Seconds for which a name may be free while a caller waits in its queue."""
    clean: bool = True
    """A claim that was released, given up or cancelled leaves nothing on the engine, without waiting for a ttl."""
    ttl: float = inf
    """Seconds after the end of the run after which the engine has no claim at all."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise."""

    check: str
    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.check} of {self.name!r}: {self.message}"


def check(history: History, invariants: Invariants | None = None) -> list[Violation]:
    """Return every violation of the invariants.

    >>> from fencelock.sim.history import Op
    >>> def held(owner: str, token: int, start: float, end: float) -> Op:
    ...     return Op("x", Kind.ACQUIRE, owner, start, start, Outcome.OK, token, None, start, end)
    >>> print(*check(History([held("a", 1, 0.0, 2.0), held("b", 2, 1.5, 3.0)])), sep="\\n")
    exclusion of 'x': b (token 2) holds it from 1.5000, a (token 1) until 2.0000
    linearizability of 'x': b (token 2) was granted by 1.5000, but its turn came at 2.0000
    """
    invariants = invariants or Invariants()
    found: list[Violation] = []
    worked, observed = grouped(history.terms, "name"), grouped(history.observations, "name")
    for name, ops in grouped(history.ops, "name").items():
        grants = [op for op in ops if op.token is not None and op.outcome is Outcome.OK and op.kind in _ACQUIRES]
        found += _violations("exclusion", name, exclusion(grants)) if invariants.exclusion else ()
        found += _violations("linearizability", name, linearizability(grants)) if invariants.exclusion else ()
        found += _violations("tokens", name, tokens(grants)) if invariants.tokens else ()
        found += _violations("downgrade", name, downgrades(ops, grants))
        found += _violations("order", name, order(grants)) if invariants.order else ()
        found += _violations("wake-ups", name, wake_ups(ops, invariants.free_at_most))
        found += _violations("term", name, terms(worked[name], ops))
        found += _violations("observer", name, observations(observed[name], grants)) if invariants.tokens else ()
    if invariants.resource:
        for name, writes in grouped(history.writes, "resource").items():
            found += _violations("resource", name, resource(writes))
    found += records(history, invariants)
    found += groups(history.groups, history.ops)
    found += orphans(history, invariants)
    return found


_ACQUIRES = (Kind.ACQUIRE, Kind.TRY)


def records(history: History, invariants: Invariants) -> Iterator[Violation]:
    """Check jobs, rate limits and cached values."""
    ops, writes = grouped(history.ops, "name"), grouped(history.record_writes, "key")
    runs, watches = grouped(history.job_runs, "name"), grouped(history.watches, "name")
    for name in sorted({*runs, *watches}):
        yield from _violations("runs", name, jobs(runs[name], writes[name], Validity(ops[name])))
        if name.startswith("schedule:"):
            yield from _violations("slots", name, schedules(runs[name], writes[name], watches[name]))
    charges = grouped(history.charges, "key")
    for key, reservations in sorted(grouped(history.reservations, "key").items()):
        yield from _violations("rate", key, rate_limits(charges[key], reservations))
    builds = grouped(history.builds, "key")
    for key, calls in sorted(grouped(history.cache_calls, "key").items()):
        wrong = cached_values(builds[key], writes[key], calls, Validity(ops[key]), invariants.ttl)
        yield from _violations("cache", key, wrong)


def grouped(records: Iterable[T], field: str) -> defaultdict[str, list[T]]:
    """Return the records by the value of a field, in their order."""
    found: defaultdict[str, list[T]] = defaultdict(list)
    for record in records:
        found[getattr(record, field)].append(record)
    return found


def _violations(check: str, name: str, messages: Iterable[str]) -> Iterator[Violation]:
    return (Violation(check, name, message) for message in messages)


class _Hold(NamedTuple):
    """A time in which a holder could trust its lease in one mode. A downgraded lease has two of them."""

    start: float
    end: float
    shared: bool
    op: Op


def _holds(ops: Iterable[Op]) -> list[_Hold]:
    found = []
    for op in ops:
        start, end = _validity(op)
        if op.downgraded is not None and op.downgraded < end:
            found += [_Hold(start, op.downgraded, op.shared, op), _Hold(op.downgraded, end, True, op)]
        else:
            found.append(_Hold(start, end, op.shared, op))
    return [hold for hold in found if hold.start < hold.end]


def exclusion(grants: Iterable[Op]) -> Iterator[str]:
    """An exclusive holder is alone. A permit has fewer than its own limit of holders beside it that were admitted earlier."""
    holds = _holds(grants)
    edges = [(hold.start, True, index) for index, hold in enumerate(holds)]
    edges += [(hold.end, False, index) for index, hold in enumerate(holds)]
    edges.sort()  # at one moment, ends come before starts
    holders: dict[int, Op] = {}
    exclusive = 0
    for _, starts, index in edges:
        start, _, shared, op = holds[index]
        if not starts:
            del holders[index]
            exclusive -= not shared
            continue
        if exclusive or (holders and not shared) or _is_full(op, holders.values()):
            other = max(holders.values(), key=attrgetter("valid_until"))
            yield f"{_who(op)} holds it from {start:.4f}, {_who(other)} until {other.valid_until:.4f}"
        holders[index] = op
        exclusive += not shared


def _is_full(op: Op, holders: Iterable[Op]) -> bool:
    """Return whether a permit found no room. Tokens are in the order of admission; a later permit may have a higher limit."""
    return op.limit is not None and sum(other.token < op.token for other in holders) >= op.limit  # type: ignore[operator]


def linearizability(grants: Iterable[Op]) -> Iterator[str]:
    """There is an order of the grants, that of their tokens, in which each could have been made during its call.

    Tokens fix the order, so each grant is placed at the first moment that its call and the grants before it allow.
    """
    turn = exclusive_end = any_end = -inf
    permits: list[float] = []
    for op in sorted(grants, key=attrgetter("token")):
        turn = max(turn, op.called, exclusive_end if op.shared else any_end)
        _, end = _validity(op)
        if op.shared and op.limit is not None:
            while len(permits) >= op.limit:
                turn = max(turn, heappop(permits))
            heappush(permits, end)
        if op.returned is not None and turn > op.returned:
            yield f"{_who(op)} was granted by {op.returned:.4f}, but its turn came at {turn:.4f}"
            turn = op.returned
        any_end = max(any_end, end)
        if not op.shared:
            exclusive_end = max(exclusive_end, end if op.downgraded is None else min(op.downgraded, end))


def tokens(grants: Iterable[Op]) -> Iterator[str]:
    """Tokens are unique, and each is above every token that was returned before it was asked for."""
    grants = list(grants)
    seen: dict[int | None, Op] = {}
    for op in grants:
        if op.token in seen:
            yield f"{op.owner} and {seen[op.token].owner} both got token {op.token}"
        seen[op.token] = op
    done = sorted((op for op in grants if op.returned is not None), key=attrgetter("returned"))
    highest: Op | None = None
    at = 0
    for op in sorted(grants, key=attrgetter("called")):
        while at < len(done) and done[at].returned < op.called:  # type: ignore[operator]
            if highest is None or done[at].token > highest.token:  # type: ignore[operator]
                highest = done[at]
            at += 1
        if highest is not None and op.token <= highest.token:  # type: ignore[operator]
            yield f"{_who(op)} asked at {op.called:.4f}, after {_who(highest)} was returned"


def downgrades(ops: Iterable[Op], grants: Iterable[Op]) -> Iterator[str]:
    """A downgrade keeps the token of the lease."""
    granted = {(op.owner, op.token) for op in grants}
    for op in ops:
        if op.kind is Kind.DOWNGRADE and op.token is not None and (op.owner, op.token) not in granted:
            yield f"the engine has token {op.token} after a downgrade by {op.owner}, who never got that token"


def order(grants: Iterable[Op]) -> Iterator[str]:
    """First come, first served: tokens rise with the engine's tickets."""
    last: Op | None = None
    for op in sorted((op for op in grants if op.ticket is not None), key=attrgetter("token")):
        if last is not None and op.ticket <= last.ticket:  # type: ignore[operator]
            yield f"{_who(op)} came with ticket {op.ticket} and was served after {_who(last)} with {last.ticket}"
        last = op


def wake_ups(ops: Iterable[Op], at_most: float) -> Iterator[str]:
    """A name is not free for long while callers wait: it is free if there is room for every one of them."""
    if at_most == inf:
        return
    edges: list[tuple[float, bool, int, float]] = []  # the last: 0 if exclusive, else the limit
    callers = [op for op in ops if op.kind in _ACQUIRES]
    for hold in _holds(op for op in callers if op.outcome is Outcome.OK):
        edges += [(hold.start, True, 1, float(hold.shared)), (hold.end, True, -1, float(hold.shared))]
    for op in callers:
        if op.kind is Kind.ACQUIRE and op.returned is not None:
            room = 0.0 if not op.shared else inf if op.limit is None else op.limit
            edges += [(op.called, False, 1, room), (op.returned, False, -1, room)]
    edges.sort()
    holding, waiting = [0, 0], Counter[float]()
    free_since: float | None = None
    for at, holds, change, room in edges:
        if holds:
            holding[int(room)] += change
        else:
            waiting[room] += change
        least = min((room for room, count in waiting.items() if count), default=None)
        if least is not None and not holding[0] and (not holding[1] or holding[1] < least):
            free_since = at if free_since is None else free_since
        else:
            if free_since is not None and at - free_since > at_most:
                yield f"free from {free_since:.4f} to {at:.4f} while a caller waited; {at_most:g} s are allowed"
            free_since = None


def terms(works: Iterable[Term], ops: Iterable[Op]) -> Iterator[str]:
    """The lock of a term is not released while the work of the term runs."""
    released = {(op.owner, op.token): op.called for op in ops if op.kind is Kind.RELEASE}
    for term in works:
        at = released.get((term.owner, term.token), inf)
        if at < term.end:
            yield f"{term.owner} released term {term.token} at {at:.4f}, while its work was running"


def observations(seen: Iterable[Observation], grants: Iterable[Op]) -> Iterator[str]:
    """An observer never sees an older term after a newer one, and sees the owner and the value of the term."""
    leaders = {op.token: (op.owner, op.value) for op in grants}
    last: dict[str, int] = {}
    for saw in sorted(seen, key=attrgetter("at")):
        if saw.token is None:
            continue
        if saw.token < last.get(saw.observer, 0):
            yield f"{saw.observer} saw term {saw.token} at {saw.at:.4f}, after term {last[saw.observer]}"
        last[saw.observer] = saw.token
        expected = leaders.get(saw.token, (saw.owner, saw.value))
        if (saw.owner, saw.value) != expected:
            yield f"{saw.observer} saw {saw.owner} ({saw.value!r}) lead term {saw.token}, which {expected} got"


def groups(acquired: Iterable[Group], ops: Sequence[Op]) -> Iterator[Violation]:
    """A multi-lock has all leases or none: what a failed one acquired is over when it returns, and all after a release."""
    grants = {(op.name, op.token): op for op in ops if op.kind in _ACQUIRES and op.valid_until is not None}
    for group in acquired:
        if group.returned is None:
            continue  # its process died
        held = group.leases[-len(group.names) :] if group.outcome is Outcome.OK else ()
        missing = set(group.names) - {
            name for name, token in held if _valid_at(grants.get((name, token)), group.returned)
        }
        if group.outcome is Outcome.OK and missing:
            message = f"{group.owner} got the group {group.names} at {group.returned:.4f} without {sorted(missing)}"
            yield Violation("group", min(missing), message)
        for name, token in group.leases:
            op, over = grants.get((name, token)), group.released if (name, token) in held else group.returned
            if op is not None and over is not None and op.valid_until > over + 1e-9:  # type: ignore[operator]
                message = f"{_who(op)} still holds it after {over:.4f}, when its group was over"
                yield Violation("group", name, message)


def _valid_at(op: Op | None, at: float) -> bool:
    return op is not None and op.valid_until is not None and op.valid_until >= at - 1e-9


def resource(writes: Iterable[Write]) -> Iterator[str]:
    """Accepted tokens never fall, and every accepted write saw the accepted write before it: none is lost."""
    last: Write | None = None
    for write in sorted((write for write in writes if write.accepted), key=attrgetter("at")):
        if last is not None and write.token < last.token:
            yield f"{write.owner} wrote with token {write.token} at {write.at:.4f}, after token {last.token}"
        if last is not None and write.saw != last.value:
            yield (
                f"the write of {last.owner} (value {last.value}) is lost: {write.owner} replaced it by {write.value} "
                f"at {write.at:.4f}, having read {write.saw}"
            )
        last = write


def orphans(history: History, invariants: Invariants) -> Iterator[Violation]:
    """One ttl after the end nothing is left; of callers that released or gave up, nothing is left at any time."""
    released = {(op.name, op.token) for op in history.ops if op.kind is Kind.RELEASE and op.outcome is Outcome.OK}
    unsure = {
        (op.name, op.owner)
        for op in history.ops
        if op.kind is not Kind.DOWNGRADE
        and (op.outcome is Outcome.UNKNOWN or (op.token is not None and (op.name, op.token) not in released))
    }
    quiet = inf if history.quiet is None else history.quiet
    for left in history.leftovers:
        who = f"a {left.role} of {left.owner or 'an unknown owner'}"
        if left.at >= quiet + invariants.ttl:
            message = f"{who} is left {left.at - quiet:.4f} s after the end, and after its ttl"
        elif left.role == DEAD:
            message = f"{who} is left {left.at - (left.since or 0.0):.4f} s after the process died"
        elif invariants.clean and left.since is not None:
            message = f"{who} is left {left.at - left.since:.4f} s after it was released"
        elif invariants.clean and left.at >= quiet and left.owner and (left.name, left.owner) not in unsure:
            message = f"{who} is left although all its operations ended"
        else:
            continue
        yield Violation("orphans", left.name, message)


DEAD = "claim of a dead process"
"""The role of a leftover whose process has died, and whose ttl is over."""


def _validity(op: Op) -> tuple[float, float]:
    if op.valid_from is None or op.valid_until is None:
        return inf, -inf
    return op.valid_from, op.valid_until


def _who(op: Op) -> str:
    return f"{op.owner} (token {op.token})"
