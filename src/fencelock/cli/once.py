"""`fencelock once NAME SLOT … -- COMMAND …`: run a command once for a slot, in the whole fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from fencelock.cli.errors import write_error
from fencelock.cli.hold import hold, leave
from fencelock.cli.job import CommandRun, job_parser, parse_job
from fencelock.cli.options import Parser, seconds

if TYPE_CHECKING:
    from fencelock.cli.hold import Held
    from fencelock.core.client import Client
    from fencelock.core.lease import BaseLease

DESCRIPTION = """\
Run a command once for a slot, in the whole fleet. A slot is any text, such as a
day. If the slot ran or is running elsewhere, nothing happens and the exit code
is 0. A run whose worker died counts, unless there are more --attempts."""

EXAMPLE = 'fencelock once billing "$(date -u +%F)" -- ./bill-customers'


def parser() -> Parser:
    """Return the parser of the arguments before the `--`."""
    parser = job_parser("once", DESCRIPTION, "SLOT", EXAMPLE)
    parser.add_argument("--again", action="store_true", help="run the slot even if it ran before")
    parser.add_argument(
        "--keep", type=seconds, default=90 * 86400.0, metavar="TIME", help="how long to remember the run (90d)"
    )
    return parser


def main(argv: list[str]) -> NoReturn:
    """Run the command, unless the slot has run, and exit."""
    reader = parser()
    options, words, command = parse_job(reader, argv, EXAMPLE)
    if len(words) != 1:
        reader.error("give the job's NAME and one SLOT before the --")
    job = CommandRun()

    async def claim(client: Client[BaseLease]) -> Held | None:
        from fencelock.primitives.once import OnceFactory

        once = OnceFactory(
            client,
            options.name,
            words[0],
            keep=options.keep,
            attempts=options.attempts,
            again=options.again,
            max_hold=options.max_hold,
            purpose=options.purpose,
        )
        lease = job.claim(await once.begin(), once.now)
        if lease is None and options.verbose:
            write_error(f"the slot {words[0]!r} of {options.name!r} ran before, or is running elsewhere")
        return lease

    ended, _ = hold(options, command, claim, job)
    leave(ended.code)
