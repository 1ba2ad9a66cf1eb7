"""Marks of the SQL fence that are collected while holders check."""

from __future__ import annotations

import pytest

from fencelock import StaleToken
from tests.fences.fake_lease import fake_lease
from tests.fences.sql_helpers import FENCE, Connect, InThread, run, stock


@pytest.mark.parametrize("resource", ["stock", "never seen"])
def test_checks_amid_a_collection_wait_for_it(connect: Connect, resource: str) -> None:
    """A check that comes amid a collection is compared with the floor that it puts, and not with the mark that it takes."""
    late, broom = connect(), connect()
    FENCE.check(broom, fake_lease(32), "stock")
    broom.commit()
    assert FENCE.prune(broom, 100) == 1
    check = InThread(lambda: FENCE.check(late, fake_lease(33), resource))
    assert check.waits()
    broom.commit()
    refused = check.result()
    assert isinstance(refused, StaleToken)
    assert refused.seen == 100


def test_a_collection_waits_for_checks(connect: Connect) -> None:
    """A collection waits for the transactions that have checked, and collects what they leave: none gets in behind it."""
    old, new, broom = connect(), connect(), connect()
    FENCE.check(new, fake_lease(34), "stock")
    collected = InThread(lambda: (FENCE.prune(broom, 100), broom.commit())[0])
    assert collected.waits()
    late = InThread(lambda: FENCE.check(old, fake_lease(33), "stock"))
    assert late.waits()
    run(new, "UPDATE stock SET n = 95")
    new.commit()
    assert collected.result() == 1
    assert isinstance(late.result(), StaleToken)
    old.rollback()
    assert stock(old) == 95
