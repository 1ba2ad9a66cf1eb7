"""The SQL fence on every kind of connection that callers may have."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fencelock import FencelockError, InvalidType, StaleToken
from fencelock.aio.fences import sql as aio_sql
from fencelock.fences import sql
from tests.fences.connection_kinds import CONNECTION_KINDS, Databases, open_connection
from tests.fences.fake_lease import fake_lease

_numbers = itertools.count()


@pytest.fixture
def resource() -> str:
    """A resource that no other test has."""
    return f"order:{next(_numbers)} ö % :x"


@pytest.fixture(params=sorted(CONNECTION_KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of connection."""
    return str(request.param)


def test_only_the_newest_token_is_accepted(kind: str, where: Databases, resource: str) -> None:
    """The fence accepts newer tokens and the same claim again, and refuses older tokens and equal ones of other claims."""
    with open_connection(kind, where) as one:
        fence = one.fence
        one.do(fence.create(one.connection))
        one.commit()
        assert one.do(fence.token(one.connection, resource)) is None
        for token, id in [(33, "a"), (34, "b"), (34, "b")]:
            one.do(fence.check(one.connection, fake_lease(token, id), resource))
            one.commit()
        for token, id in [(33, "a"), (34, "c")]:
            with pytest.raises(StaleToken, match=f"refused token {token}: .*token 34") as caught:
                one.do(fence.check(one.connection, fake_lease(token, id), resource))
            assert (caught.value.name, caught.value.token, caught.value.seen) == (resource, token, 34)
            one.rollback()
        one.do(fence.check(one.connection, fake_lease(35, "a"), resource))
        one.rollback()
        assert one.do(fence.token(one.connection, resource)) == 34
        one.commit()
        one.do(fence.rebase(one.connection, resource, 5, reason="another engine"))
        one.do(fence.check(one.connection, fake_lease(5, "d"), resource))
        one.do(fence.restore(one.connection))
        one.commit()


def test_autocommit_is_refused(kind: str, where: Databases, resource: str) -> None:
    """A connection that commits each statement by itself is refused, and nothing is written."""
    with open_connection(kind, where) as one:
        fence = one.fence
        one.do(fence.create(one.connection))
        one.commit()
    with open_connection(kind, where, autocommit=True) as one:
        fence = one.fence
        with pytest.raises(FencelockError, match=r"needs a transaction.*commits each statement by itself: \w+"):
            one.do(fence.check(one.connection, fake_lease(1, "a"), resource))
        assert one.do(fence.token(one.connection, resource)) is None
        with pytest.raises(FencelockError, match="needs a transaction"):
            one.do(fence.prune(one.connection, 1))


ADVICE = {
    "asyncpg_": r"connection\.transaction\(\)",
    "django": r"transaction\.atomic\(\)",
    "alchemy": r"engine\.begin\(\)",
    "sqlite": "BEGIN IMMEDIATE",
}


def test_autocommit_error_says_how_to_begin(kind: str, where: Databases, resource: str) -> None:
    """The error says how to begin a transaction on such a connection."""
    advice = [words for name, words in ADVICE.items() if name in kind] or ["turn autocommit off"]
    with open_connection(kind, where, autocommit=True) as one, pytest.raises(FencelockError, match=advice[0]):
        one.do(one.fence.check(one.connection, fake_lease(34, "a"), resource))


def test_the_other_half_refuses_the_connection(kind: str, where: Databases) -> None:
    """A connection of asyncio in the blocking API, and the reverse, is an error that names the other module."""
    with open_connection(kind, where) as one:
        assert one.awaited == ("async" in kind or "aio" in kind)
        other: Any = (sql if one.awaited else aio_sql).SqlFence()
        named = r"use fencelock\.aio\.fences" if one.awaited else r"use fencelock\.fences"
        with pytest.raises(InvalidType, match=named):
            one.do(other.check(one.connection, fake_lease(34), "x"))
        with pytest.raises(InvalidType, match=named):
            one.do(other.token(one.connection, "x"))


def test_djangos_connection_handler_is_refused() -> None:
    """Django's `connections` in place of a connection is refused with advice."""
    from django.db import connections

    with pytest.raises(TypeError, match=r"connections\['default'\]"):
        sql.SqlFence().check(connections, fake_lease(34, "a"), "x")
