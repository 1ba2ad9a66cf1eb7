"""`fencelock cron NAME EXPRESSION … -- COMMAND …`: run a command once for each slot of a schedule, in the whole fleet."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from fencelock.cli.codes import LOST, SIGNALLED
from fencelock.cli.errors import write_error
from fencelock.cli.hold import hold, leave
from fencelock.cli.job import CommandRun, job_parser, parse_job
from fencelock.cli.options import Parser, seconds

if TYPE_CHECKING:
    from fencelock.cli.hold import Held
    from fencelock.core.client import Client
    from fencelock.core.lease import BaseLease

DESCRIPTION = """\
Run a command for the slot of a schedule that is due now, once in the whole
fleet, and exit: for the crontab of several hosts, or a Kubernetes CronJob. If
nothing is due, or another host has the slot, nothing happens and the exit code
is 0. EXPRESSION is a cron expression of five fields (needs the extra cron), or
use --every. All hosts must give the same expression and time zone."""

EXAMPLE = 'fencelock cron billing "0 2 * * *" -- ./bill-customers'


def parser() -> Parser:
    """Return the parser of the arguments before the `--`."""
    parser = job_parser("cron", DESCRIPTION, "EXPRESSION", EXAMPLE)
    parser.add_argument(
        "--every", type=seconds, metavar="TIME", help="slots at multiples of this time since 1970, without EXPRESSION"
    )
    parser.add_argument("--tz", default="UTC", help="the time zone of the expression (%(default)s)")
    parser.add_argument(
        "--catch-up",
        choices=("latest", "all", "none"),
        default="latest",
        help="which missed slots to run; none: only the latest due slot, as latest does here",
    )
    parser.add_argument(
        "--within", type=seconds, default=3600.0, metavar="TIME", help="give up a slot after so long (1h)"
    )
    parser.add_argument(
        "--overlap", choices=("skip", "wait"), default="skip", help="what to do while an earlier slot is running"
    )
    parser.add_argument(
        "--early", type=seconds, default=30.0, metavar="TIME", help="a slot so far ahead is due, too (30s)"
    )
    return parser


def main(argv: list[str]) -> NoReturn:
    """Run the command for one slot; then look for another one, or exit."""
    reader = parser()
    options, words, command = parse_job(reader, argv, EXAMPLE)
    if len(words) != (options.every is None):
        reader.error("give the job's NAME and one EXPRESSION, in quotes, or --every, before the --")
    job = CommandRun()

    async def claim(client: Client[BaseLease]) -> Held | None:
        from fencelock.primitives.schedule import ScheduleFactory

        schedule = ScheduleFactory(
            client,
            options.name,
            cron=None if options.every is not None else words[0],
            every=options.every,
            tz=options.tz,
            catch_up=options.catch_up,
            within=options.within,
            overlap=options.overlap,
            attempts=options.attempts,
            max_hold=options.max_hold,
            purpose=options.purpose,
        )
        lease = job.claim(await schedule.claim_due(options.early), schedule.now)
        if lease is None and options.verbose:
            write_error(
                f"no slot of {options.name!r} is due here; the next one is {schedule.next():%Y-%m-%d %H:%M:%S} UTC"
            )
        return lease

    ended, signals = hold(options, command, claim, job)
    if job.claimed is None or signals.restore():
        leave(ended.code)
    more = options.catch_up == "all" or options.overlap == "wait"
    failed = 0 < ended.code < SIGNALLED and ended.code != LOST
    if not ((ended.again and more) or (failed and job.claimed.run.attempt < options.attempts)):
        leave(ended.code)
    # A new program in the same process: the next command is forked where there is no thread and no connection.
    os.execv(sys.executable, sys.orig_argv)
