"""The command line: `fencelock COMMAND ...`. The module of a command is imported when the command is called.

Cron starts `fencelock run` thousands of times a day, so nothing is imported here that `run` does not need.
"""

import sys

COMMANDS = {
    "run": ("run", "run a command while holding a lock"),
    "elect": ("elect", "run a command while leading, and again in each term"),
    "once": ("job", "run a command once for a slot, such as a day, in the whole fleet"),
    "cron": ("job", "run a command once for each slot of a schedule, in the whole fleet"),
    "jobs": ("look", "list the schedules: when they run next, and how they ended last"),
    "ls": ("look", "list the locks that are held or waited for"),
    "show": ("look", "show who holds a lock and who waits for it"),
    "watch": ("look", "print a line for each change of a lock"),
    "leader": ("look", "print the value of the leader of an election"),
    "release": ("look", "take a lock away from its holder"),
    "rebase": ("rebase", "move the fences of an application to a token"),
    "schema": ("schema", "print or make what an engine or a fence needs in a database"),
}
"""The module of each command, which has a function of the command's name, and what the command does."""


def main(argv: list[str] | None = None) -> int:
    """Run the command that the arguments name; return the exit code."""
    from fencelock.cli.errors import run_command

    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in COMMANDS:
        return run_command(COMMANDS[arguments[0]][0], arguments[0], arguments[1:])
    return run_command("top", "top", arguments)
