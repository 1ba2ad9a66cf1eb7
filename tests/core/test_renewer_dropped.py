"""A lease that becomes garbage while it is held, at the moment in which the renewer checks it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

import fencelock
from fencelock.core.lease import BaseLease
from fencelock.core.renewer import LeaseRef, LeaseRenewer


@pytest.mark.parametrize("faster", [False, True])
def test_lease_dropped_while_the_renewer_checks_it(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    """A lease that is dropped while the renewer checks it is reported once, and close() releases the lock."""
    original = LeaseRenewer._on_garbage

    def dropped(renewer: LeaseRenewer, kept: weakref.ref[BaseLease]) -> None:
        if faster:
            assert renewer._look() == ([], [], [])
        original(renewer, kept)
        assert renewer._look() == ([], [], [])

    monkeypatch.setattr(LeaseRenewer, "_on_garbage", dropped)
    with fencelock.connect("memory://dropped") as others:
        with fencelock.connect("memory://dropped") as locks:
            lease = locks.lock("x").acquire()
            with pytest.warns(ResourceWarning, match="dropped without release") as warned:
                del lease
            assert len(warned) == 1
            assert list(others.names()) == ["x"]
        assert not list(others.names())


class Overtaken(dict[str, LeaseRef]):
    """The leases that a renewer iterates over; they change as soon as it has begun."""

    def items(self) -> Any:
        """Return a copy, and call `meanwhile` before the renewer iterates over it."""
        copy = list(super().items())
        self.meanwhile()
        return copy

    meanwhile: Callable[[], object]


def test_lease_released_while_the_renewer_checks_it() -> None:
    """A released lease that is garbage before the renewer checks it is not reported as dropped."""
    with fencelock.connect("memory://released") as locks:
        renewer, leases = locks._client.renewer, [locks.lock("x").acquire()]
        held = renewer._leases = Overtaken(renewer._leases)
        held.meanwhile = lambda: leases.pop().release() if leases else None
        assert renewer._look() == ([], [], [])
        assert not leases
        assert not renewer.leftovers.claims()
