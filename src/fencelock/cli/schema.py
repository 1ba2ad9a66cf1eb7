"""`fencelock schema`: print or create the tables, for teams whose applications may not create tables."""

from __future__ import annotations

import argparse
import os

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.errors import write_error, write_output
from fencelock.cli.options import Parser, engine_url


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser(
        "schema",
        "Print or make what is needed in a database: by an engine that keeps locks there\n"
        "or, with --fence or --lockfree, by an application that keeps its own data there.",
        SHORT_TABLE,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--print", action="store_true", help="write the statements to stdout and change nothing")
    what.add_argument("--apply", action="store_true", help="make it in the database, unless it is there")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--fence", action="store_true", help="the table of SqlFence, in the application's own database")
    whose.add_argument(
        "--lockfree",
        action="store_true",
        help="the tables of idempotency keys and of the outbox, with the fence's, there",
    )
    parser.add_argument(
        "--url", help="the engine or the database (default: $FENCELOCK_URL, where a URL with a password belongs)"
    )
    return parser


def main(argv: list[str]) -> int:
    """Print the statements, or run them."""
    options = parser().parse_args(argv)
    url = engine_url(options)
    if options.fence or options.lockfree:
        return _tables(options, url)
    from fencelock.core.urls import open_schema, redact
    from fencelock.runtime.blocking import BlockingRuntime, run_sync

    schema = open_schema(BlockingRuntime(), url)
    if schema is None:
        named = options.url or os.environ.get("FENCELOCK_URL")
        hint = "" if named else ", the default: set $FENCELOCK_URL or give --url"
        write_error(f"only PostgreSQL and MySQL need a schema, and this is {redact(url)}{hint}")
    elif options.print:
        grants = "".join(f"-- {line}\n" for line in schema.grants().splitlines())
        write_output(f"{schema.text()}\n-- What another user, here app, needs to work with it:\n{grants}")
    else:
        made = run_sync(schema.apply())
        write_error(
            f"the schema {'was made' if made else 'was there already, and is right'}: {redact(url)}; the grants that other "
            "users need are at the end of what --print writes"
        )
    return 0


def _tables(options: argparse.Namespace, url: str) -> int:
    """Print or create tables in an application's own database."""
    from fencelock.cli import tables
    from fencelock.errors import InvalidURL

    if not (options.url or os.environ.get("FENCELOCK_URL")):
        which = "--fence" if options.fence else "--lockfree"
        raise InvalidURL(
            f"{which} is about the application's own database: give its URL with --url or, if it has a password, in "
            "$FENCELOCK_URL, as in --url postgresql://app@db/shop"
        )
    (tables.apply if options.apply else tables.show)(url, tables.fence() if options.fence else tables.lockfree())
    return 0
