"""Marks of the SQL fence that are pruned while holders check."""

from __future__ import annotations

import pytest

from fencelock import StaleToken
from tests.fences.fake_lease import fake_lease
from tests.fences.sql_helpers import FENCE, Connect, InThread, run, stock


@pytest.mark.parametrize("resource", ["stock", "never seen"])
def test_checks_wait_for_prune(connect: Connect, resource: str) -> None:
    """A check during prune is compared with the new min_token, and not with the mark that is removed."""
    late, pruner = connect(), connect()
    FENCE.check(pruner, fake_lease(32), "stock")
    pruner.commit()
    assert FENCE.prune(pruner, 100) == 1
    check = InThread(lambda: FENCE.check(late, fake_lease(33), resource))
    assert check.waits()
    pruner.commit()
    refused = check.result()
    assert isinstance(refused, StaleToken)
    assert refused.seen == 100


def test_prune_waits_for_checks(connect: Connect) -> None:
    """Prune waits for the transactions that have checked, and removes their marks, too."""
    old, new, pruner = connect(), connect(), connect()
    FENCE.check(new, fake_lease(34), "stock")
    pruned = InThread(lambda: (FENCE.prune(pruner, 100), pruner.commit())[0])
    assert pruned.waits()
    late = InThread(lambda: FENCE.check(old, fake_lease(33), "stock"))
    assert late.waits()
    run(new, "UPDATE stock SET n = 95")
    new.commit()
    assert pruned.result() == 1
    assert isinstance(late.result(), StaleToken)
    old.rollback()
    assert stock(old) == 95
