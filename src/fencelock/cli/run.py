"""`fencelock run NAME … -- COMMAND …`: run a command while holding a lock, or several."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, NoReturn

from fencelock.cli.codes import NOT_ACQUIRED, TABLE
from fencelock.cli.hold import add_hold_options, check_command, hold, leave
from fencelock.cli.options import Parser, add_engine, seconds

if TYPE_CHECKING:
    from fencelock.cli.hold import Held
    from fencelock.core.client import Client
    from fencelock.core.lease import BaseLease

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


def parser() -> Parser:
    """Return the parser of the arguments before the `--`."""
    parser = Parser(
        "run",
        DESCRIPTION,
        f"durations are in seconds, or with a unit: 500ms, 30s, 5m, 2h, 1d\n\n{TABLE}\n\nexample: {EXAMPLE}",
        usage="fencelock run NAME [NAME ...] [options] -- COMMAND [ARGUMENT ...]",
    )
    parser.add_name("the lock's name; with several, the command runs when all are held", several=True)
    add_engine(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--shared", action="store_true", help="a read lock: others that read may hold it, too")
    mode.add_argument("--limit", type=int, metavar="N", help="a semaphore: at most N hold it at the same time")
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument(
        "-w", "--timeout", type=seconds, metavar="TIME", help="give up after waiting so long; by default, wait for ever"
    )
    waiting.add_argument("-n", "--no-wait", action="store_true", help="give up at once if the lock is not free")
    parser.add_argument(
        "-E",
        "--conflict-exit-code",
        type=_exit_code,
        default=NOT_ACQUIRED,
        metavar="CODE",
        help="exit with this code if the lock was not free (75)",
    )
    add_hold_options(parser)
    parser.set_defaults(foreground=True)
    return parser


def _exit_code(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 255):
        raise ArgumentTypeError(f"{text!r} is not a number from 0 to 255")
    return int(text)


def main(argv: list[str]) -> NoReturn:
    """Run the command and exit."""
    reader = parser()
    options, command = reader.parse_command(argv, several=True)
    check_command(command, EXAMPLE)
    names = list(dict.fromkeys(options.names))
    if options.limit is not None and len(names) > 1:
        reader.error("--limit takes one name; several names can be held alone or with --shared")

    async def acquire(client: Client[BaseLease]) -> Held:
        from fencelock.core.validation import check_limit
        from fencelock.model import Mode
        from fencelock.primitives.lock import LockFactory, SharedOptions

        mode = Mode.of(options.shared or options.limit is not None, options.limit)
        timeout = 0.0 if options.no_wait else options.timeout
        held_how = SharedOptions(timeout=timeout, max_hold=options.max_hold, purpose=options.purpose)
        if len(names) == 1:
            limit = None if options.limit is None else check_limit(options.limit, names[0])
            return await LockFactory(client, names[0], mode, limit, **held_how).acquire()
        from fencelock.core.group import BaseGroup
        from fencelock.primitives.multi import MultiLockFactory, modes_of

        read, write = (names, []) if options.shared else ([], names)
        return await MultiLockFactory(client, BaseGroup, modes_of((), read, write), **held_how).acquire()

    ended, _ = hold(options, command, acquire)
    leave(ended.code)
