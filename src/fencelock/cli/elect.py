"""`fencelock elect NAME --value V -- COMMAND …`: run a command while leading, and again in the next term."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from fencelock.cli.codes import ELECT_TABLE
from fencelock.cli.hold import add_hold_options, check_command, hold, leave
from fencelock.cli.options import Parser, add_engine

if TYPE_CHECKING:
    from fencelock.cli.hold import Held
    from fencelock.core.client import Client
    from fencelock.core.lease import BaseLease

MIN_TERM = 1.0
"""Seconds between the starts of two terms: a command that ends at once must not keep the engine busy."""

DESCRIPTION = """\
Stand for election and run a command while leading. Others see the value as long
as this candidate leads. The command gets FENCELOCK_NAME, FENCELOCK_TOKEN (the
number of the term, which fences its writes), FENCELOCK_ID, FENCELOCK_OWNER and
FENCELOCK_VALUE in its environment. If the term is about to be lost, the command
is stopped as under `fencelock run`.

After a loss, and when the command ends with 0, the candidate stands again, at
the end of the queue, and starts the command in its next term. A command that
ends with another code ends the candidacy with that code. SIGTERM and SIGINT end
it, too: they are forwarded, and the candidate resigns when the command has
ended. While the engine cannot be reached, the candidate tries again."""

EXAMPLE = "fencelock elect scheduler --value http://web-7:8080 -- ./scheduler"


def parser() -> Parser:
    """Return the parser of the arguments before the `--`."""
    parser = Parser(
        "elect",
        DESCRIPTION,
        f"durations are in seconds, or with a unit: 500ms, 30s, 5m, 2h, 1d\n\n{ELECT_TABLE}\n\nexample: {EXAMPLE}",
        usage="fencelock elect NAME [options] -- COMMAND [ARGUMENT ...]",
    )
    parser.add_name("the election's name")
    parser.add_argument("--value", default="", help="what others see of the leader, such as its address")
    add_engine(parser)
    add_hold_options(parser)
    parser.set_defaults(no_wait=False, foreground=False)
    return parser


def main(argv: list[str]) -> NoReturn:
    """Lead one term, then campaign again or exit."""
    from fencelock.core.clock import boottime

    options, command = parser().parse_command(argv)
    check_command(command, EXAMPLE)
    granted = boottime()

    async def stand(client: Client[BaseLease]) -> Held:
        from fencelock.primitives.election import ElectionFactory

        nonlocal granted
        election = ElectionFactory(
            client, options.name, options.value, max_hold=options.max_hold, purpose=options.purpose
        )
        term = await election.stand(None)
        assert term is not None
        granted = boottime()
        return term

    ended, signals = hold(options, command, stand)
    if signals.restore() or not ended.again:
        leave(ended.code)
    import time

    time.sleep(max(0.0, granted + MIN_TERM - boottime()))
    # A new program in the same process: the next term's command is forked where there is no thread and no connection.
    os.execv(sys.executable, sys.orig_argv)
