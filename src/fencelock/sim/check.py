"""The checker: decides, in O(n log n) per name, whether a history is one that fencelock may leave behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from operator import attrgetter

from fencelock.sim.history import History, Kind, Op, Outcome, Write


@dataclass(frozen=True, slots=True)
class Invariants:
    """What is demanded of a history. An engine that loses its data keeps fewer of them."""

    exclusion: bool = True
    tokens: bool = True
    order: bool = True
    """First come, first served. Only where operations carry the engine's tickets."""
    resource: bool = True
    free_at_most: float = inf
    """Seconds for which a name may be free while somebody waits in line for it."""
    clean: bool = True
    """Who released, gave up or was cancelled has left nothing behind, without waiting for a ttl."""
    ttl: float = inf
    """After this time of quiet the engine holds nothing at all."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One promise that was broken."""

    check: str
    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.check} of {self.name!r}: {self.message}"


def check(history: History, invariants: Invariants | None = None) -> list[Violation]:
    """Return every promise that the history breaks; none, if all is well.

    >>> from fencelock.sim.history import Op
    >>> def held(owner: str, token: int, start: float, end: float) -> Op:
    ...     return Op("x", Kind.ACQUIRE, owner, start, start, Outcome.OK, token, None, start, end)
    >>> print(*check(History([held("a", 1, 0.0, 2.0), held("b", 2, 1.5, 3.0)])), sep="\\n")
    exclusion of 'x': b (token 2) holds it from 1.5000, a (token 1) until 2.0000
    linearizability of 'x': b (token 2) was granted by 1.5000, but its turn came at 2.0000
    """
    invariants = invariants or Invariants()
    by_name: defaultdict[str, list[Op]] = defaultdict(list)
    for op in history.ops:
        by_name[op.name].append(op)
    found: list[Violation] = []
    for name, ops in by_name.items():
        grants = [op for op in ops if op.token is not None and op.outcome is Outcome.OK and op.kind in _TAKES]
        found += _say("exclusion", name, exclusion(grants)) if invariants.exclusion else ()
        found += _say("linearizability", name, linearizability(grants)) if invariants.exclusion else ()
        found += _say("tokens", name, tokens(grants)) if invariants.tokens else ()
        found += _say("order", name, order(grants)) if invariants.order else ()
        found += _say("wake-ups", name, wake_ups(ops, invariants.free_at_most))
    if invariants.resource:
        by_resource: defaultdict[str, list[Write]] = defaultdict(list)
        for write in history.writes:
            by_resource[write.resource].append(write)
        for name, writes in by_resource.items():
            found += _say("resource", name, resource(writes))
    found += orphans(history, invariants)
    return found


_TAKES = (Kind.ACQUIRE, Kind.TRY)


def _say(check: str, name: str, messages: Iterable[str]) -> Iterator[Violation]:
    return (Violation(check, name, message) for message in messages)


def exclusion(grants: Iterable[Op]) -> Iterator[str]:
    """No two holders at a time that believe to hold it; readers share, permits are counted."""
    edges: list[tuple[float, bool, int]] = []
    ops = list(grants)
    for index, op in enumerate(ops):
        start, end = _validity(op)
        if start < end:
            edges.append((start, True, index))
            edges.append((end, False, index))
    edges.sort()  # who ends at a moment makes room for who begins then
    holders: dict[int, Op] = {}
    exclusive = 0
    for _, begins, index in edges:
        op = ops[index]
        if not begins:
            del holders[index]
            exclusive -= not op.shared
            continue
        full = op.shared and op.limit is not None and len(holders) >= op.limit
        if exclusive or full or (holders and not op.shared):
            other = max(holders.values(), key=attrgetter("valid_until"))
            yield f"{_who(op)} holds it from {op.valid_from:.4f}, {_who(other)} until {other.valid_until:.4f}"
        holders[index] = op
        exclusive += not op.shared


def linearizability(grants: Iterable[Op]) -> Iterator[str]:
    """There is an order of the grants, that of their tokens, in which each could have been made during its call.

    Tokens fix the order, so each grant is put at the first moment that its call and those before it allow.
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
            exclusive_end = max(exclusive_end, end)


def tokens(grants: Iterable[Op]) -> Iterator[str]:
    """Tokens are unique, and each is above every one that was returned before it was asked for."""
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


def order(grants: Iterable[Op]) -> Iterator[str]:
    """First come, first served: tokens rise with the engine's tickets."""
    last: Op | None = None
    for op in sorted((op for op in grants if op.ticket is not None), key=attrgetter("token")):
        if last is not None and op.ticket <= last.ticket:  # type: ignore[operator]
            yield f"{_who(op)} came with ticket {op.ticket} and was served after {_who(last)} with {last.ticket}"
        last = op


def wake_ups(ops: Iterable[Op], at_most: float) -> Iterator[str]:
    """A name is not free for long while somebody waits in line for it."""
    if at_most == inf:
        return
    edges: list[tuple[float, bool, int, bool, int]] = []
    for op in ops:
        if op.kind not in _TAKES:
            continue
        limit = op.limit or 0
        start, end = _validity(op)
        if op.outcome is Outcome.OK and start < end:
            edges.append((start, True, 1, op.shared, limit))
            edges.append((end, True, -1, op.shared, limit))
        if op.kind is Kind.ACQUIRE and op.returned is not None:
            edges.append((op.called, False, 1, op.shared, limit))
            edges.append((op.returned, False, -1, op.shared, limit))
    edges.sort()
    holding, waiting = [0, 0], [0, 0]
    free_since: float | None = None
    for at, holds, change, shared, limit in edges:
        (holding if holds else waiting)[shared] += change
        room = not holding[1] or (not waiting[0] and holding[1] < limit)
        if (waiting[0] or waiting[1]) and not holding[0] and room:
            free_since = at if free_since is None else free_since
        else:
            if free_since is not None and at - free_since > at_most:
                yield f"free from {free_since:.4f} to {at:.4f} while somebody waited; {at_most:g} s are allowed"
            free_since = None


def resource(writes: Iterable[Write]) -> Iterator[str]:
    """Accepted tokens never fall, and every accepted write saw the accepted one before it: none is lost."""
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
    """After quiet and one ttl nothing is left; of those who ended in order, nothing at once."""
    given_back = {(op.name, op.token) for op in history.ops if op.kind is Kind.RELEASE and op.outcome is Outcome.OK}
    unsure = {
        (op.name, op.owner)
        for op in history.ops
        if op.outcome is Outcome.UNKNOWN or (op.token is not None and (op.name, op.token) not in given_back)
    }
    quiet = inf if history.quiet is None else history.quiet
    for left in history.leftovers:
        who = f"a {left.role} of {left.owner or 'somebody'}"
        if left.at >= quiet + invariants.ttl:
            yield Violation(
                "orphans", left.name, f"{who} is left {left.at - quiet:.4f} s after the end, and after its ttl"
            )
        elif invariants.clean and left.since is not None:
            yield Violation("orphans", left.name, f"{who} is left {left.at - left.since:.4f} s after it was given back")
        elif invariants.clean and left.at >= quiet and left.owner and (left.name, left.owner) not in unsure:
            yield Violation("orphans", left.name, f"{who} is left although everything of theirs ended in order")


def _validity(op: Op) -> tuple[float, float]:
    if op.valid_from is None or op.valid_until is None:
        return inf, -inf
    return op.valid_from, op.valid_until


def _who(op: Op) -> str:
    return f"{op.owner} (token {op.token})"
