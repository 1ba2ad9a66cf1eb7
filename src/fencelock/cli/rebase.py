"""`fencelock rebase --url URL --token N --reason TEXT`: move the fences of an application's resources on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.cli.codes import OUTPUT_CODES
from fencelock.cli.errors import write_error, write_output
from fencelock.cli.options import Parser, check_file_exists, engine_url

if TYPE_CHECKING:
    from argparse import Namespace

DESCRIPTION = """\
Move the fences in a database (SqlFence) or in Redis (RedisFence) to a token,
down or up: from then on they accept that token and every higher one. For locks
that moved to an engine whose clock is behind: stop all holders first, as the
fences accept their old leases, too (docs/moving-to-another-engine.md)."""

EXAMPLE = "fencelock rebase --url sqlite:shop.db --token 5000 --reason moved"


def rebase(argv: list[str]) -> int:
    """Move the fences and print their number."""
    parser = Parser("rebase", "--token TOKEN --reason TEXT [options]", DESCRIPTION, EXAMPLE, OUTPUT_CODES)
    parser.add_url("the application's database or Redis with the fences")
    parser.add_argument("--token", required=True, type=int, help="a token of the new engine, or a lower one")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why, for the log")
    parser.add_argument("--resource", metavar="NAME", help="move the fence of one resource (default: all)")
    parser.add_argument("--key", default="fencelock:fence", help="the key of a RedisFence (%(default)s)")
    options = parser.parse(argv)
    url = engine_url(options, "the fences are in the application's own database or Redis")
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


def _move_sql(url: str, options: Namespace) -> int:
    from fencelock.cli.database import connect
    from fencelock.fences.sql import SqlFence

    check_file_exists(url)
    with connect(url) as connection:
        if options.resource is None:
            return SqlFence().rebase_all(connection, options.token, reason=options.reason)
        SqlFence().rebase(connection, options.resource, options.token, reason=options.reason)
        return 1


def _move_redis(url: str, options: Namespace) -> int:
    from fencelock.core.urls import module_of, redact

    module_of(url)  # raises MissingDependency
    import redis

    from fencelock.errors import EngineUnavailable
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
