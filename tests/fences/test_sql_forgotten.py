"""A check on a connection of asyncio's that nobody awaits: what comes next is refused, and whoever forgot it is told."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from fencelock.fences.sql import SqlFence
from tests.fences.callers import RECIPES, Where, caller

NEW = SimpleNamespace(token=34, id="b")
AWAITED = sorted(kind for kind in RECIPES if "async" in kind or "aio" in kind)


async def write(handed: Any, n: int) -> None:
    """Write as a caller of this kind does."""
    if hasattr(handed, "exec_driver_sql"):
        await handed.exec_driver_sql(f"UPDATE forgotten SET n = {n}")
    elif hasattr(handed, "sync_session"):
        from sqlalchemy import text

        await handed.execute(text(f"UPDATE forgotten SET n = {n}"))
    else:
        await handed.execute(f"UPDATE forgotten SET n = {n}")


async def read(handed: Any) -> int:
    """Return what is there."""
    if hasattr(handed, "exec_driver_sql"):
        return int((await handed.exec_driver_sql("SELECT n FROM forgotten")).scalar_one())
    if hasattr(handed, "sync_session"):
        from sqlalchemy import text

        return int((await handed.execute(text("SELECT n FROM forgotten"))).scalar_one())
    cursor = await handed.execute("SELECT n FROM forgotten")
    (n,) = await cursor.fetchone()
    return int(n)


@pytest.mark.parametrize("kind", AWAITED)
def test_nothing_is_written_after_a_check_that_nobody_awaited(kind: str, where: Where) -> None:
    """The write after a forgotten `await` fails, also in a transaction that is open, and nothing of it is committed."""
    with caller(kind, where) as one:
        one.do(SqlFence().create(one.handed))
        execute = getattr(one.handed, "exec_driver_sql", None)
        for statement in (
            "DROP TABLE IF EXISTS forgotten",
            "CREATE TABLE forgotten (n INT)",
            "INSERT INTO forgotten VALUES (100)",
        ):
            one.do(execute(statement) if execute else _run(one.handed, statement))
        one.commit()

    for opened in (False, True):
        with caller(kind, where) as one:

            async def use(handed: Any, opened: bool) -> None:
                if opened:
                    await read(handed)
                SqlFence().check(handed, NEW, "forgotten")  # type: ignore[unused-coroutine,unused-ignore]
                gc.collect()
                await write(handed, 90)

            with (
                pytest.warns(RuntimeWarning, match=r"check of 'forgotten' was never awaited.*refuses"),
                pytest.raises(Exception, match=r"never awaited|closed"),
            ):
                one.do(use(one.handed, opened))
            with pytest.raises(Exception, match=r"never awaited|closed"):
                one.commit()
    with caller(kind, where) as one:
        assert one.do(read(one.handed)) == 100


def _run(handed: Any, statement: str) -> Any:
    from sqlalchemy import text

    return handed.execute(text(statement) if hasattr(handed, "sync_session") else statement)


@pytest.mark.parametrize("kind", AWAITED)
def test_a_check_may_be_a_task(kind: str, where: Where) -> None:
    """A check can be awaited in whichever way coroutines are, and be given up on purpose."""
    with caller(kind, where) as one:

        async def use(handed: Any) -> None:
            fence = SqlFence()
            await fence.create(handed)
            async with asyncio.timeout(60):
                await fence.check(handed, NEW, "task")
            await asyncio.create_task(fence.check(handed, NEW, "task"))
            await asyncio.wait_for(fence.check(handed, NEW, "task"), 60)
            await asyncio.gather(fence.check(handed, NEW, "task"))
            task = asyncio.create_task(fence.check(handed, NEW, "task"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            fence.check(handed, NEW, "task").close()
            assert await fence.token(handed, "task") == 34

        one.do(use(one.handed))
        gc.collect()
        one.commit()
