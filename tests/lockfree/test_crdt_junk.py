"""Data that merges refuses malformed JSON when it is read, as merging it would break the laws."""

from __future__ import annotations

from typing import Any

import pytest

from fencelock.lockfree.crdt import GCounter, HybridClock, LWWRegister, ORSet, PNCounter


def elements(*them: Any, **seen: Any) -> Any:
    return {"elements": list(them), "seen": seen}


FORMS: dict[Any, list[Any]] = {
    GCounter: [None, [], 7, "x", {"": 1}, {1: 1}, {"a": None}, {"a": False}, {"a": -1}, {"a": 1.5}],
    PNCounter: [None, {}, {"up": {}}, {"up": None, "down": {}}, {"up": {}, "down": {"a": "1"}}],
    ORSet: [
        *(None, {}, {"elements": []}, {"elements": [1], "seen": {}}, {"elements": {}, "seen": []}),
        elements(["milk", []]),  # would be gone after a merge with itself
        elements(["milk", [["here", 0]]]),  # would be gone after a merge with nothing
        elements(["milk", [["here", 5]]], here=3),  # its replica would give that number to something else, too
        elements(["milk", [["here", 1]]], ["milk", [["here", 2]]], here=2),  # which of the two?
        elements(["milk", [["here", 1]]], ["bread", [["here", 1]]], here=1),
        elements(["milk", [["here"]]], here=1),
    ],
    LWWRegister: [
        *(None, {}, {"value": 1}, {"value": 1, "stamp": None}, {"value": 1, "stamp": [1]}),
        *({"value": 1, "stamp": stamp} for stamp in ([1, 0, ""], [-1, 0, "a"], ["1", 0, "a"], [1.5, 0, "a"])),
    ],
}
JUNK = [(of, form) for of, forms in FORMS.items() for form in forms]


@pytest.mark.parametrize(("of", "form"), JUNK, ids=str)
def test_malformed_json_is_refused(of: Any, form: Any) -> None:
    """Malformed JSON is a ValueError that names the kind."""
    with pytest.raises(ValueError, match=of.__name__):
        of.from_json(form)


def test_different_kinds() -> None:
    """Two kinds do not merge."""
    with pytest.raises(TypeError):
        GCounter() | PNCounter()  # type: ignore[operator]


def test_clock_without_a_name() -> None:
    """A clock without a name is refused."""
    with pytest.raises(ValueError, match="name"):
        HybridClock("")
