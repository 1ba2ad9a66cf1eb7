"""Print or create the tables of fences and lock-free tools in an application's own database."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fencelock.cli.database import connect, dialect_of, next_step
from fencelock.cli.errors import write_error, write_output
from fencelock.core.urls import redact
from fencelock.errors import EngineUnavailable
from fencelock.runtime.blocking import run_sync
from fencelock.sqlio import MYSQL, POSTGRESQL, adapt, error_codes, is_missing_table

_TABLE = re.compile(r"CREATE TABLE IF NOT EXISTS (\w+) \(\n(.*?)\n\)", re.DOTALL)
_COLUMN = re.compile(r"^ {4}(?!PRIMARY|KEY)(\w+) ", re.MULTILINE)

NO_COLUMN = {"42703", "1054"}


class Tables(NamedTuple):
    """Tables: their description for messages, their SQL in a dialect, and the function that creates them."""

    name: str
    text: Callable[[str], str]
    make: Callable[[Any], None]


def fence() -> Tables:
    """Return the table of the SQL fence."""
    from fencelock.fences.sql import SqlFence, schema

    return Tables(
        "the fence's table is", lambda dialect: "".join(f"{it};\n" for it in schema(dialect)), SqlFence().create
    )


def lockfree() -> Tables:
    """Return the tables of idempotency keys and of the outbox, with the fence's, which the outbox needs."""
    from fencelock.lockfree.schema import create_tables, schema_text

    return Tables("the tables of fencelock.lockfree are", schema_text, create_tables)


def show(url: str, tables: Tables) -> None:
    """Print the statements, and the grants that another user needs."""
    dialect = dialect_of(url)
    text = tables.text(dialect)
    if dialect in (MYSQL, POSTGRESQL):
        whom = "'app'@'%'" if dialect == MYSQL else "app"
        text += "\n-- What another user, here app, needs to work with it:\n"
        for table, _ in _shapes(text):
            text += f"-- GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {whom};\n"
    write_output(text)


def apply(url: str, tables: Tables) -> None:
    """Create the missing tables and report it; raise EngineUnavailable if an existing table has other columns."""
    shapes = list(_shapes(tables.text(dialect_of(url))))
    connection = connect(url)
    try:
        missing = [table for table, _ in shapes if not _has(connection, "1", table)]
        for table, columns in shapes:
            if table not in missing and not _has(connection, ", ".join(columns), table):
                raise EngineUnavailable(
                    f"{redact(url)}: there is a table {table}, but not with the columns {', '.join(columns)}, so it is not "
                    "fencelock's, or of another release: rename it, or use another database"
                )
        tables.make(connection)
        connection.commit()
    except EngineUnavailable:
        raise
    except Exception as error:
        raise EngineUnavailable(f"{redact(url)}: {redact(str(error))}{next_step(error)}") from error
    finally:
        connection.close()
    write_error(f"{tables.name} there{' now' if missing else ' already, and right'}: {redact(url)}{_who(url)}")


def _who(url: str) -> str:
    grants = "; the grants that other users need are at the end of what --print writes"
    return grants if dialect_of(url) in (MYSQL, POSTGRESQL) else ""


def _shapes(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the tables that the statements create, with their columns."""
    for found in _TABLE.finditer(text):
        yield found[1], _COLUMN.findall(found[2])


def _has(connection: Any, columns: str, table: str) -> bool:
    """Return whether a table with these columns exists. The transaction is rolled back."""
    try:
        run_sync(adapt(connection, "fences", awaited=False).execute(f"SELECT {columns} FROM {table} WHERE 1 = 0"))
    except Exception as error:
        if not is_missing_table(error) and not error_codes(error) & NO_COLUMN and "no such column" not in str(error):
            raise
        return False
    finally:
        connection.rollback()
    return True
