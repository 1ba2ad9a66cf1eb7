"""The command line: `fencelock COMMAND ...`. Each command has its own module, which is imported when it is called.

Cron starts `fencelock run` thousands of times a day, so nothing is imported here that `run` does not need.
"""

import sys

COMMANDS = {
    "run": "run a command while holding a lock",
    "elect": "run a command while leading, and again in each term",
    "once": "run a command once for a slot, such as a day, in the whole fleet",
    "cron": "run a command once for each slot of a schedule, in the whole fleet",
    "jobs": "list the schedules: when they run next, and how they ended last",
    "ls": "list the locks that are held or waited for",
    "show": "show who holds a lock and who waits for it",
    "watch": "print a line for each change of a lock",
    "leader": "print the value of the leader of an election",
    "release": "take a lock away from its holder",
    "rebase": "move the fences of an application to a token",
    "schema": "print or make what an engine or a fence needs in a database",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command that the arguments name; return the exit code."""
    from fencelock.cli.errors import run_command

    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in COMMANDS:
        return run_command(arguments[0], arguments[1:])
    return run_command("top", arguments)
