"""Output of the commands, and their errors: one line on stderr that says what to do next, and a documented exit code."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from io import TextIOWrapper

from fencelock.cli.codes import BUG, OUTPUT_FAILED, SIGNALLED, UNAVAILABLE, USAGE


def write_error(message: str) -> None:
    """Write one line to stderr, if it is open. Control characters of names and owners are escaped."""
    try:
        sys.stderr.write(f"fencelock: {escaped(message)}\n")
        sys.stderr.flush()
    except OSError:
        _forget(2)  # stderr cannot be written; the lock matters more than the message
    except (ValueError, AttributeError):
        pass  # closed


def log_to_stderr(skip: str | None = None, *, quiet: bool = False) -> None:
    """Write fencelock's own warnings to stderr, except those of the logger `skip`."""
    from fencelock.core import log

    def write(logger: str, level: int, message: str) -> None:
        if level >= log.WARNING and logger != skip and not quiet:
            write_error(message)

    log.sink = write


def escaped(text: str) -> str:
    """Return the text with control characters (escape sequences, changes of direction) replaced by their codes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: str) -> str:
    """Return a name or an owner for a terminal: unchanged, or quoted and escaped if it has control characters."""
    return text if text.isprintable() else ascii(text)


class OutputError(Exception):
    """Stdout cannot be written."""


def write_output(text: str) -> None:
    """Write all of the text to stdout, or raise OutputError."""
    if sys.stdout is None:
        raise OutputError("it is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(os.strerror(error.errno or 0)) from error


def run_command(module: str, command: str, arguments: list[str]) -> int:
    """Run a command and return its exit code; an error becomes one line on stderr and a code."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: any name can be printed in any encoding
    try:
        return int(getattr(import_module(f"fencelock.cli.{module}"), command)(arguments))
    except KeyboardInterrupt:
        return SIGNALLED + 2
    except BrokenPipeError:
        _forget(1)  # `fencelock ls | head`
        return SIGNALLED + 13
    except OutputError as error:
        _forget(1)
        write_error(f"the output cannot be written: {error}")
        return OUTPUT_FAILED
    except Exception as error:
        return explain(error)


def _forget(descriptor: int) -> None:
    # Python flushes the stream at exit. That would fail again and replace the exit code.
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def explain(error: Exception, outcome: str = "") -> int:
    """Write the error to stderr, followed by `outcome` unless the arguments were wrong; return the exit code."""
    from fencelock.errors import FencelockError

    if os.environ.get("FENCELOCK_DEBUG"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, FencelockError):
        if isinstance(error, ValueError):
            write_error(_one_line(error))
            return USAGE
        write_error(f"{_one_line(error)}{outcome}")
        return UNAVAILABLE
    write_error(f"a bug: {type(error).__name__}: {_one_line(error)}; FENCELOCK_DEBUG=1 shows where, please report it")
    return BUG


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
