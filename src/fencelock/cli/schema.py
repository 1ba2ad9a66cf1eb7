"""`fencelock schema`: what an engine needs in a database, for teams whose applications may not create tables."""

from __future__ import annotations

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.guard import put, say
from fencelock.cli.options import Parser, engine_url


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser("schema", "Print or make what an engine needs in a database.", SHORT_TABLE)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--print", action="store_true", help="write the statements to stdout and change nothing")
    what.add_argument("--apply", action="store_true", help="make it in the database, unless it is there")
    parser.add_argument("--url", help="the engine (default: $FENCELOCK_URL, where a URL with a password belongs)")
    return parser


def main(argv: list[str]) -> int:
    """Print the statements, or run them."""
    options = parser().parse_args(argv)
    from fencelock.core.urls import open_schema, redact
    from fencelock.worlds.blocking import BlockingWorld, drive

    url = engine_url(options)
    schema = open_schema(BlockingWorld(), url)
    if schema is None:
        say(f"{redact(url)} needs no schema; only databases do")
    elif options.print:
        put(schema.text())
    else:
        drive(schema.apply())
        say("the schema is there")
    return 0
