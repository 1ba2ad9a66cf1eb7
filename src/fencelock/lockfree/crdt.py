"""Data that merges (CRDTs): replicas change it independently, and agree once they have merged the same changes in any order.

All of them are immutable values: a change or a merge returns a new value, and `a | b` is `a.merge(b)`. A replica needs a
unique name for as long as its data lives. A process that restarts **without** its data needs a new name: under its old
one it would count from the beginning, and a merge would drop the new counts. A lease's `id` is a suitable name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Generic, NamedTuple, Self, TypeVar

from fencelock.errors import InvalidArgument, InvalidType
from fencelock.lockfree.canonical import Json, canonical
from fencelock.lockfree.clock import ClockAhead, HybridClock, Stamp

__all__ = ["ClockAhead", "GCounter", "HybridClock", "LWWRegister", "ORSet", "PNCounter", "Stamp"]

T = TypeVar("T")


class _Value:
    """The common base: immutable, and equal if the content is equal."""

    __slots__ = ()

    def merge(self, other: Self) -> Self:
        """Return the union of both histories. The order and the number of merges make no difference."""
        if type(other) is not type(self):
            raise InvalidType(f"a {type(self).__name__} merges with another one, not with {type(other).__name__}")
        return self._merge(other)

    def _merge(self, other: Self) -> Self:
        raise NotImplementedError

    def to_json(self) -> dict[str, Json]:
        """Return a value for `json`; equal values have equal JSON."""
        raise NotImplementedError

    def __or__(self, other: Self) -> Self:
        return self.merge(other) if type(other) is type(self) else NotImplemented

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and canonical(self.to_json()) == canonical(other.to_json())

    def __hash__(self) -> int:
        return hash(canonical(self.to_json()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}.from_json({canonical(self.to_json())})"


class GCounter(_Value):
    """A counter that only grows: each replica counts its own additions, and the value is the sum.

    >>> here, there = GCounter().add("here", 3), GCounter().add("there", 4)
    >>> (here | there | here).value
    7
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        every = {} if counts is None else {_name(name): _count(count) for name, count in counts.items()}
        self._counts = {name: count for name, count in every.items() if count}

    @property
    def value(self) -> int:
        """The sum over all replicas."""
        return sum(self._counts.values())

    def add(self, replica: str, by: int = 1) -> GCounter:
        """Return the counter after an addition by this replica.

        >>> GCounter().add("here").add("here", 2).value
        3
        """
        return GCounter({**self._counts, _name(replica): self._counts.get(replica, 0) + _count(by)})

    def _merge(self, other: GCounter) -> GCounter:
        return GCounter(_highest(self._counts, other._counts))

    def to_json(self) -> dict[str, Json]:
        return dict(sorted(self._counts.items()))

    @classmethod
    def from_json(cls, form: Mapping[str, Json]) -> GCounter:
        """Return the value that `to_json` wrote.

        >>> GCounter.from_json({"here": 3, "there": 4}).value
        7
        """
        with _reading(cls, form):
            return cls(dict(form.items()))


class PNCounter(_Value):
    """A counter that goes up and down: a pair of counters that only grow.

    >>> here, there = PNCounter().add("here", 10), PNCounter().add("there", -4)
    >>> (here | there).value
    6
    """

    __slots__ = ("_down", "_up")

    def __init__(self, up: GCounter | None = None, down: GCounter | None = None) -> None:
        self._up = up or GCounter()
        self._down = down or GCounter()

    @property
    def value(self) -> int:
        """The sum of all additions and subtractions."""
        return self._up.value - self._down.value

    def add(self, replica: str, by: int = 1) -> PNCounter:
        """Return the counter after an addition by this replica; `by` may be negative.

        >>> PNCounter().add("here", -2).value
        -2
        """
        if by >= 0:
            return PNCounter(self._up.add(replica, by), self._down)
        return PNCounter(self._up, self._down.add(replica, -by))

    def _merge(self, other: PNCounter) -> PNCounter:
        return PNCounter(self._up | other._up, self._down | other._down)

    def to_json(self) -> dict[str, Json]:
        return {"up": self._up.to_json(), "down": self._down.to_json()}

    @classmethod
    def from_json(cls, form: Mapping[str, Json]) -> PNCounter:
        """Return the value that `to_json` wrote.

        >>> PNCounter.from_json({"up": {"here": 10}, "down": {"there": 4}}).value
        6
        """
        with _reading(cls, form):
            return cls(GCounter.from_json(form["up"]), GCounter.from_json(form["down"]))


class _Dot(NamedTuple):
    """The number of an addition at a replica. A removal names the additions that it has seen, and spares all others."""

    replica: str
    number: int


class ORSet(_Value):
    """A set in which an addition wins over a concurrent removal. Elements are values that JSON can represent.

    It keeps no tombstones: it stores how many additions of each replica it has seen, and a seen addition that is missing
    was removed.

    >>> here = ORSet().add("here", "milk")
    >>> there = here.remove("milk")                     # concurrent with the next line
    >>> here = here.add("here", "milk")
    >>> list(here | there), list(there)
    (['milk'], [])
    """

    __slots__ = ("_dots", "_seen")

    def __init__(self) -> None:
        self._dots: dict[str, frozenset[_Dot]] = {}  # by the element's JSON, as 1, 1.0 and True are different elements
        self._seen: dict[str, int] = {}

    def add(self, replica: str, element: Json) -> ORSet:
        """Return the set with the element, added by this replica.

        >>> sorted(ORSet().add("here", "milk").add("here", "bread"))
        ['bread', 'milk']
        """
        dot = _Dot(_name(replica), self._seen.get(replica, 0) + 1)
        return _set({**self._dots, canonical(element): frozenset([dot])}, {**self._seen, replica: dot.number})

    def remove(self, element: Json) -> ORSet:
        """Return the set without the element: removes all additions that are known here.

        >>> "milk" in ORSet().add("here", "milk").remove("milk")
        False
        """
        gone = canonical(element)
        return _set({key: dots for key, dots in self._dots.items() if key != gone}, self._seen)

    def _merge(self, other: ORSet) -> ORSet:
        kept = {}
        for key in chain(self._dots, (key for key in other._dots if key not in self._dots)):
            mine, theirs = self._dots.get(key, frozenset()), other._dots.get(key, frozenset())
            dots = (mine & theirs) | (mine - other._seen_of(mine)) | (theirs - self._seen_of(theirs))
            if dots:
                kept[key] = dots
        return _set(kept, _highest(self._seen, other._seen))

    def _seen_of(self, dots: frozenset[_Dot]) -> frozenset[_Dot]:
        """Return the dots that this replica has seen, present or removed."""
        return frozenset(dot for dot in dots if dot.number <= self._seen.get(dot.replica, 0))

    def __contains__(self, element: Json) -> bool:
        return canonical(element) in self._dots

    def __iter__(self) -> Iterator[Json]:
        import json

        return map(json.loads, sorted(self._dots))

    def __len__(self) -> int:
        return len(self._dots)

    def to_json(self) -> dict[str, Json]:
        import json

        elements = [[json.loads(key), sorted(map(list, dots))] for key, dots in sorted(self._dots.items())]
        return {"elements": elements, "seen": dict(sorted(self._seen.items()))}

    @classmethod
    def from_json(cls, form: Mapping[str, Json]) -> ORSet:
        """Return the value that `to_json` wrote.

        >>> list(ORSet.from_json(ORSet().add("here", "milk").to_json()))
        ['milk']
        """
        with _reading(cls, form):
            seen = {_name(name): _count(number) for name, number in form["seen"].items()}
            dots: dict[str, frozenset[_Dot]] = {}
            for element, them in form["elements"]:
                made = dots[canonical(element)] = frozenset(_Dot(_name(name), _count(number)) for name, number in them)
                if not made or not all(0 < dot.number <= seen.get(dot.replica, 0) for dot in made):
                    raise InvalidArgument(f"{element!r:.40} has no addition, or one above the number that was seen")
            # Of an element that occurs twice, only the last one is left.
            if sum(len(them) for _, them in form["elements"]) != len({dot for made in dots.values() for dot in made}):
                raise InvalidArgument("an addition occurs twice")
            return _set(dots, seen)


class LWWRegister(_Value, Generic[T]):
    """One value; the write with the highest stamp of a `HybridClock` wins.

    For values that a later write may replace, such as a setting; not for a sum. A write by a replica that has seen
    another write always wins over it; of two concurrent writes, the one whose clock is ahead wins.

    A merge accepts every stamp: call `observe` first with stamps of other replicas, to refuse those too far ahead.

    >>> here, there = HybridClock("here"), HybridClock("there")
    >>> title = LWWRegister("draft", here.tick())
    >>> there.observe(title.stamp)                      # another replica receives it
    >>> (title.set("final", there) | title).value
    'final'
    """

    __slots__ = ("stamp", "value")

    def __init__(self, value: T, stamp: Stamp) -> None:
        self.value = value
        self.stamp = stamp

    def set(self, value: T, stamp: Stamp | HybridClock) -> LWWRegister[T]:
        """Return the register with another value and a new stamp of this clock, which is above the present one.

        A stamp of your own must be above it, too, or the value would be lost at once: InvalidArgument. Merge a write that
        may be older than the present one. Raise ClockAhead if the present stamp is too far ahead of the clock.

        >>> LWWRegister("old", Stamp(1, 0, "there")).set("new", HybridClock("here")).value
        'new'
        >>> LWWRegister("new", Stamp(2, 0, "there")).set("old", Stamp(1, 0, "here"))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fencelock.errors.InvalidArgument: 'old' of 'here' would be lost: its stamp is not above ...
        """
        if isinstance(stamp, HybridClock):
            stamp.observe(self.stamp)
            stamp = stamp.tick()
        if stamp <= self.stamp:
            raise InvalidArgument(
                f"{value!r:.40} of {stamp.replica!r} would be lost: its stamp is not above that of {self.stamp.replica!r}. "
                "Give the clock: set(value, clock)"
            )
        return LWWRegister(value, stamp)

    def _merge(self, other: LWWRegister[T]) -> LWWRegister[T]:
        return max(self, other, key=lambda it: (it.stamp, canonical(it.value)))

    def to_json(self) -> dict[str, Json]:
        return {"value": self.value, "stamp": list(self.stamp)}

    @classmethod
    def from_json(cls, form: Mapping[str, Json]) -> LWWRegister[Any]:
        """Return the value that `to_json` wrote.

        >>> LWWRegister.from_json({"value": "final", "stamp": [1700000000000, 0, "here"]}).value
        'final'
        """
        with _reading(cls, form):
            millis, count, replica = form["stamp"]
            return LWWRegister(form["value"], Stamp(_count(millis), _count(count), _name(replica)))


@contextmanager
def _reading(kind: type[_Value], form: object) -> Iterator[None]:
    """Refuse malformed JSON: merging it would break the rules that make replicas agree."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{form!r:.80} is not the JSON of a {kind.__name__}: {error}") from error


def _set(dots: dict[str, frozenset[_Dot]], seen: dict[str, int]) -> ORSet:
    made = ORSet()
    made._dots, made._seen = dots, seen
    return made


def _highest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def _count(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise InvalidArgument(f"a count must be an int of 0 or more, not {number!r:.40}")
    return number


def _name(replica: object) -> str:
    if not isinstance(replica, str) or not replica:
        raise InvalidArgument(f"a replica's name must be a str that is not empty, not {replica!r:.40}")
    return replica
