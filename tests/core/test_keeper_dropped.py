"""A lease that becomes garbage while it is held, in the very moment in which the keeper looks."""

from __future__ import annotations

import weakref

import pytest

import fencelock
from fencelock.core.keeper import Keeper
from fencelock.core.lease import LeaseCore


@pytest.mark.parametrize("faster", [False, True])
def test_dropped_as_the_keeper_looks(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    """Whoever is the first to see it, the user is told once, and close() releases it."""
    told = Keeper._dropped

    def dropped(keeper: Keeper, kept: weakref.ref[LeaseCore]) -> None:
        if faster:
            assert keeper._look() == ([], [], [])
        told(keeper, kept)
        assert keeper._look() == ([], [], [])

    monkeypatch.setattr(Keeper, "_dropped", dropped)
    with fencelock.connect("memory://dropped") as others:
        with fencelock.connect("memory://dropped") as locks:
            lease = locks.lock("x").acquire()
            with pytest.warns(ResourceWarning, match="dropped without release") as warned:
                del lease
            assert len(warned) == 1
            assert list(others.names()) == ["x"]
        assert not list(others.names())
