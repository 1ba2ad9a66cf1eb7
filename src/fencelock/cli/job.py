"""A command as a run of `once` or of a schedule: its environment, and the record of how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.cli.codes import SIGNALLED, USAGE
from fencelock.cli.errors import write_error
from fencelock.cli.hold import add_hold_options, check_command, leave
from fencelock.cli.options import Parser, add_engine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from datetime import datetime

    from fencelock.core.lease import BaseLease
    from fencelock.primitives.runs import ClaimedRun

ENVIRONMENT = """\
The command gets FENCELOCK_SLOT, FENCELOCK_ATTEMPT, FENCELOCK_TOKEN (above that
of every earlier run), FENCELOCK_ID, FENCELOCK_NAME and FENCELOCK_OWNER in its
environment. If its lease is about to be lost, it is stopped as under
`fencelock run`. Another code than 0 is a failed run."""

JOB_TABLE = """\
exit codes:
  0    the command ended with 0, or there was nothing to run here
  the command's own, or 128 + n if signal n ended it
  64   the arguments are wrong
  69   the engine cannot be reached, or cannot do what was asked: nothing ran
  70   a bug in fencelock
  76   lost: the lease ended while the command ran; the command was stopped
  126  the command is not executable
  127  the command was not found
  128+n  signal n came before the command was started"""


class CommandRun:
    """The run of one command, once it is claimed."""

    def __init__(self) -> None:
        self.claimed: ClaimedRun[BaseLease] | None = None
        self._now: Callable[[], datetime]

    def claim(self, claimed: ClaimedRun[BaseLease] | None, now: Callable[[], datetime]) -> BaseLease | None:
        """Remember the run; return its lease."""
        self.claimed, self._now = claimed, now
        return None if claimed is None else claimed.lease

    @property
    def environment(self) -> dict[str, str]:
        """What the command finds in its environment besides its lease."""
        assert self.claimed is not None
        return {"FENCELOCK_SLOT": self.claimed.run.slot, "FENCELOCK_ATTEMPT": str(self.claimed.run.attempt)}

    async def record(self, status: int | None) -> None:
        """Record how the command ended; None if it was stopped, or not started."""
        from fencelock.primitives.runs import Outcome, outcome_of

        assert self.claimed is not None
        outcome, error = outcome_of(self.claimed.lease, None)
        if status is None and outcome is Outcome.SUCCEEDED:
            outcome, error = Outcome.ABANDONED, "the command was stopped"
        elif status and outcome is Outcome.SUCCEEDED:
            how = f"signal {status - SIGNALLED}" if status > SIGNALLED else f"exit code {status}"
            outcome, error = Outcome.FAILED, how
        await self.claimed.record(outcome, error, self._now())


def job_parser(command: str, description: str, second: str, example: str) -> Parser:
    """Return a parser for a name, a second argument, and the options that both commands have."""
    parser = Parser(
        command,
        f"{description}\n\n{ENVIRONMENT}",
        f"durations are in seconds, or with a unit: 500ms, 30s, 5m, 2h, 1d\n\n{JOB_TABLE}\n\nexample: {example}",
        usage=f"fencelock {command} NAME {second} [options] -- COMMAND [ARGUMENT ...]",
    )
    parser.add_name(f"the job's name, and {second}", several=True)
    add_engine(parser)
    parser.add_argument(
        "--attempts",
        type=int,
        default=1,
        metavar="N",
        help="run a slot again, up to N times, if it fails or its worker dies (1)",
    )
    add_hold_options(parser)
    parser.set_defaults(foreground=True, no_wait=True, conflict_exit_code=0)
    return parser


def parse_job(parser: Parser, argv: list[str], example: str) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the options, the words after the name, and the command. Exit if the -- or the command is missing."""
    if "--" not in argv and not {"-h", "--help"} & set(argv):
        write_error(f"put -- before the command, as in `{example}`")
        leave(USAGE)
    options, command = parser.parse_command(argv, several=True)
    check_command(command, example)
    words = options.names[1:]
    options.names = options.names[:1]
    return options, words, command
