"""Where a command's errors end: one line on stderr that says what to do next, and a documented exit code."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from io import TextIOWrapper

from fencelock.cli.codes import BUG, SIGNALLED, UNAVAILABLE, UNWRITABLE, USAGE


def say(message: str) -> None:
    """Write one line to stderr, if there is one. What others put into the engine cannot move the cursor."""
    try:
        sys.stderr.write(f"fencelock: {escaped(message)}\n")
        sys.stderr.flush()
    except OSError:
        _forget(2)  # full: nobody listens, and the lock matters more
    except (ValueError, AttributeError):
        pass  # closed


def escaped(text: str) -> str:
    """Return the text with whatever a terminal would act on (escape sequences, changes of direction) as its code."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Unwritable(Exception):
    """Stdout does not take what there is to say."""


def put(text: str) -> None:
    """Write to stdout, all of it, or raise Unwritable."""
    if sys.stdout is None:
        raise Unwritable("it is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritable(os.strerror(error.errno or 0)) from error


def guarded(command: str, arguments: list[str]) -> int:
    """Run a command; whatever goes wrong comes out as a line and a code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: any name can be shown in any encoding
    try:
        return int(import_module(f"fencelock.cli.{command}").main(arguments))
    except KeyboardInterrupt:
        return SIGNALLED + 2
    except BrokenPipeError:
        _forget(1)  # `fencelock ls | head`
        return SIGNALLED + 13
    except Unwritable as error:
        _forget(1)
        say(f"the output cannot be written: {error}")
        return UNWRITABLE
    except Exception as error:
        if os.environ.get("FENCELOCK_DEBUG"):
            import traceback

            traceback.print_exc()
        return explain(error)


def _forget(descriptor: int) -> None:
    # Python would fail once more, with an exit code of its own, when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def explain(error: Exception, outcome: str = "") -> int:
    """Say what happened, and what came of it unless the arguments were wrong; return the exit code for it."""
    from fencelock.errors import FencelockError

    if isinstance(error, FencelockError):
        if isinstance(error, ValueError):
            say(_one_line(error))
            return USAGE
        say(f"{_one_line(error)}{outcome}")
        return UNAVAILABLE
    say(f"a bug: {type(error).__name__}: {_one_line(error)}; FENCELOCK_DEBUG=1 shows where, please report it")
    return BUG


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
