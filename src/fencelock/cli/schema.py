"""`fencelock schema`: what an engine or a fence needs in a database, for teams whose applications may not create tables."""

from __future__ import annotations

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.guard import put, say
from fencelock.cli.options import Parser, engine_url


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser("schema", "Print or make what an engine, or a fence, needs in a database.", SHORT_TABLE)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--print", action="store_true", help="write the statements to stdout and change nothing")
    what.add_argument("--apply", action="store_true", help="make it in the database, unless it is there")
    parser.add_argument("--fence", action="store_true", help="the table of SqlFence, in the application's own database")
    parser.add_argument("--url", help="the engine (default: $FENCELOCK_URL, where a URL with a password belongs)")
    return parser


def main(argv: list[str]) -> int:
    """Print the statements, or run them."""
    options = parser().parse_args(argv)
    url = engine_url(options)
    if options.fence:
        return fence(url, apply=options.apply)
    from fencelock.core.urls import open_schema, redact
    from fencelock.worlds.blocking import BlockingWorld, drive

    schema = open_schema(BlockingWorld(), url)
    if schema is None:
        say(f"{redact(url)} needs no schema; only databases do")
    elif options.print:
        put(schema.text())
    else:
        drive(schema.apply())
        say("the schema is there")
    return 0


def fence(url: str, *, apply: bool) -> int:
    """Print or make the table of the SQL fence."""
    from fencelock.cli.database import connect, dialect_of
    from fencelock.core.urls import redact
    from fencelock.errors import EngineUnavailable
    from fencelock.fences.sql import SqlFence, schema

    if not apply:
        put("".join(f"{statement};\n" for statement in schema(dialect_of(url))))
        return 0
    connection = connect(url)
    try:
        SqlFence().create(connection)
        connection.commit()
    except Exception as error:
        raise EngineUnavailable(f"{redact(url)}: {redact(str(error))}") from error
    finally:
        connection.close()
    say("the fence's table is there")
    return 0
