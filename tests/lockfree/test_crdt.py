"""Data that merges: the laws of a merge, and replicas that agree after messages in any order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fencelock.lockfree.crdt import ClockAhead, GCounter, HybridClock, LWWRegister, ORSet, PNCounter, Stamp

REPLICAS = ("a", "b", "c")
ELEMENTS: list[Any] = ["milk", 1, True, 1.0, None, ["x"]]
EXAMPLES = settings(  # a machine that is busy with other tests is no fault of the examples
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)

Script = list[tuple[Any, ...]]

changes = st.one_of(
    st.tuples(st.just("change"), st.sampled_from(REPLICAS), st.integers(-3, 3), st.sampled_from(ELEMENTS)),
    st.tuples(st.just("send"), st.sampled_from(REPLICAS), st.sampled_from(REPLICAS), st.integers(0, 3)),
)
scripts = st.lists(changes, max_size=25)


class Fleet:
    """Replicas of one kind of data; they send each other states that may be old, late or repeated."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.clocks = {name: HybridClock(name, now=lambda: 1.0) for name in REPLICAS}
        self.history: dict[str, list[Any]] = {name: [self.start()] for name in REPLICAS}

    def start(self) -> Any:
        blank = {"g": GCounter(), "pn": PNCounter(), "set": ORSet(), "lww": LWWRegister(None, Stamp(0, 0, "-"))}
        return blank[self.kind]

    def change(self, name: str, by: int, element: Any) -> None:
        now = self.history[name][-1]
        if self.kind == "g":
            now = now.add(name, abs(by))
        elif self.kind == "pn":
            now = now.add(name, by)
        elif self.kind == "set":
            now = now.add(name, element) if by > 0 else now.remove(element)
        else:
            now = now.set(element, self.clocks[name])
        self.history[name].append(now)

    def send(self, sender: str, receiver: str, age: int) -> None:
        sent = self.history[sender][max(0, len(self.history[sender]) - 1 - age)]
        if self.kind == "lww":
            self.clocks[receiver].observe(sent.stamp)
        self.history[receiver].append(self.history[receiver][-1] | sent)

    def play(self, script: Script) -> list[Any]:
        for what, *words in script:
            getattr(self, what)(*words)
        return [self.history[name][-1] for name in REPLICAS]


KINDS = ("g", "pn", "set", "lww")


@pytest.mark.parametrize("kind", KINDS)
def test_laws_of_merge(kind: str) -> None:
    """A merge is commutative, associative and idempotent, and the JSON form is complete."""

    @EXAMPLES
    @given(scripts)
    def check(script: Script) -> None:
        x, y, z = Fleet(kind).play(script)
        assert x | y == y | x
        assert (x | y) | z == x | (y | z)
        assert x | x == x
        assert (x | y) | y == x | y
        assert type(x).from_json(json.loads(json.dumps(x.to_json()))) == x
        assert hash(x | y) == hash(y | x)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_agree(kind: str) -> None:
    """Replicas that have merged the last state of every replica agree, after any other merges in any order."""

    @EXAMPLES
    @given(scripts, st.permutations(REPLICAS), st.permutations(REPLICAS))
    def check(script: Script, one: list[str], other: list[str]) -> None:
        fleet = Fleet(kind)
        fleet.play(script)
        ends = []
        for order in (one, other):
            end = fleet.start()
            for name in order:
                for state in fleet.history[name][::-1]:  # the old ones last
                    end = end | state
            ends.append(end)
        assert ends[0] == ends[1]

    check()


@EXAMPLES
@given(scripts)
def test_counters_count_everything(script: Script) -> None:
    """The merged counter is the sum of the additions of all replicas."""
    added = [(name, by) for what, name, by, *_ in script if what == "change"]
    x, y, z = Fleet("pn").play(script)
    assert (x | y | z).value == sum(by for _, by in added)
    x, y, z = Fleet("g").play(script)
    assert (x | y | z).value == sum(abs(by) for _, by in added)


@EXAMPLES
@given(scripts)
def test_set_without_tombstones_is_the_set_with_them(script: Script) -> None:
    """The set agrees with the plain definition: every addition has a tag, and a removal names the tags that it has seen."""
    added: dict[str, list[set[tuple[str, int]]]] = {name: [set()] for name in REPLICAS}
    removed: dict[str, list[set[tuple[str, int]]]] = {name: [set()] for name in REPLICAS}
    for number, (what, *words) in enumerate(script):
        if what == "change":
            name, by, element = words
            key, more, less = json.dumps(element), set(added[name][-1]), set(removed[name][-1])
            if by > 0:
                more.add((key, number))
            else:
                less |= {tag for tag in more if tag[0] == key}
        else:
            sender, name, age = words
            at = max(0, len(added[sender]) - 1 - age)
            more, less = added[name][-1] | added[sender][at], removed[name][-1] | removed[sender][at]
        added[name].append(more)
        removed[name].append(less)
    for name, state in zip(REPLICAS, Fleet("set").play(script), strict=True):
        expected = {key for key, _ in added[name][-1] - removed[name][-1]}
        assert {json.dumps(element) for element in state} == expected
        assert len(state) == len(expected)


def test_elements_are_compared_as_json() -> None:
    """1, 1.0 and True are three elements; values that JSON cannot represent are refused."""
    found = ORSet().add("a", 1).add("a", 1.0).add("a", True)
    assert len(found) == 3
    assert 1 in found.remove(True)
    assert LWWRegister(1, Stamp(1, 0, "a")) != LWWRegister(True, Stamp(1, 0, "a"))
    with pytest.raises(TypeError, match="JSON"):
        found.add("a", object())
    with pytest.raises(TypeError, match="JSON"):
        found.add("a", float("nan"))


def test_clock_follows_cause_and_effect() -> None:
    """A write that has seen another is above it, even if its wall clock is behind or goes back."""
    times = [100.0]
    behind, ahead = HybridClock("behind", now=lambda: times[0]), HybridClock("ahead", now=lambda: 130.0)
    seen = ahead.tick()
    behind.observe(seen)
    mine = behind.tick()
    assert mine > seen
    times[0] = 10.0
    assert behind.tick() > mine
    times[0] = 200.0
    assert behind.tick() == Stamp(200_000, 0, "behind")


def test_stamps_far_ahead_are_refused() -> None:
    """A stamp that is far ahead is refused, and does not change the clock."""
    clock = HybridClock("a", now=lambda: 100.0)
    with pytest.raises(ClockAhead, match="'b' is 900 s ahead"):
        clock.observe(Stamp(1_000_000, 0, "b"))
    assert clock.tick() == Stamp(100_000, 0, "a")


def test_own_write_is_not_lost_to_a_clock_that_is_ahead() -> None:
    """A write after a merge with a clock that is ahead wins; a stamp that would lose, or is far ahead, is refused."""
    clock = HybridClock("mine", now=lambda: 100.0)
    seen = LWWRegister("draft", clock.tick()) | LWWRegister("theirs", Stamp(105_000, 0, "their"))
    with pytest.raises(ValueError, match=r"'mine' would be lost.* 'their'. Give the clock"):
        seen.set("mine", clock.tick())
    mine = seen.set("mine", clock)
    assert (mine.value, mine.stamp) == ("mine", Stamp(105_000, 1, "mine"))
    assert (seen | mine).value == "mine"
    with pytest.raises(ValueError, match="would be lost"):
        mine.set("another at the same stamp", mine.stamp)
    absurd = seen | LWWRegister("theirs", Stamp(3_700_000, 0, "their"))
    with pytest.raises(ClockAhead, match="'their' is 3600 s ahead"):
        absurd.set("mine", clock)


def test_merge_with_another_kind() -> None:
    """Values of different kinds do not merge, and the error names both."""
    with pytest.raises(TypeError, match="'GCounter' and 'PNCounter'"):
        GCounter() | PNCounter()  # type: ignore[operator]
    with pytest.raises(TypeError, match="ORSet merges with another one, not with GCounter"):
        ORSet().merge(GCounter())  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, 1.5, "1", True])
def test_invalid_counts_are_refused(wrong: Any) -> None:
    """A counter that only grows refuses negative numbers and anything but an int."""
    with pytest.raises(ValueError, match="count"):
        GCounter().add("a", wrong)
    with pytest.raises(ValueError, match="count"):
        GCounter.from_json({"a": wrong})
    with pytest.raises(ValueError, match="replica"):
        GCounter().add("")
