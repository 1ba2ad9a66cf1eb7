"""The bound on idle transactions: how long it is, how its error looks, and on whose connections it stays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pymysql
import pytest

from fencelock import StaleToken
from fencelock.fences.sql import SqlFence
from fencelock.fences.sql.door import SqlDoor
from tests.fences.bearers import bearer
from tests.fences.callers import Where, caller, mysql_options, postgres_url
from tests.fences.servers import FENCE, Connect, run


def idle_bound(connection: Any) -> int:
    return int(connection.exec_driver_sql("SELECT @@idle_transaction_timeout").scalar())


@pytest.mark.engine("mariadb")
@pytest.mark.parametrize("server", ["mariadb"])
def test_a_door_leaves_nothing_on_connections_of_a_pool(connect: Connect, where: Where) -> None:
    """A door's connection goes back to its pool as it came, also after a refusal: the next user is not ended."""
    import sqlalchemy

    assert where.mariadb is not None
    engine = sqlalchemy.create_engine(where.mariadb.url.replace("mysql://", "mysql+pymysql://"), pool_size=1)
    door = SqlDoor(engine.connect)
    with engine.connect() as connection:
        before = idle_bound(connection)
    door.enter(bearer(34), "printer")
    with engine.connect() as connection:
        assert idle_bound(connection) == before
    with pytest.raises(StaleToken):
        door.enter(bearer(33), "printer")
    with engine.connect() as connection:
        assert idle_bound(connection) == before
    engine.dispose()


@pytest.mark.parametrize("ttl", [float("inf"), 1e12, -5.0, 0, None, max, "30", float("nan"), True], ids=str)
def test_what_another_service_calls_ttl(connect: Connect, ttl: Any) -> None:
    """A lease of another service may have anything under that name: what is no time is 30 s, and a long one is cut."""
    connection = connect()
    FENCE.check(connection, SimpleNamespace(token=34, id="a", ttl=ttl), "stock")
    run(connection, "UPDATE stock SET n = 95")
    connection.commit()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("psycopg", "psycopg.errors.IdleInTransactionSessionTimeout"),
        ("psycopg2", "psycopg2.OperationalError"),
        ("pymysql", "pymysql.err.OperationalError"),
        ("alchemy_postgres", "sqlalchemy.exc.InternalError"),
        ("alchemy_asyncpg", "sqlalchemy.exc.DBAPIError"),
        ("django_postgres", "django.db.utils.InternalError"),
    ],
)
def test_how_the_end_of_an_idle_transaction_looks(where: Where, kind: str, error: str) -> None:
    """The next statement raises the driver's own error, which the page of the SQL fence names."""
    assert f"`{error}`" in (Path(__file__).parents[2] / "docs" / "fences" / "sql.md").read_text("utf-8")
    newer: Any = pymysql.connect(**mysql_options(where)) if kind == "pymysql" else psycopg.connect(postgres_url(where))
    try:
        FENCE.create(newer)
        newer.commit()
        with caller(kind, where) as older:
            older.do(SqlFence(bound_idle=1).check(older.handed, bearer(33), f"bound {kind}"))
            FENCE.check(newer, bearer(34), f"bound {kind}")  # waits until the server has ended the other
            newer.commit()
            with pytest.raises(Exception, match=r"idle-in-transaction|closed|gone away|Lost connection") as caught:
                older.do(FENCE.token(older.handed, "x"))
            assert f"{type(caught.value).__module__}.{type(caught.value).__qualname__}" == error
    finally:
        newer.close()
