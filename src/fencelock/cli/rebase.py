"""`fencelock rebase --url URL --token N --reason TEXT`: move the fences of an application's resources on purpose."""

from __future__ import annotations

import os
from typing import Any

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.errors import write_error, write_output
from fencelock.cli.options import Parser, engine_url
from fencelock.errors import EngineUnavailable, FencelockError, InvalidURL

DESCRIPTION = """\
Move the fences in a database (SqlFence) or in Redis (RedisFence) to a token,
down or up: from then on they accept that token and every higher one. For locks
that moved to an engine whose clock is behind: stop all holders first, as the
fences accept their old leases, too (docs/moving-to-another-engine.md)."""


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser("rebase", DESCRIPTION, SHORT_TABLE)
    parser.add_argument(
        "--url",
        help="the application's database or Redis with the fences (default: $FENCELOCK_URL, where a URL with a password "
        "belongs)",
    )
    parser.add_argument("--token", required=True, type=int, help="a token of the new engine, or a lower one")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why, for the log")
    parser.add_argument("--resource", metavar="NAME", help="move the fence of one resource (default: all)")
    parser.add_argument("--key", default="fencelock:fence", help="the key of a RedisFence (%(default)s)")
    return parser


def main(argv: list[str]) -> int:
    """Move the fences and print their number."""
    options = parser().parse_args(argv)
    if not (options.url or os.environ.get("FENCELOCK_URL")):
        raise InvalidURL("name the database or the Redis with the fences: --url, or $FENCELOCK_URL")
    url = engine_url(options)
    _log_to_stderr()
    move = _move_redis if url.partition(":")[0] in ("redis", "rediss", "unix", "valkey") else _move_sql
    count = move(url, options)
    write_output(f"moved {count} {'fence' if count == 1 else 'fences'} to token {options.token}\n")
    return 0


def _log_to_stderr() -> None:
    """Write the log entries of the fences to stderr, one line each."""
    import logging

    class StderrHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            write_error(record.getMessage())

    logging.basicConfig(handlers=[StderrHandler()])


def _move_sql(url: str, options: Any) -> int:
    from fencelock.cli.database import connect, next_step
    from fencelock.core.urls import redact
    from fencelock.fences.sql import SqlFence

    connection = connect(url)
    try:
        if options.resource is None:
            count = SqlFence().rebase_all(connection, options.token, reason=options.reason)
        else:
            SqlFence().rebase(connection, options.resource, options.token, reason=options.reason)
            count = 1
        connection.commit()
        return count
    except FencelockError:
        raise
    except Exception as error:
        raise EngineUnavailable(f"{redact(url)}: {redact(str(error))}{next_step(error)}") from error
    finally:
        connection.close()


def _move_redis(url: str, options: Any) -> int:
    import redis

    from fencelock.core.urls import redact
    from fencelock.fences.redis import RedisFence

    try:
        with redis.Redis.from_url(url.replace("valkey:", "redis:", 1)) as client:
            fence = RedisFence(client, key=options.key)
            if options.resource is None:
                return fence.rebase_all(options.token, reason=options.reason)
            fence.rebase(options.resource, options.token, reason=options.reason)
            return 1
    except redis.RedisError as error:
        raise EngineUnavailable(f"{redact(url)}: {redact(str(error))}") from error
