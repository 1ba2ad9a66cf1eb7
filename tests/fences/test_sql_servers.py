"""The SQL fence on real servers: waiting, isolation levels, idle transactions, prune, missing tables."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pymysql
import pytest
from pymysql.constants import CLIENT

import fencelock
from fencelock import FencelockError, StaleToken
from fencelock.fences import Fenced
from fencelock.fences.sql import FenceColumn, SqlFence
from tests.fences.fake_lease import fake_lease
from tests.fences.sql_helpers import FENCE, Connect, InThread, run, stock


def test_newer_holder_waits_for_the_commit(connect: Connect) -> None:
    """The row stays locked until commit: a newer holder's check waits, and its read then sees the older one's write."""
    old, new = connect(), connect()
    FENCE.check(old, fake_lease(33), "stock")
    seen = stock(old)

    def buy() -> int:
        FENCE.check(new, fake_lease(34), "stock")
        left = stock(new) - 5
        run(new, "UPDATE stock SET n = %s", left)
        new.commit()
        return left

    newer = InThread(buy)
    assert newer.waits()
    run(old, "UPDATE stock SET n = %s", seen - 10)
    old.commit()
    assert newer.result() == 85
    with pytest.raises(StaleToken):
        FENCE.check(old, fake_lease(33), "stock")


def test_a_read_before_the_check_loses_a_write(connect: Connect) -> None:
    """Without the check first, a write is lost: 34 reads, 33 writes, and 34 overwrites the write of 33."""
    old, new = connect(), connect()
    if "pymysql" in type(new).__module__:
        run(new, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    too_early = stock(new)
    FENCE.check(old, fake_lease(33), "stock")
    run(old, "UPDATE stock SET n = %s", stock(old) - 10)
    old.commit()
    FENCE.check(new, fake_lease(34), "stock")
    run(new, "UPDATE stock SET n = %s", too_early - 5)
    new.commit()
    assert stock(connect()) == 95


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_check_that_waited_under_stricter_isolation(connect: Connect, server: str, level: str) -> None:
    """With the check first no write is lost: PostgreSQL demands a repetition, MariaDB reads the committed value."""
    old, new = connect(), connect()
    for one in (old, new):
        run(
            one,
            f"SET {'SESSION CHARACTERISTICS AS' if server == 'postgres' else 'SESSION'} TRANSACTION ISOLATION LEVEL {level}",
        )
        one.commit()

    def buy() -> int:
        while True:
            try:
                FENCE.check(new, fake_lease(34), "stock")
                left = stock(new) - 5
                run(new, "UPDATE stock SET n = %s", left)
                new.commit()
                return left
            except psycopg.errors.SerializationFailure:
                new.rollback()
                repeated.append(True)

    repeated: list[bool] = []
    FENCE.check(old, fake_lease(33), "stock")
    seen = stock(old)
    newer = InThread(buy)
    assert newer.waits()
    run(old, "UPDATE stock SET n = %s", seen - 10)
    old.commit()
    assert newer.result() == 85
    assert repeated == ([True] if server == "postgres" else [])


def test_a_snapshot_from_before_the_check(connect: Connect, server: str) -> None:
    """After a read before the check, PostgreSQL refuses the check, and MariaDB keeps reading its old snapshot."""
    old, new = connect(), connect()
    if server == "postgres":
        run(new, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    FENCE.check(old, fake_lease(32), "stock")
    old.commit()
    seen_early = stock(new)
    FENCE.check(old, fake_lease(33), "stock")
    run(old, "UPDATE stock SET n = %s", stock(old) - 10)
    old.commit()
    if server == "postgres":
        with pytest.raises(psycopg.errors.SerializationFailure):
            FENCE.check(new, fake_lease(34), "stock")
    else:
        FENCE.check(new, fake_lease(34), "stock")
        assert stock(new) == seen_early == 100


def test_an_idle_transaction_is_ended_by_the_server(connect: Connect, server: str) -> None:
    """The server ends a transaction that is idle for too long: the next holder continues, and the first cannot commit."""
    old, new = connect(), connect()
    SqlFence(idle_timeout=1).check(old, fake_lease(33), "stock")
    run(old, "UPDATE stock SET n = 0")
    FENCE.check(new, fake_lease(34), "stock")
    run(new, "UPDATE stock SET n = 95")
    new.commit()
    with pytest.raises((psycopg.errors.IdleInTransactionSessionTimeout, pymysql.err.OperationalError)):
        old.commit()
    assert stock(connect()) == 95


def idle_bound(connection: Any, server: str) -> str:
    """Return the limit on idle transactions of this connection."""
    setting = (
        "SHOW idle_in_transaction_session_timeout" if server == "postgres" else "SELECT @@idle_transaction_timeout"
    )
    return str(run(connection, setting)[0][0])


def test_restore_resets_the_idle_timeout(connect: Connect, server: str) -> None:
    """The limit ends with the transaction on PostgreSQL, with `restore` on MariaDB; a shorter limit stays."""
    connection = connect()
    session = "idle_in_transaction_session_timeout" if server == "postgres" else "idle_transaction_timeout"
    before = ""
    fence = SqlFence(idle_timeout=7.9)
    for own, during in [("0", "7"), ("5", "5"), ("9", "7")]:
        run(connection, f"SET SESSION {session} = " + (f"'{own}s'" if server == "postgres" else own))
        connection.commit()
        before = idle_bound(connection, server)
        fence.check(connection, fake_lease(33), "stock")
        assert idle_bound(connection, server).rstrip("s") == (during if server == "mariadb" or own == "5" else "7900m")
        fence.check(connection, fake_lease(33), "stock")
        connection.commit()
        fence.restore(connection)
        assert idle_bound(connection, server) == before
    SqlFence(idle_timeout=False).check(connection, fake_lease(33), "stock")
    assert idle_bound(connection, server) == before


@pytest.mark.parametrize(
    ("bound", "ttl", "seconds"),
    [(True, None, 30), (True, 2.0, 30), (True, 60.0, 120), (60, None, 60), (5, 60.0, 5), (300, 2.0, 300)],
)
def test_idle_timeout_is_30_s_or_twice_the_ttl(
    connect: Connect, server: str, bound: Any, ttl: float | None, seconds: int
) -> None:
    """The limit is 30 s or twice the ttl, whichever is more, unless the caller sets another one."""
    connection = connect()
    more = {} if ttl is None else {"ttl": ttl}
    SqlFence(idle_timeout=bound).check(connection, SimpleNamespace(token=34, id="a", **more), "stock")
    assert idle_bound(connection, server) in (str(seconds), f"{seconds}s", f"{seconds // 60}min")
    connection.rollback()


def test_transaction_may_outlive_the_remaining_time_of_its_lease(connect: Connect, server: str, tmp_path: Path) -> None:
    """The lease is renewed while the transaction is idle, so the server does not end it when the first ttl is over."""
    connection = connect()
    with fencelock.connect(f"sqlite:{tmp_path}/locks.db") as locks, locks.lock("stock", ttl=1.0) as lease:
        FENCE.check(connection, lease)
        assert not lease.lost.wait(2.5)  # no statement meanwhile: MariaDB counts whole seconds
        lease.check()
        run(connection, "UPDATE stock SET n = 95")
        connection.commit()
    assert stock(connection) == 95


@pytest.mark.parametrize("bound", [0, -1, 0.05, float("nan"), float("inf")])
def test_invalid_idle_timeout(bound: float) -> None:
    """An idle timeout that would end every transaction, or none, is refused."""
    with pytest.raises(ValueError, match="idle_timeout"):
        SqlFence(idle_timeout=bound)


def test_pruned_resources_refuse_tokens_below_min_token(connect: Connect) -> None:
    """Pruned and unknown resources refuse tokens below min_token; a rebased fence has its own token."""
    connection = connect()
    for resource, token in [("a", 10), ("b", 20), ("c", 30)]:
        FENCE.check(connection, fake_lease(token), resource)
    assert FENCE.prune(connection, 25) == 2
    assert FENCE.prune(connection, 15) == 0
    connection.commit()
    for resource in ("a", "b", "never seen"):
        with pytest.raises(StaleToken) as caught:
            FENCE.check(connection, fake_lease(24), resource)
        assert caught.value.seen == 25
        connection.rollback()
        FENCE.check(connection, fake_lease(25), resource)
    with pytest.raises(StaleToken):
        FENCE.check(connection, fake_lease(29), "c")
    connection.rollback()
    FENCE.rebase(connection, "d", 3, reason="another engine")
    FENCE.check(connection, fake_lease(3), "d")
    connection.commit()


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_prune_while_a_stale_holder_checks(connect: Connect, server: str, level: str) -> None:
    """A stale holder whose check waits for prune, or has an older snapshot, is refused, too."""
    old, pruner = connect(), connect()
    FENCE.check(pruner, fake_lease(34), "stock")
    pruner.commit()
    run(
        old,
        f"SET {'SESSION CHARACTERISTICS AS' if server == 'postgres' else 'SESSION'} TRANSACTION ISOLATION LEVEL {level}",
    )
    old.commit()
    stock(old)  # a snapshot, where there is one for the whole transaction
    FENCE.prune(pruner, 100)
    late = InThread(lambda: FENCE.check(old, fake_lease(33), "stock"))
    late.waits()
    pruner.commit()
    assert isinstance(late.result(), StaleToken | psycopg.errors.SerializationFailure)


def test_missing_table(connect: Connect) -> None:
    """Without its table the fence says how to create it, and does not create it in the caller's transaction."""
    connection = connect()
    run(connection, "DROP TABLE fencelock_fence")
    connection.commit()
    with pytest.raises(FencelockError, match="fencelock schema --fence --apply") as caught:
        FENCE.check(connection, fake_lease(33), "stock")
    assert isinstance(caught.value.__cause__, psycopg.errors.UndefinedTable | pymysql.err.ProgrammingError)


def test_similar_names_are_different_resources(connect: Connect) -> None:
    """Resources and owners are compared byte for byte: case, trailing spaces and accents make different ones."""
    connection = connect()
    for token, resource in enumerate(["a", "A", "a ", " ", "á", "a\u0301", "Å", "\u212b", "x" * 1024], start=1):
        FENCE.check(connection, fake_lease(100 - token), resource)
    FENCE.check(connection, fake_lease(34, "me"), "owner")
    for other in ("Me", "me ", "mé"):
        with pytest.raises(StaleToken):
            FENCE.check(connection, fake_lease(34, other), "owner")
    connection.rollback()


def test_fence_column(connect: Connect, server: str) -> None:
    """The UPDATE of a stale holder, or of another claim with an equal token, finds no row."""
    connection = connect(**({"client_flag": CLIENT.FOUND_ROWS} if server == "mariadb" else {}))
    column = FenceColumn(paramstyle="pyformat")

    def write(n: int, lease: Fenced) -> None:
        mine = column.clause(lease)
        with connection.cursor() as cursor:
            cursor.execute(f"UPDATE stock SET n = %(n)s, {mine.set} WHERE {mine.where}", {"n": n, **mine.named})
            column.check(lease, cursor.rowcount, "stock")

    for _ in range(2):
        write(95, fake_lease(34))
    for stale in (
        fake_lease(33),
        fake_lease(34, "another claim"),
        fake_lease(34, "HOLDER OF 34"),
        fake_lease(34, "holder of 34 "),
    ):
        with pytest.raises(StaleToken, match="a newer holder has written it"):
            write(1, stale)
    connection.commit()
    assert stock(connection) == 95


def test_concurrent_first_checks(connect: Connect) -> None:
    """Concurrent first checks of a resource do not deadlock, and are accepted in the order of their tokens."""
    connections = [connect() for _ in range(6)]
    passed: list[int] = []

    def check(token: int, connection: Any) -> None:
        try:
            FENCE.check(connection, fake_lease(token), "new")
        except StaleToken:
            connection.rollback()  # a refusal may have locked the row as well
            raise
        passed.append(token)
        time.sleep(0.01)
        connection.commit()

    outcomes = [InThread(lambda n=n, c=c: check(n, c)) for n, c in enumerate(connections, start=1)]  # type: ignore[misc]
    results = [one.result() for one in outcomes]
    assert all(outcome is None or isinstance(outcome, StaleToken) for outcome in results)
    assert passed == sorted(passed)


@pytest.mark.parametrize("server", ["mariadb"])
def test_snapshot_isolation_of_newer_mariadb(connect: Connect) -> None:
    """With innodb_snapshot_isolation, the default of MariaDB 11.6, a read before the check is an error."""
    old, new, early = connect(), connect(), connect()
    for one in (old, new, early):
        run(one, "SET SESSION innodb_snapshot_isolation = ON")
        one.commit()
    FENCE.check(old, fake_lease(32), "stock")
    old.commit()
    stock(early)
    FENCE.check(old, fake_lease(33), "stock")
    seen = stock(old)

    def buy() -> int:
        FENCE.check(new, fake_lease(34), "stock")
        left = stock(new) - 5
        run(new, "UPDATE stock SET n = %s", left)
        new.commit()
        return left

    newer = InThread(buy)
    assert newer.waits()
    run(old, "UPDATE stock SET n = %s", seen - 10)
    old.commit()
    assert newer.result() == 85
    with pytest.raises(pymysql.err.OperationalError, match="Record has changed since last read"):
        FENCE.check(early, fake_lease(35), "stock")
