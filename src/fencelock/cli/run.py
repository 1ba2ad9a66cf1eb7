"""`fencelock run NAME … -- COMMAND …`: run a command while holding a lock."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, NoReturn

from fencelock.cli.child import Child
from fencelock.cli.codes import LOST, NOT_ACQUIRED, NOT_FOUND, SIGNALLED, TABLE, USAGE
from fencelock.cli.errors import explain, write_error
from fencelock.cli.options import Parser, add_engine, engine_url, seconds
from fencelock.cli.signals import TERMINATING, Signals
from fencelock.cli.watchdog import Watchdog

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from fencelock.cli.waiting import InterruptibleRuntime
    from fencelock.core.client import Client
    from fencelock.core.engine import Engine
    from fencelock.core.lease import BaseLease
    from fencelock.primitives.lock import LockFactory

RELEASE_TIMEOUT = 5.0
"""Seconds for the release after the command has ended. An unreachable engine must not delay the exit code for longer; the
lease expires by itself."""

MIN_RELEASE_TIMEOUT = 0.1
CLOSE_TIMEOUT = 0.5

DESCRIPTION = """\
Run a command while holding a lock. The command gets FENCELOCK_NAME,
FENCELOCK_TOKEN (the fencing token), FENCELOCK_ID (what fences compare besides
the token) and FENCELOCK_OWNER in its environment. No shell is involved. Signals
are passed on. If the lock is about to be lost, the command's whole process
group gets SIGTERM with a third of the ttl left, and SIGKILL in time to be gone
when the lease ends by this machine's clock."""

EXAMPLE = "fencelock run nightly-report --ttl 30 --no-wait -- ./report.sh --all"


def parser() -> Parser:
    """Return the parser of the arguments before the `--`."""
    parser = Parser(
        "run",
        DESCRIPTION,
        f"durations are in seconds, or with a unit: 500ms, 30s, 5m, 2h, 1d\n\n{TABLE}\n\nexample: {EXAMPLE}",
        usage="fencelock run NAME [options] -- COMMAND [ARGUMENT ...]",
    )
    parser.add_name()
    add_engine(parser)
    parser.add_argument(
        "--ttl", type=_ttl, default=30.0, help="others may have the lock so long after this process died (30)"
    )
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument("--timeout", type=seconds, help="give up after waiting so long; by default, wait for ever")
    waiting.add_argument("--no-wait", action="store_true", help="give up at once if the lock is not free")
    parser.add_argument(
        "--max-hold", type=seconds, metavar="TIME", help="stop the command after so long even if all is well"
    )
    parser.add_argument("--owner", help="the label that others see (host:pid)")
    parser.add_argument(
        "--purpose",
        choices=("efficiency", "correctness"),
        default="efficiency",
        help="correctness: refuse an engine whose tokens could repeat after a failure",
    )
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("--verbose", action="store_true", help="say on stderr what happens to the lock")
    loudness.add_argument("--quiet", action="store_true", help="do not say that the lock was not free")
    return parser


def _ttl(text: str) -> float:
    """Return a ttl; warn if it is above one hour and has no unit, as somebody may have meant milliseconds."""
    ttl = seconds(text)
    if text.strip()[-1:].isdigit():
        from fencelock.core.validation import LONG_TTL, long_ttl

        if ttl > LONG_TTL:
            write_error(long_ttl(ttl))
    return ttl


def main(argv: list[str]) -> NoReturn:
    """Run the command and exit. os._exit skips the interpreter's shutdown, which takes as long as the locking."""
    split = argv.index("--") if "--" in argv else None
    reader = parser()
    options, unknown = reader.parse_known_named(argv[:split])
    if unknown and split is None and not unknown[0].startswith("-"):
        write_error(f"put -- before the command: {_with_dashes(argv, unknown)}")
        _exit(USAGE)
    if unknown:
        reader.error(f"unrecognized arguments: {' '.join(unknown)}")
    command = [] if split is None else argv[split + 1 :]
    if not command:
        write_error(f"a command must follow after --, as in `{EXAMPLE}`; see fencelock run --help")
        _exit(USAGE)
    if not command[0]:
        write_error("the command is empty; is a variable in it not set?")
        _exit(NOT_FOUND)
    for fd in (0, 1, 2):
        # The next open() would get the number of a closed standard stream. /dev/null takes its place until exec.
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    child = Child(command)
    watchdog = Watchdog(child)
    signals = Signals()
    try:
        code = _run(options, child, watchdog, signals)
    except Exception as error:
        if os.environ.get("FENCELOCK_DEBUG"):
            import traceback

            traceback.print_exc()
        outcome = "was killed" if child.started else f"was not started, as {options.name!r} was not acquired"
        code = explain(error, f"; the command {outcome}")
        if child.started:
            child.send(signal.SIGKILL)
    watchdog.dismiss()
    if not child.started:
        child.dismiss()
    _exit(code)


def _with_dashes(argv: list[str], command: list[str]) -> str:
    """Return the line with -- in its place, or the general form if argparse took parts of the command for options."""
    if argv[-len(command) :] != command:
        return "fencelock run NAME [options] -- COMMAND [ARGUMENT ...]"
    import shlex

    return f"fencelock run {shlex.join(argv[: -len(command)])} -- {shlex.join(command)}"


def _exit(code: int) -> NoReturn:
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(code)


def _run(options: argparse.Namespace, child: Child, watchdog: Watchdog, signals: Signals) -> int:
    from fencelock.cli.waiting import Interrupted, InterruptibleRuntime
    from fencelock.core import log
    from fencelock.core.client import Client
    from fencelock.core.lease import BaseLease
    from fencelock.core.urls import open_engine, shown
    from fencelock.core.validation import check_name
    from fencelock.errors import GuaranteeUnavailable
    from fencelock.model import TokenGuarantee
    from fencelock.primitives.lock import LockFactory

    def on_lost(*_: object) -> None:
        signals.wake()

    def write_warning(logger: str, level: int, message: str) -> None:
        if level >= log.WARNING and logger != "lease" and not options.quiet:  # _lost() reports a loss
            write_error(message)

    log.sink = write_warning
    runtime = InterruptibleRuntime(signals)
    url = engine_url(options)
    engine = open_engine(runtime, url, check_name(options.namespace, "a namespace"))
    if options.verbose:
        write_error(f"engine {shown(url, engine)}")
    if engine.traits.guarantee is TokenGuarantee.MEMORY:
        raise GuaranteeUnavailable("locks in memory end with the process: no two `fencelock run` would see each other")
    client = Client(runtime, engine, BaseLease, ttl=options.ttl, owner=options.owner, on_lost=on_lost)
    mutex = LockFactory(
        client,
        options.name,
        timeout=0.0 if options.no_wait else options.timeout,
        max_hold=options.max_hold,
        purpose=options.purpose,
    )
    try:
        lease = _acquire(runtime, client, mutex, options)
    except Interrupted as interrupted:
        return SIGNALLED + interrupted.number
    if lease is None:
        _close_engine(engine)
        return NOT_ACQUIRED
    for number in signals.take():  # other signals are only for a running command
        if number in TERMINATING:
            _release(lease, runtime.now)
            return SIGNALLED + number
    code = _hold(options, child, watchdog, signals, runtime, lease)
    if code != LOST:
        _close_engine(engine)
    return code


def _acquire(
    runtime: InterruptibleRuntime, client: Client[BaseLease], mutex: LockFactory[BaseLease], options: argparse.Namespace
) -> BaseLease | None:
    from fencelock.errors import LockTimeout
    from fencelock.runtime.blocking import run_sync

    try:
        with runtime:
            if options.verbose and not options.no_wait:
                if (lease := run_sync(mutex.try_acquire())) is not None:
                    return lease
                write_error(f"{_held(client, mutex.name)}; waiting")
            return run_sync(mutex.acquire())
    except LockTimeout as error:  # its message names the holder
        if not options.quiet:
            write_error(f"{error}; {'come back later, or wait with --timeout' if options.no_wait else 'wait longer'}")
        return None


def _held(client: Client[BaseLease], name: str) -> str:
    from fencelock.cli.show import held, printable
    from fencelock.errors import FencelockError
    from fencelock.runtime.blocking import run_sync

    try:
        snapshot = run_sync(client.inspect(name))
    except FencelockError:
        return f"{name!r} is not free"
    who = ", ".join(f"{printable(holder.owner)} (token {holder.token}{held(holder)})" for holder in snapshot.holders)
    line = f", with {len(snapshot.waiters)} in line" if snapshot.waiters else ""
    return f"{name!r} is held by {who or 'nobody any more'}{line}"


def _hold(
    options: argparse.Namespace,
    child: Child,
    watchdog: Watchdog,
    signals: Signals,
    runtime: InterruptibleRuntime,
    lease: BaseLease,
) -> int:
    from fencelock.cli.supervise import Supervisor

    if options.verbose:
        write_error(f"holding {lease.name!r} with token {lease.token}")
    supervisor = Supervisor(lease, child, watchdog, signals, runtime.now, options.max_hold)
    if lease.is_lost():  # this process was stopped meanwhile; from here on the watchdog covers that
        return _lost(lease, runtime.now, "was not started")
    child.start(
        {
            "FENCELOCK_NAME": lease.name,
            "FENCELOCK_TOKEN": str(lease.token),
            "FENCELOCK_ID": lease.id,
            "FENCELOCK_OWNER": lease.owner,
        }
    )
    all_ended = supervisor.watch()
    watchdog.dismiss()  # before the release, which may last longer than the watchdog's deadline
    child.give_back_foreground()
    if not all_ended:
        write_error("a process of the command could not be killed: it runs as another user, or hangs in the kernel")
    if not supervisor.ended_by_itself:
        return _lost(lease, runtime.now, "was stopped")
    assert child.status is not None
    if lease.is_lost() or not _release(lease, runtime.now):
        write_error(f"{_loss(lease)}; the command ended with code {child.status}")
        return LOST
    if (failure := child.failure()) is not None:
        write_error(failure[1])
        return failure[0]
    return child.status


def _close_engine(engine: Engine) -> None:
    """Close the connections within a bounded time: servers log connections that end without a close."""
    from threading import Thread

    from fencelock.errors import FencelockError
    from fencelock.runtime.blocking import run_sync

    def close() -> None:
        with suppress(FencelockError):
            run_sync(engine.close())

    thread = Thread(target=close, daemon=True)
    thread.start()
    thread.join(CLOSE_TIMEOUT)


def _loss(lease: BaseLease) -> str:
    if lease.reason is None and lease._due == inf:
        return f"the lease on {lease.name!r} (token {lease.token}) was held for as long as --max-hold allows"
    if lease.reason is None:
        why = "" if lease._trouble is None else f" ({lease._trouble})"
        return f"the lease on {lease.name!r} (token {lease.token}) could not be renewed in time{why}"
    return lease._how_lost()


def _lost(lease: BaseLease, now: Callable[[], float], outcome: str) -> int:
    """Release what may be left of the lease, then report the loss (the release may find its cause), then the warnings."""
    later: list[str] = []
    _release(lease, now, later.append)
    write_error(f"{_loss(lease)}; the command {outcome}")
    for warning in later:
        write_error(warning)
    return LOST


def _release(lease: BaseLease, now: Callable[[], float], warn: Callable[[str], None] = write_error) -> bool:
    """Release within a bounded time; return False if the lease no longer held the lock. A failure is only a warning."""
    from threading import Thread

    from fencelock.errors import FencelockError
    from fencelock.runtime.blocking import run_sync

    answers: list[bool] = []
    errors: list[str] = []

    def release() -> None:
        try:
            answers.append(run_sync(lease._release()))
        except FencelockError as error:
            errors.append(str(error))

    thread = Thread(target=release, daemon=True)
    thread.start()
    thread.join(min(max(lease.deadline - now(), MIN_RELEASE_TIMEOUT), RELEASE_TIMEOUT))
    if answers:
        return answers[0]
    warn(errors[0] if errors else f"{lease.name!r} could not be released; it runs out within {lease.ttl:g} s")
    return True
