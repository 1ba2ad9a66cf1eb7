"""The SQL fence on every kind of connection that callers may have."""

from __future__ import annotations

import itertools

import pytest

from fencelock import FencelockError, StaleToken
from fencelock.fences.sql import SqlFence
from fencelock.sqlio import link
from tests.fences.bearers import bearer
from tests.fences.callers import RECIPES, Where, caller

_numbers = itertools.count()


@pytest.fixture
def resource() -> str:
    """A resource that no other test has."""
    return f"order:{next(_numbers)} ö % :x"


@pytest.fixture(params=sorted(RECIPES))
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of connection."""
    return str(request.param)


def test_only_the_newest_passes(kind: str, where: Where, resource: str) -> None:
    """Newer tokens pass, the same bearer passes again, older ones and equal ones of others are refused with both numbers."""
    fence = SqlFence()
    with caller(kind, where) as one:
        one.do(fence.create(one.handed))
        one.commit()
        assert one.do(fence.token(one.handed, resource)) is None
        for token, id in [(33, "a"), (34, "b"), (34, "b")]:
            one.do(fence.check(one.handed, bearer(token, id), resource))
            one.commit()
        for token, id in [(33, "a"), (34, "c")]:
            with pytest.raises(StaleToken, match=f"refused token {token}: .*token 34") as caught:
                one.do(fence.check(one.handed, bearer(token, id), resource))
            assert (caught.value.name, caught.value.token, caught.value.seen) == (resource, token, 34)
            one.rollback()
        one.do(fence.check(one.handed, bearer(35, "a"), resource))
        one.rollback()
        assert one.do(fence.token(one.handed, resource)) == 34
        one.commit()
        one.do(fence.rebase(one.handed, resource, 5, reason="another engine"))
        one.do(fence.check(one.handed, bearer(5, "d"), resource))
        one.do(fence.restore(one.handed))
        one.commit()


def test_autocommit_is_refused(kind: str, where: Where, resource: str) -> None:
    """A connection that commits each statement by itself is refused, and nothing is written."""
    fence = SqlFence()
    with caller(kind, where) as one:
        one.do(fence.create(one.handed))
        one.commit()
    with caller(kind, where, autocommit=True) as one:
        with pytest.raises(FencelockError, match=r"needs a transaction.*commits each statement by itself: \w+"):
            one.do(fence.check(one.handed, bearer(1, "a"), resource))
        assert one.do(fence.token(one.handed, resource)) is None
        with pytest.raises(FencelockError, match="needs a transaction"):
            one.do(fence.collect(one.handed, 1))


ADVICE = {"django": r"transaction\.atomic\(\)", "alchemy": r"engine\.begin\(\)", "sqlite": "BEGIN IMMEDIATE"}


def test_autocommit_is_refused_with_a_way_out(kind: str, where: Where, resource: str) -> None:
    """The refusal names how those who have such a connection begin a transaction."""
    advice = [words for name, words in ADVICE.items() if name in kind] or ["turn autocommit off"]
    with caller(kind, where, autocommit=True) as one, pytest.raises(FencelockError, match=advice[0]):
        one.do(SqlFence().check(one.handed, bearer(34, "a"), resource))


def test_only_what_is_awaited_can_refuse(kind: str, where: Where) -> None:
    """A check that blocks cannot be forgotten, so only a connection of asyncio's has a way to take no more statements."""
    with caller(kind, where) as one:
        to = link(one.handed)
        assert to.awaited == ("async" in kind or "aio" in kind)
        assert hasattr(to, "refuse") == to.awaited


def test_all_of_djangos_connections_are_not_one() -> None:
    """`connections` in place of one of them is refused with a word on which to take."""
    from django.db import connections

    with pytest.raises(TypeError, match=r"connections\['default'\]"):
        SqlFence().check(connections, bearer(34, "a"), "x")
