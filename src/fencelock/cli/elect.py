"""`fencelock elect NAME --value V -- COMMAND …`: run a command while leading, and again in the next term."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from fencelock.cli.codes import ELECT_CODES
from fencelock.cli.hold import Hold
from fencelock.cli.options import Parser

if TYPE_CHECKING:
    from fencelock.cli.hold import Held
    from fencelock.core.client import Client
    from fencelock.core.lease import BaseLease

MIN_TERM = 1.0
"""Seconds between the starts of two terms: a command that ends at once must not keep the engine busy."""

USAGE = "NAME [options] -- COMMAND [ARGUMENT ...]"

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


def elect(argv: list[str]) -> NoReturn:
    """Lead one term, then campaign again or exit."""
    import time

    from fencelock.core.clock import boottime

    parser = Parser("elect", USAGE, DESCRIPTION, EXAMPLE, ELECT_CODES)
    parser.add_name("the election's name")
    parser.add_argument("--value", default="", help="what others see of the leader, such as its address")
    parser.add_hold()
    parser.set_defaults(no_wait=False)
    options, command = parser.parse_command(argv)
    granted = boottime()

    async def stand(client: Client[BaseLease]) -> Held:
        from fencelock.primitives.election import BaseElection

        nonlocal granted
        election = BaseElection(client, options.name, options.value, max_hold=options.max_hold, purpose=options.purpose)
        term = await election.stand(None)
        assert term is not None
        granted = boottime()
        return term

    hold = Hold(options, command, foreground=False)
    ended = hold.run(stand)
    if ended.again and not hold.signals.restore():
        time.sleep(max(0.0, granted + MIN_TERM - boottime()))
        hold.start_again()
    hold.exit(ended.code)
