"""The bound on idle transactions: whose connections it stays on, and what it makes of a lease that is not ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fencelock import StaleToken
from fencelock.fences.sql.door import SqlDoor
from tests.fences.bearers import bearer
from tests.fences.callers import Where
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
    door.enter(bearer(34, remaining=5.0), "printer")
    with engine.connect() as connection:
        assert idle_bound(connection) == before
    with pytest.raises(StaleToken):
        door.enter(bearer(33, remaining=5.0), "printer")
    with engine.connect() as connection:
        assert idle_bound(connection) == before
    engine.dispose()


@pytest.mark.parametrize("remaining", [float("inf"), 1e12, -5.0, 0, None, max, "30", float("nan")], ids=str)
def test_what_another_service_calls_remaining(connect: Connect, remaining: Any) -> None:
    """A lease of another service may have anything under that name: what is no time bounds nothing, and a long one is cut."""
    connection = connect()
    FENCE.check(connection, SimpleNamespace(token=34, id="a", remaining=remaining), "stock")
    run(connection, "UPDATE stock SET n = 95")
    connection.commit()
