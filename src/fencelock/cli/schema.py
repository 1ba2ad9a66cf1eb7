"""`fencelock schema`: what is needed in a database, for teams whose applications may not create tables."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.guard import put, say
from fencelock.cli.options import Parser, engine_url


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser(
        "schema", "Print or make what is needed in a database: by an engine, or in place of one.", SHORT_TABLE
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--print", action="store_true", help="write the statements to stdout and change nothing")
    what.add_argument("--apply", action="store_true", help="make it in the database, unless it is there")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--fence", action="store_true", help="the table of SqlFence, in the application's own database")
    whose.add_argument(
        "--lockfree", action="store_true", help="the tables of idempotency keys and of the outbox, there"
    )
    parser.add_argument("--url", help="the engine (default: $FENCELOCK_URL, where a URL with a password belongs)")
    return parser


def main(argv: list[str]) -> int:
    """Print the statements, or run them."""
    options = parser().parse_args(argv)
    url = engine_url(options)
    if options.fence or options.lockfree:
        return tables(url, *(_fence() if options.fence else _lockfree()), apply=options.apply)
    from fencelock.core.urls import open_schema, redact
    from fencelock.worlds.blocking import BlockingWorld, drive

    schema = open_schema(BlockingWorld(), url)
    if schema is None:
        named = options.url or os.environ.get("FENCELOCK_URL")
        hint = "" if named else ", the default: set $FENCELOCK_URL or give --url"
        say(f"only PostgreSQL and MySQL need a schema, and this is {redact(url)}{hint}")
    elif options.print:
        grants = "".join(f"-- {line}\n" for line in schema.grants().splitlines())
        put(f"{schema.text()}\n-- What another user, here app, needs to work with it:\n{grants}")
    else:
        made = drive(schema.apply())
        say(
            f"the schema {'was made' if made else 'was there already, and is right'}: {redact(url)}; the grants that other "
            "users need are at the end of what --print writes"
        )
    return 0


def tables(url: str, what: str, text: Callable[[str], str], make: Callable[[Any], Any], *, apply: bool) -> int:
    """Print or make tables in an application's own database."""
    from fencelock.cli.database import connect, dialect_of
    from fencelock.core.urls import redact
    from fencelock.errors import EngineUnavailable

    if not apply:
        put(text(dialect_of(url)))
        return 0
    connection = connect(url)
    try:
        make(connection)
        connection.commit()
    except Exception as error:
        raise EngineUnavailable(f"{redact(url)}: {redact(str(error))}") from error
    finally:
        connection.close()
    say(f"{what} there: {redact(url)}")
    return 0


def _fence() -> tuple[str, Callable[[str], str], Callable[[Any], Any]]:
    from fencelock.fences.sql import SqlFence, schema

    return "the fence's table is", lambda dialect: "".join(f"{it};\n" for it in schema(dialect)), SqlFence().create


def _lockfree() -> tuple[str, Callable[[str], str], Callable[[Any], Any]]:
    from fencelock.lockfree.schema import create_tables, schema_text

    return "the tables of fencelock.lockfree are", schema_text, create_tables
