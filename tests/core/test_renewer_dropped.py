"""A lease that becomes garbage while it is held, in the very moment in which the keeper looks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

import fencelock
from fencelock.core.lease import BaseLease
from fencelock.core.renewer import LeaseRef, LeaseRenewer


@pytest.mark.parametrize("faster", [False, True])
def test_dropped_as_the_keeper_looks(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    """Whoever is the first to see it, the user is told once, and close() releases it."""
    told = LeaseRenewer._dropped

    def dropped(renewer: LeaseRenewer, kept: weakref.ref[BaseLease]) -> None:
        if faster:
            assert renewer._look() == ([], [], [])
        told(renewer, kept)
        assert renewer._look() == ([], [], [])

    monkeypatch.setattr(LeaseRenewer, "_dropped", dropped)
    with fencelock.connect("memory://dropped") as others:
        with fencelock.connect("memory://dropped") as locks:
            lease = locks.lock("x").acquire()
            with pytest.warns(ResourceWarning, match="dropped without release") as warned:
                del lease
            assert len(warned) == 1
            assert list(others.names()) == ["x"]
        assert not list(others.names())


class Overtaken(dict[str, LeaseRef]):
    """What a keeper looks through, and somebody changes as soon as it has begun."""

    def items(self) -> Any:
        """Copy, and have somebody release what is there."""
        copy = list(super().items())
        self.meanwhile()
        return copy

    meanwhile: Callable[[], object]


def test_released_as_the_keeper_looks() -> None:
    """A lease that was released, and is garbage before the keeper comes to it, was not dropped."""
    with fencelock.connect("memory://released") as locks:
        renewer, leases = locks._client.renewer, [locks.lock("x").acquire()]
        held = renewer._leases = Overtaken(renewer._leases)
        held.meanwhile = lambda: leases.pop().release() if leases else None
        assert renewer._look() == ([], [], [])
        assert not leases
        assert not renewer.leftovers.claims()
