"""Where a command's errors end: one line on stderr that says what to do next, and a documented exit code."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module

from fencelock.cli.codes import BUG, SIGNALLED, UNAVAILABLE, USAGE


def say(message: str) -> None:
    """Write one line to stderr, if there is one."""
    try:
        sys.stderr.write(f"fencelock: {message}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # closed or full: nobody listens, and the lock matters more


def guarded(command: str, arguments: list[str]) -> int:
    """Run a command; whatever goes wrong comes out as a line and a code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: a name may be more than a terminal can show
    try:
        code = import_module(f"fencelock.cli.{command}").main(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return int(code)
    except KeyboardInterrupt:
        return SIGNALLED + 2
    except BrokenPipeError:
        # `fencelock ls | head`: python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return SIGNALLED + 13
    except Exception as error:
        if os.environ.get("FENCELOCK_DEBUG"):
            import traceback

            traceback.print_exc()
        return explain(error)


def explain(error: Exception) -> int:
    """Say what happened and return the exit code for it."""
    from fencelock.errors import FencelockError

    if isinstance(error, FencelockError):
        say(_one_line(error))
        return USAGE if isinstance(error, ValueError) else UNAVAILABLE
    if isinstance(error, ValueError):
        say(_one_line(error))
        return USAGE
    say(f"a bug: {type(error).__name__}: {_one_line(error)}; FENCELOCK_DEBUG=1 shows where, please report it")
    return BUG


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
