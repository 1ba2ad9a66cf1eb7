"""`fencelock once` and `fencelock cron`: run a command once for a slot, in the whole fleet, and record how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from fencelock.cli.codes import JOB_CODES, LOST, SIGNALLED
from fencelock.cli.errors import write_error
from fencelock.cli.hold import Hold, bounded, time_left
from fencelock.cli.options import Parser, add_time

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from datetime import datetime

    from fencelock.cli.hold import Held
    from fencelock.core.client import Client
    from fencelock.core.lease import BaseLease
    from fencelock.primitives.runs import ClaimedRun

ONCE = """\
Run a command once for a slot, in the whole fleet. A slot is any text, such as a
day. If the slot ran or is running elsewhere, nothing happens and the exit code
is 0. A run whose worker died counts, unless there are more --attempts."""

CRON = """\
Run a command for the slot of a schedule that is due now, once in the whole
fleet, and exit: for the crontab of several hosts, or a Kubernetes CronJob. If
nothing is due, or another host has the slot, nothing happens and the exit code
is 0. EXPRESSION is a cron expression of five fields (needs the extra cron), or
use --every. All hosts must give the same expression and time zone."""

ENVIRONMENT = """\
The command gets FENCELOCK_SLOT, FENCELOCK_ATTEMPT, FENCELOCK_TOKEN (above that
of every earlier run), FENCELOCK_ID, FENCELOCK_NAME and FENCELOCK_OWNER in its
environment. If its lease is about to be lost, it is stopped as under
`fencelock run`. Another code than 0 is a failed run."""

CATCH_UP = "which missed slots to run; none: only the latest due slot, as latest does here"


def once(argv: list[str]) -> NoReturn:
    """Run the command, unless the slot has run, and exit."""
    parser = _parser("once", "SLOT", ONCE, 'fencelock once billing "$(date -u +%F)" -- ./bill-customers')
    parser.add_argument("--again", action="store_true", help="run the slot even if it ran before")
    add_time(parser, "--keep", 90 * 86400.0, "how long to remember the run (90d)")
    options, command = parser.parse_command(argv, most=None, dashes=True)
    if len(options.names) != 2:
        parser.error("give the job's NAME and one SLOT before the --")
    slot = options.names.pop()
    hold = JobHold(options, command)

    async def claim(client: Client[BaseLease]) -> Held | None:
        from fencelock.primitives.once import BaseOnce

        once = BaseOnce(client, options.name, slot, keep=options.keep, again=options.again, **_shared(options))
        lease = hold.claim(await once.begin(), once.now)
        if lease is None and options.verbose:
            write_error(f"the slot {slot!r} of {options.name!r} ran before, or is running elsewhere")
        return lease

    hold.exit(hold.run(claim).code)


def cron(argv: list[str]) -> NoReturn:
    """Run the command for one slot; then look for another one, or exit."""
    parser = _parser("cron", "EXPRESSION", CRON, 'fencelock cron billing "0 2 * * *" -- ./bill-customers')
    add_time(parser, "--every", None, "slots at multiples of this time since 1970, without EXPRESSION")
    parser.add_argument("--tz", default="UTC", help="the time zone of the expression (%(default)s)")
    parser.add_argument("--catch-up", choices=("latest", "all", "none"), default="latest", help=CATCH_UP)
    add_time(parser, "--within", 3600.0, "give up a slot after so long (1h)")
    overlap = "what to do while an earlier slot is running (skip)"
    parser.add_argument("--overlap", choices=("skip", "wait"), default="skip", help=overlap)
    add_time(parser, "--early", 30.0, "a slot so far ahead is due, too (30s)")
    options, command = parser.parse_command(argv, most=None, dashes=True)
    if len(options.names) != (2 if options.every is None else 1):
        parser.error("give the job's NAME and one EXPRESSION, in quotes, or --every, before the --")
    expression = options.names.pop() if options.every is None else None
    hold = JobHold(options, command)

    async def claim(client: Client[BaseLease]) -> Held | None:
        from fencelock.primitives.schedule import BaseSchedule

        schedule = BaseSchedule(
            client,
            options.name,
            cron=expression,
            every=options.every,
            tz=options.tz,
            catch_up=options.catch_up,
            within=options.within,
            overlap=options.overlap,
            **_shared(options),
        )
        lease = hold.claim(await schedule.claim_due(options.early), schedule.now)
        if lease is None and options.verbose:
            due = f"{schedule.next():%Y-%m-%d %H:%M:%S} UTC"
            write_error(f"no slot of {options.name!r} is due here; the next one is {due}")
        return lease

    ended = hold.run(claim)
    if hold.claimed is not None and not hold.signals.restore():
        more = options.catch_up == "all" or options.overlap == "wait"
        failed = 0 < ended.code < SIGNALLED and ended.code != LOST
        if (ended.again and more) or (failed and hold.claimed.run.attempt < options.attempts):
            hold.start_again()
    hold.exit(ended.code)


class JobHold(Hold):
    """A command that is the run of a job, once that is claimed."""

    claimed: ClaimedRun[BaseLease] | None = None
    _now: Callable[[], datetime]

    def claim(self, claimed: ClaimedRun[BaseLease] | None, now: Callable[[], datetime]) -> BaseLease | None:
        """Remember the run, and the clock for its end; return its lease."""
        self.claimed, self._now = claimed, now
        return None if claimed is None else claimed.lease

    def environment(self, held: Held) -> dict[str, str]:
        """Add the slot and the attempt."""
        assert self.claimed is not None
        run = self.claimed.run
        return super().environment(held) | {"FENCELOCK_SLOT": run.slot, "FENCELOCK_ATTEMPT": str(run.attempt)}

    def record(self, held: Held, status: int | None) -> None:
        """Record how the command ended, within a bounded time."""
        bounded(self._record(status), time_left(held))

    async def _record(self, status: int | None) -> None:
        from fencelock.primitives.runs import Outcome, outcome_of

        assert self.claimed is not None
        outcome, error = outcome_of(self.claimed.lease, None)
        if status is None and outcome is Outcome.SUCCEEDED:
            outcome, error = Outcome.ABANDONED, "the command was stopped"
        elif status and outcome is Outcome.SUCCEEDED:
            how = f"signal {status - SIGNALLED}" if status > SIGNALLED else f"exit code {status}"
            outcome, error = Outcome.FAILED, how
        await self.claimed.record(outcome, error, self._now())


def _parser(command: str, second: str, description: str, example: str) -> Parser:
    usage = f"NAME {second} [options] -- COMMAND [ARGUMENT ...]"
    parser = Parser(command, usage, f"{description}\n\n{ENVIRONMENT}", example, JOB_CODES)
    parser.add_name(f"the job's name, and {second}")
    help = "run a slot up to N times if it fails or its worker dies (1)"
    parser.add_argument("--attempts", type=int, default=1, metavar="N", help=help)
    parser.add_hold()
    parser.set_defaults(no_wait=True, conflict_exit_code=0)
    return parser


def _shared(options: Namespace) -> dict[str, Any]:
    return {"attempts": options.attempts, "max_hold": options.max_hold, "purpose": options.purpose}
