"""`fencelock schema`: print or create the tables, for teams whose applications may not create tables."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from fencelock.cli.codes import OUTPUT_CODES
from fencelock.cli.database import connect, dialect_of
from fencelock.cli.errors import write_error, write_output
from fencelock.cli.options import Parser, engine_url
from fencelock.core.urls import open_schema, redact
from fencelock.errors import EngineUnavailable
from fencelock.runtime.blocking import BlockingRuntime, run_sync
from fencelock.sqlio import MYSQL, POSTGRESQL, error_codes, is_missing_table

DESCRIPTION = """\
Print or make what is needed in a database: by an engine that keeps locks there
or, with --fence or --lockfree, by an application that keeps its own data there."""

TABLE = r"CREATE TABLE IF NOT EXISTS (\w+) \(\n(.*?)\n\)"
COLUMN = r"^ {4}(?!PRIMARY|KEY)(\w+) "
NO_COLUMN = {"42703", "1054"}
GRANTS = "\n-- What another user, here app, needs to work with it:\n"
WHERE_GRANTS_ARE = "the grants that other users need are at the end of what --print writes"


def schema(argv: list[str]) -> int:
    """Print the statements, or run them."""
    example = "fencelock schema --apply --url postgresql://owner@db/app"
    parser = Parser("schema", "(--print | --apply) [options]", DESCRIPTION, example, OUTPUT_CODES)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--print", action="store_true", help="write the statements to stdout and change nothing")
    what.add_argument("--apply", action="store_true", help="make it in the database, unless it is there")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--fence", action="store_true", help="the table of SqlFence, in the application's own database")
    lockfree = "the tables of idempotency keys and of the outbox, with the fence's, there"
    whose.add_argument("--lockfree", action="store_true", help=lockfree)
    parser.add_url("the engine or the database")
    options = parser.parse(argv)
    if options.fence or options.lockfree:
        _tables(options)
    else:
        _engine_schema(options)
    return 0


def _engine_schema(options: Namespace) -> None:
    """Print or create what an engine needs."""
    url = engine_url(options)
    schema = open_schema(BlockingRuntime(), url)
    if schema is None:
        named = options.url or os.environ.get("FENCELOCK_URL")
        hint = "" if named else ", the default: set $FENCELOCK_URL or give --url"
        write_error(f"only PostgreSQL and MySQL need a schema, and this is {redact(url)}{hint}")
    elif options.print:
        grants = "".join(f"-- {line}\n" for line in schema.grants().splitlines())
        write_output(f"{schema.text()}{GRANTS}{grants}")
    else:
        made = run_sync(schema.apply())
        outcome = "was made" if made else "was there already, and is right"
        write_error(f"the schema {outcome}: {redact(url)}; {WHERE_GRANTS_ARE}")


def _tables(options: Namespace) -> None:
    """Print or create the tables of fences or lock-free tools in an application's own database."""
    which = "--fence" if options.fence else "--lockfree"
    url = engine_url(options, f"{which} is about the application's own database")
    dialect = dialect_of(url)
    has_grants = dialect in (MYSQL, POSTGRESQL)
    if options.fence:
        from fencelock.fences.sql import SqlFence
        from fencelock.fences.sql import schema as statements

        text, create = "".join(f"{statement};\n" for statement in statements(dialect)), SqlFence().create
    else:
        from fencelock.lockfree.schema import create_tables, schema_text

        text, create = schema_text(dialect), create_tables
    tables = {table: re.findall(COLUMN, body, re.M) for table, body in re.findall(TABLE, text, re.S)}
    if options.print:
        whom = "'app'@'%'" if dialect == MYSQL else "app"
        grants = (f"-- GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {whom};\n" for table in tables)
        write_output(text + (GRANTS + "".join(grants)) * has_grants)
        return
    what = "the fence's table is" if options.fence else "the tables of fencelock.lockfree are"
    made = _create(url, tables, create)
    after = f"; {WHERE_GRANTS_ARE}" * has_grants
    write_error(f"{what} there{' now' if made else ' already, and right'}: {redact(url)}{after}")


def _create(url: str, tables: dict[str, list[str]], create: Callable[[Any], None]) -> bool:
    """Create the missing tables; return whether any was. Raise EngineUnavailable if a table has other columns."""
    with connect(url) as connection:
        missing = [table for table in tables if not _has(connection, "1", table)]
        for table, columns in tables.items():
            if table not in missing and not _has(connection, ", ".join(columns), table):
                raise EngineUnavailable(
                    f"{redact(url)}: there is a table {table}, but not with the columns {', '.join(columns)}, so it is not "
                    "fencelock's, or of another release: rename it, or use another database"
                )
        create(connection)
    return bool(missing)


def _has(connection: Any, columns: str, table: str) -> bool:
    """Return whether a table with these columns exists. The transaction is rolled back."""
    try:
        connection.cursor().execute(f"SELECT {columns} FROM {table} WHERE 1 = 0")
    except Exception as error:
        if not is_missing_table(error) and not error_codes(error) & NO_COLUMN and "no such column" not in str(error):
            raise
        return False
    finally:
        connection.rollback()
    return True
