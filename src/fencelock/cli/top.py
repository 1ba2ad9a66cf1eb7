"""`fencelock` without a command: help, the version, or a hint."""

from __future__ import annotations

from fencelock.cli import COMMANDS
from fencelock.cli.codes import USAGE
from fencelock.cli.errors import write_error, write_output
from fencelock.cli.options import did_you_mean

HELP = """\
usage: fencelock COMMAND ...

Distributed locks that stay right when they break.

example: fencelock run nightly-report -- ./report.sh

commands:
{commands}

options:
  -h, --help  show this help message and exit
  --version   show the version and exit

The engine is the one that --url or $FENCELOCK_URL names, else a SQLite database
in the user's state folder. Put a URL with a password into $FENCELOCK_URL:
everybody on the machine can read the arguments of a process.
`fencelock COMMAND --help` explains a command and its exit codes.
"""


def top(argv: list[str]) -> int:
    """Handle arguments that name no command."""
    argument = argv[0] if argv else "--help"
    if argument in ("-h", "--help", "help"):
        write_output(HELP.format(commands="\n".join(f"  {name:<8}  {what}" for name, (_, what) in COMMANDS.items())))
        return 0
    if argument == "--version":
        from fencelock import __version__

        write_output(f"fencelock {__version__}\n")
        return 0
    if argument.startswith("-"):
        write_error(
            f"options come after the command, as in `fencelock run NAME {argument} ... -- COMMAND`; see fencelock --help"
        )
    else:
        guess = did_you_mean(argument, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        write_error(f"there is no command {argument!r}{guess}; see fencelock --help")
    return USAGE
