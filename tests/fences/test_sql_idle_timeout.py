"""The limit on idle transactions: its length, its error, and the connections on which it stays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pymysql
import pytest

from fencelock import StaleToken
from fencelock.fences.sql import StandaloneSqlFence
from tests.fences.connection_kinds import Databases, mysql_options, open_connection, postgres_url
from tests.fences.fake_lease import fake_lease
from tests.fences.sql_helpers import FENCE, Connect, run


def idle_timeout(connection: Any) -> int:
    return int(connection.exec_driver_sql("SELECT @@idle_transaction_timeout").scalar())


@pytest.mark.engine("mariadb")
@pytest.mark.parametrize("server", ["mariadb"])
def test_standalone_fence_resets_the_limit_for_a_pool(connect: Connect, where: Databases) -> None:
    """A connection goes back to its pool with its own idle timeout, also after a refusal."""
    import sqlalchemy

    assert where.mariadb is not None
    engine = sqlalchemy.create_engine(where.mariadb.url.replace("mysql://", "mysql+pymysql://"), pool_size=1)
    fence = StandaloneSqlFence(engine.connect)
    with engine.connect() as connection:
        before = idle_timeout(connection)
    fence.enter(fake_lease(34), "printer")
    with engine.connect() as connection:
        assert idle_timeout(connection) == before
    with pytest.raises(StaleToken):
        fence.enter(fake_lease(33), "printer")
    with engine.connect() as connection:
        assert idle_timeout(connection) == before
    engine.dispose()


@pytest.mark.parametrize("ttl", [float("inf"), 1e12, -5.0, 0, None, max, "30", float("nan"), True], ids=str)
def test_ttl_of_another_service(connect: Connect, ttl: Any) -> None:
    """For a ttl of another service that is no number the fence uses 30 s, and it limits a very long one."""
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
        ("asyncpg_async", "asyncpg.exceptions.ConnectionDoesNotExistError"),
        ("alchemy_postgres", "sqlalchemy.exc.InternalError"),
        ("alchemy_asyncpg", "sqlalchemy.exc.DBAPIError"),
        ("django_postgres", "django.db.utils.InternalError"),
    ],
)
def test_error_after_an_idle_transaction_was_ended(where: Databases, kind: str, error: str) -> None:
    """The next statement raises the driver's own error, which the page of the SQL fence names."""
    assert f"`{error}`" in (Path(__file__).parents[2] / "docs" / "fences" / "sql.md").read_text("utf-8")
    newer: Any = pymysql.connect(**mysql_options(where)) if kind == "pymysql" else psycopg.connect(postgres_url(where))
    try:
        FENCE.create(newer)
        newer.commit()
        with open_connection(kind, where) as older:
            older.do(type(older.fence)(idle_timeout=1).check(older.connection, fake_lease(33), f"idle {kind}"))
            FENCE.check(newer, fake_lease(34), f"idle {kind}")  # waits until the server has ended the other
            newer.commit()
            with pytest.raises(Exception, match=r"idle-in-transaction|closed|gone away|Lost connection") as caught:
                older.do(older.fence.token(older.connection, "x"))
            assert f"{type(caught.value).__module__}.{type(caught.value).__qualname__}" == error
    finally:
        newer.close()
