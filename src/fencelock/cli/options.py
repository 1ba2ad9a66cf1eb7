"""The argument parser and the options that the commands share."""

from __future__ import annotations

import argparse
import os
from math import isfinite
from typing import TYPE_CHECKING

from fencelock.cli.codes import NOT_FOUND, USAGE
from fencelock.cli.errors import log_to_stderr, write_error, write_output

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fencelock.api.sync import Locks

WIDTH = 78
"""Columns of the help."""

PURPOSES = ("efficiency", "correctness")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter with a fixed width: without it argparse imports shutil (5 ms)."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=WIDTH)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the exit code for wrong arguments."""

    def __init__(self, command: str, usage: str, description: str, example: str, codes: str) -> None:
        super().__init__(
            prog=f"fencelock {command}",
            usage=f"fencelock {command} {usage}",
            description=f"example: {example}\n\n{description}",
            epilog=f"exit codes:\n{codes}",
            allow_abbrev=False,
            formatter_class=_Formatter,
        )
        self.example = example
        self.set_defaults(names=[], name=[])

    def error(self, message: str) -> None:  # type: ignore[override]
        """Write the error as one line and exit."""
        write_error(f"{message}; see {self.prog} --help")
        self.exit(USAGE)

    def add_name(self, what: str = "the lock's name") -> None:
        """Add the lock's name as an argument, and as the option --name for a name that begins with a dash."""
        self.add_argument("names", metavar="NAME", nargs="*", help=what)
        self.add_argument("--name", action="append", metavar="NAME", help="a name that begins with a dash: --name=-x")

    def add_url(self, what: str) -> None:
        """Add the option --url."""
        self.add_argument("--url", help=f"{what} (default: $FENCELOCK_URL, where a URL with a password belongs)")

    def add_engine(self, *, json: bool = False) -> None:
        """Add the options that select the engine and the namespace; `json` for a command that prints what is there."""
        self.add_url("the engine")
        self.add_argument("--namespace", default="fencelock", help="keeps applications on one engine apart (fencelock)")
        if json:
            self.add_argument("--json", action="store_true", help="for programs: the keys are in docs/cli.md")

    def add_hold(self) -> None:
        """Add the options of a command that holds a lock."""
        self.add_engine()
        self.add_argument("--ttl", type=_ttl, default=30.0, help="others get the lock so long after a crash (30)")
        add_time(self, "--max-hold", None, "stop the command after so long even if all is well")
        self.add_argument("--owner", help="the label that others see (host:pid)")
        self.add_argument(
            "--purpose",
            choices=PURPOSES,
            default=PURPOSES[0],
            help="correctness: refuse engines whose tokens may repeat",
        )
        loudness = self.add_mutually_exclusive_group()
        loudness.add_argument("-v", "--verbose", action="store_true", help="say on stderr what happens to the lock")
        loudness.add_argument("-q", "--quiet", action="store_true", help="no warnings, nor that the lock was not free")
        self.epilog = f"TIME and TTL are in seconds, or have a unit: 500ms, 30s, 5m, 2h, 1d\n\n{self.epilog}"

    def parse(self, argv: list[str], *, least: int = 0, most: int | None = 0) -> argparse.Namespace:
        """Return the options, with at least and at most so many words in `names`, and the first of them in `name`."""
        options, rest = self.parse_known_args(argv)
        options.names = [*options.name, *options.names, *rest]  # argparse leaves the words that follow an option
        for word in rest:
            if word.startswith("-"):
                hint = did_you_mean(word.partition("=")[0], self._option_string_actions)
                dash = "; a name that begins with a dash is given as --name=-x"
                self.error(f"there is no option {word}{hint or dash * ('--name' in self._option_string_actions)}")
        if len(options.names) < least:
            self.error("the lock's NAME is missing")
        if most is not None and len(options.names) > most:
            self.error(f"unrecognized arguments: {' '.join(options.names[most:])}")
        options.name = next(iter(options.names), "")
        return options

    def parse_name(self, argv: list[str]) -> argparse.Namespace:
        """Return the options with one `name`."""
        return self.parse(argv, least=1, most=1)

    def parse_command(
        self, argv: list[str], *, most: int | None = 1, dashes: bool = False
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, and the command that follows them: after the first --, else after the name.

        Exit if there is no command, or no -- although `dashes` demands it.
        """
        if dashes and not {"--", "-h", "--help"} & set(argv):
            self.error(f"put -- before the command, as in `{self.example}`")
        start = argv.index("--") if "--" in argv else len(argv) if dashes else self._command_start(argv)
        options, command = self.parse(argv[:start], least=1, most=most), argv[start:]
        if command[:1] == ["--"]:
            del command[0]
        elif any(word.startswith("--") and word.partition("=")[0] in self._option_string_actions for word in command):
            import shlex

            self.error(
                "an option in the command may be one of ours; put -- before the command: "
                f"{self.prog} {shlex.join(argv[:start])} -- {shlex.join(command)}"
            )
        if not command:
            self.error(f"a command must follow, as in `{self.example}`")
        if not command[0]:
            write_error("the command is empty; is a variable in it not set?")
            self.exit(NOT_FOUND)
        return options, command

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


def add_time(to: argparse._ActionsContainer, names: str, default: float | None, help: str) -> None:
    """Add an option that takes a duration to a parser, or to a group of one."""
    to.add_argument(*names.split(), type=seconds, default=default, metavar="TIME", help=help)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a guess of what was meant, or "".

    >>> did_you_mean("--timeot", ["--ttl", "--timeout"])
    ' (did you mean --timeout?)'
    """
    if word == "--wait" and "--timeout" in known:  # of flock
        return " (did you mean --timeout?)"
    from difflib import get_close_matches  # the import takes 3 ms, and only a wrong word needs it

    return next((f" (did you mean {near}?)" for near in get_close_matches(word, known, n=1)), "")


def connect(options: argparse.Namespace, owner: str | None = None) -> Locks:
    """Return a client for the engine that the options select; raise EngineUnavailable if its database does not exist."""
    from fencelock.api.sync import connect

    log_to_stderr()
    url = engine_url(options)
    check_file_exists(url)
    return connect(url, namespace=options.namespace, owner=owner)


def check_file_exists(url: str) -> None:
    """Raise EngineUnavailable for an engine's file that does not exist: a command that looks at locks creates none."""
    from fencelock.core.urls import module_of
    from fencelock.errors import EngineUnavailable

    path_of = getattr(module_of(url), "path_of", None)  # only an engine that keeps its locks in a file has it
    if path_of is not None and not os.path.exists(path := path_of(url)):
        raise EngineUnavailable(f"there is no database at {path}: no lock was used there yet, or the path is wrong")


def engine_url(options: argparse.Namespace, needed_for: str = "") -> str:
    """Return the engine's URL, which has no default if it is `needed_for` something.

    Raise InvalidURL, also for a password in --url: every user of the machine can read it in `ps`.
    """
    from fencelock.core.urls import redact, resolve
    from fencelock.errors import InvalidURL

    given: str | None = options.url
    if needed_for and not (given or os.environ.get("FENCELOCK_URL")):
        raise InvalidURL(
            f"{needed_for}: give its URL with --url, as in --url postgresql://app@db/shop, or in $FENCELOCK_URL if it has a "
            "password"
        )
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


def _ttl(text: str) -> float:
    """Return a ttl; warn if it is above one hour and has no unit, as somebody may have meant milliseconds."""
    ttl = seconds(text)
    if text.strip()[-1:].isdigit():
        from fencelock.core.validation import LONG_TTL, long_ttl

        if ttl > LONG_TTL:
            write_error(long_ttl(ttl))
    return ttl
