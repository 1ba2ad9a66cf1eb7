"""`fencelock run NAME … -- COMMAND …`: run a command while holding a lock, or several."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, NoReturn

from fencelock.cli.codes import NOT_ACQUIRED, RUN_CODES
from fencelock.cli.hold import Hold
from fencelock.cli.options import Parser, add_time

if TYPE_CHECKING:
    from fencelock.cli.hold import Held
    from fencelock.core.client import Client
    from fencelock.core.lease import BaseLease

USAGE = "NAME [NAME ...] [options] -- COMMAND [ARGUMENT ...]"

DESCRIPTION = """\
Run a command while holding a lock, or several: all or none of them. The command
gets FENCELOCK_NAME, FENCELOCK_TOKEN (the fencing token), FENCELOCK_ID (what
fences compare besides the token), FENCELOCK_OWNER and FENCELOCK_MODE in its
environment. No shell is involved. Signals are forwarded. If the lock is about
to be lost, the command's whole process group gets SIGTERM with a third of the
ttl left, and SIGKILL in time to be gone when the lease ends by this machine's
clock. The -- may be left out after a single name, unless the command has a --
or one of our long options among its own arguments."""

EXAMPLE = "fencelock run nightly-report --ttl 30 --no-wait -- ./report.sh --all"


def run(argv: list[str]) -> NoReturn:
    """Run the command and exit."""
    parser = Parser("run", USAGE, DESCRIPTION, EXAMPLE, RUN_CODES)
    parser.add_name("the lock's name; with several, the command runs when all are held")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--shared", action="store_true", help="a read lock: others that read may hold it, too")
    mode.add_argument("--limit", type=int, metavar="N", help="a semaphore: at most N hold it at the same time")
    waiting = parser.add_mutually_exclusive_group()
    add_time(waiting, "-w --timeout", None, "give up after waiting so long; by default, wait for ever")
    waiting.add_argument("-n", "--no-wait", action="store_true", help="give up at once if the lock is not free")
    parser.add_argument(
        "-E", "--conflict-exit-code", type=_code, default=NOT_ACQUIRED, metavar="N", help="exit code if not free (75)"
    )
    parser.add_hold()
    options, command = parser.parse_command(argv, most=None)
    names = list(dict.fromkeys(options.names))
    if options.limit is not None and len(names) > 1:
        parser.error("--limit takes one name; several names can be held alone or with --shared")

    async def acquire(client: Client[BaseLease]) -> Held:
        from fencelock.core.validation import check_limit
        from fencelock.model import Mode
        from fencelock.primitives.lock import BaseLock, WaitOptions

        mode = Mode.of(options.shared or options.limit is not None, options.limit)
        timeout = 0.0 if options.no_wait else options.timeout
        held_how = WaitOptions(timeout=timeout, max_hold=options.max_hold, purpose=options.purpose)
        if len(names) == 1:
            limit = None if options.limit is None else check_limit(options.limit, names[0])
            return await BaseLock(client, names[0], mode, limit, **held_how).acquire()
        from fencelock.core.group import BaseGroup
        from fencelock.primitives.multi import BaseMultiLock, modes_of

        read, write = (names, []) if options.shared else ([], names)
        return await BaseMultiLock(client, BaseGroup, modes_of((), read, write), **held_how).acquire()

    hold = Hold(options, command)
    hold.exit(hold.run(acquire).code)


def _code(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 255):
        raise ArgumentTypeError(f"{text!r} is not a number from 0 to 255")
    return int(text)
