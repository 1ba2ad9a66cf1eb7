"""The argument parser and the options that the commands share."""

from __future__ import annotations

import argparse
import os
from math import isfinite
from typing import TYPE_CHECKING

from fencelock.cli.codes import USAGE
from fencelock.cli.errors import log_to_stderr, write_error, write_output

if TYPE_CHECKING:
    from fencelock.api.sync import Locks

WIDEST = 80
"""Columns of the help at most: long lines are hard to read."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter with a fixed width: without it argparse imports shutil (5 ms)."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_width())


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the exit code for wrong arguments."""

    def __init__(self, command: str, description: str, epilog: str, usage: str | None = None) -> None:
        super().__init__(
            prog=f"fencelock {command}",
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_Formatter,
        )

    def error(self, message: str) -> None:  # type: ignore[override]
        """Write the error as one line and exit."""
        write_error(f"{message}; see {self.prog} --help")
        self.exit(USAGE)

    def add_name(self, what: str = "the lock's name", *, several: bool = False) -> None:
        """Add the lock's name as an argument, and as the option --name for a name that begins with a dash."""
        self.add_argument("names", metavar="NAME", nargs="*" if several else "?", default=[], help=what)
        self.add_argument(
            "--name", action="append", default=[], metavar="NAME", help="for a name that begins with a dash: --name=-x"
        )

    def parse_names(self, argv: list[str], *, several: bool = False) -> argparse.Namespace:
        """Return the options with `names`: one, or several."""
        options, rest = self.parse_known_args(argv)
        given = options.names if isinstance(options.names, list) else [options.names]
        unknown = [word for word in rest if word.startswith("-")]
        options.names = [*options.name, *given, *rest]  # argparse leaves the names that follow an option
        if unknown and options.names == unknown:
            self.error(f"there is no option {unknown[0]}; a name that begins with a dash is given as --name=-x")
        if not options.names:
            self.error("the lock's NAME is missing")
        if unknown := unknown or options.names[1:] * (not several):
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        options.name = options.names[0]
        return options

    def parse_command(self, argv: list[str], *, several: bool = False) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, and the command that follows them: after the first --, else after the name."""
        if "--" in argv:
            start = argv.index("--")
            command = argv[start + 1 :]
        else:
            start = self._command_start(argv)
            command = argv[start:]
            if any(word.startswith("--") and word.partition("=")[0] in self._option_string_actions for word in command):
                import shlex

                self.error(
                    "an option in the command may be one of ours; put -- before the command: "
                    f"{self.prog} {shlex.join(argv[:start])} -- {shlex.join(command)}"
                )
        return self.parse_names(argv[:start], several=several), command

    def _command_start(self, argv: list[str]) -> int:
        """Return the index of the first word after the name that is neither an option nor an option's value."""
        actions, named, skip = self._option_string_actions, False, False
        for index, word in enumerate(argv):
            if skip:
                skip = False
            elif word.startswith("-") and word != "-":
                action = actions.get(word)
                if action is None and (first := actions.get(word[:2])) is not None and first.nargs == 0:
                    action = actions.get(f"-{word[-1]}")  # -nE is -n -E
                skip = action is not None and action.nargs != 0
                named = named or word.partition("=")[0] == "--name"
            elif named:
                return index
            else:
                named = True
        return len(argv)

    def print_help(self, file: object = None) -> None:  # noqa: ARG002
        """Write the help to stdout."""
        write_output(self.format_help())


def _width() -> int:
    try:
        columns = int(os.environ.get("COLUMNS", "")) or os.get_terminal_size(1).columns
    except (OSError, ValueError):
        columns = 80
    return max(min(columns, WIDEST) - 2, 40)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the engine and the namespace."""
    parser.add_argument("--url", help="the engine (default: $FENCELOCK_URL, where a URL with a password belongs)")
    parser.add_argument("--namespace", default="fencelock", help="keeps applications on one engine apart (%(default)s)")


def add_look(parser: argparse.ArgumentParser) -> None:
    """Add the options of the commands that print what an engine has."""
    add_engine(parser)
    parser.add_argument("--json", action="store_true", help="for programs: the keys are in docs/cli.md")


def connect(options: argparse.Namespace, owner: str | None = None) -> Locks:
    """Return a client for the engine that the options select."""
    from fencelock.api.sync import connect

    log_to_stderr()
    return connect(engine_url(options), namespace=options.namespace, owner=owner)


def engine_url(options: argparse.Namespace) -> str:
    """Return the engine's URL. Raise InvalidURL for a password in --url: every user of the machine can read it in `ps`."""
    from fencelock.core.urls import redact, resolve
    from fencelock.errors import InvalidURL

    given: str | None = options.url
    url = resolve(given)
    if given is not None and redact(url) != url:
        raise InvalidURL(f"{redact(url)!r}: a password in an argument shows in `ps`; put the URL into $FENCELOCK_URL")
    return url


def seconds(text: str) -> float:
    """Return a duration: `10`, `1.5`, or with a unit: `500ms`, `30s`, `5m`, `2h`, `1d`."""
    number = text.strip().rstrip("mshd")
    unit = text.strip()[len(number) :] or "s"
    try:
        value = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration such as 10, 1.5, 500ms, 30s, 5m, 2h or 1d"
        ) from None
    if not isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return value
