"""Hold a lock while a command runs: what `fencelock run`, `elect`, `once` and `cron` share."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from fencelock.cli.child import Child
from fencelock.cli.codes import LOST, NOT_FOUND, SIGNALLED, USAGE
from fencelock.cli.errors import explain, log_to_stderr, write_error
from fencelock.cli.options import engine_url, seconds
from fencelock.cli.signals import TERMINATING, Signals
from fencelock.cli.watchdog import Watchdog

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine

    from fencelock.cli.options import Parser
    from fencelock.cli.waiting import InterruptibleRuntime
    from fencelock.core.client import Client
    from fencelock.core.group import BaseGroup
    from fencelock.core.lease import BaseLease
    from fencelock.errors import FencelockError

    T = TypeVar("T")
    Held = BaseLease | BaseGroup
    Acquire = Callable[[Client[BaseLease]], Coroutine[Any, Any, Held | None]]
    from fencelock.cli.job import CommandRun

RELEASE_TIMEOUT = 5.0
"""Seconds for the release after the command has ended. An unreachable engine must not delay the exit code for longer; the
lease expires by itself."""

MIN_RELEASE_TIMEOUT = 0.1
CLOSE_TIMEOUT = 0.5


class Ended(NamedTuple):
    """How it ended: the exit code, and whether an election goes on with the next term.

    It does if the term was lost or the command ended with 0, unless a signal asked the command to stop, or one of its
    processes could not be killed.
    """

    code: int
    again: bool = False


def add_hold_options(parser: Parser) -> None:
    """Add the options of a command that holds a lock."""
    parser.add_argument(
        "--ttl", type=_ttl, default=30.0, help="others may have the lock so long after this process died (30)"
    )
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
    loudness.add_argument(
        "--quiet", action="store_true", help="no warnings on stderr, and not that the lock was not free"
    )


def _ttl(text: str) -> float:
    """Return a ttl; warn if it is above one hour and has no unit, as somebody may have meant milliseconds."""
    ttl = seconds(text)
    if text.strip()[-1:].isdigit():
        from fencelock.core.validation import LONG_TTL, long_ttl

        if ttl > LONG_TTL:
            write_error(long_ttl(ttl))
    return ttl


def hold(
    options: argparse.Namespace, command: list[str], acquire: Acquire, job: CommandRun | None = None
) -> tuple[Ended, Signals]:
    """Run the command while holding what `acquire` returns. `job` records how it ended, before the release."""
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
        ended = _run(options, acquire, job, child, watchdog, signals)
    except Exception as error:
        names, were = ", ".join(map(repr, options.names)), "was" if len(options.names) == 1 else "were"
        outcome = "was killed" if child.started else f"was not started, as {names} {were} not acquired"
        ended = Ended(explain(error, f"; the command {outcome}"))
        if child.started:
            child.send(signal.SIGKILL)
    watchdog.dismiss()
    if not child.started:
        child.dismiss()
    return ended, signals


def leave(code: int) -> NoReturn:
    """Exit without the interpreter's shutdown, which takes as long as the locking."""
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(code)


def check_command(command: list[str], example: str) -> None:
    """Exit if there is no command."""
    if not command:
        write_error(f"a command must follow, as in `{example}`; see {' '.join(example.split()[:2])} --help")
        leave(USAGE)
    if not command[0]:
        write_error("the command is empty; is a variable in it not set?")
        leave(NOT_FOUND)


def _run(
    options: argparse.Namespace,
    acquire: Acquire,
    job: CommandRun | None,
    child: Child,
    watchdog: Watchdog,
    signals: Signals,
) -> Ended:
    from fencelock.cli.waiting import Interrupted, InterruptibleRuntime
    from fencelock.core.client import Client
    from fencelock.core.lease import BaseLease
    from fencelock.core.urls import open_engine, shown
    from fencelock.core.validation import check_name
    from fencelock.errors import GuaranteeUnavailable
    from fencelock.model import TokenGuarantee
    from fencelock.runtime.blocking import run_sync

    def on_lost(*_: object) -> None:
        signals.wake()

    def close() -> None:
        # Servers log connections that end without a close.
        _bounded(lambda: run_sync(engine.close()), CLOSE_TIMEOUT)

    log_to_stderr("lease", quiet=options.quiet)  # _lost() reports a loss
    runtime = InterruptibleRuntime(signals)
    url = engine_url(options)
    engine = open_engine(runtime, url, check_name(options.namespace, "a namespace"))
    if options.verbose:
        write_error(f"engine {shown(url, engine)}")
    if engine.traits.guarantee is TokenGuarantee.MEMORY:
        raise GuaranteeUnavailable("locks in memory end with the process: no two `fencelock run` would see each other")
    client = Client(runtime, engine, BaseLease, ttl=options.ttl, owner=options.owner, on_lost=on_lost)
    try:
        held = _acquire(options, acquire, runtime, client)
    except Interrupted as interrupted:
        return Ended(SIGNALLED + interrupted.number)
    if held is None:
        close()
        return Ended(options.conflict_exit_code)
    for number in signals.take():  # other signals are only for a running command
        if number in TERMINATING:
            _record(job, held, None)
            _release(held)
            return Ended(SIGNALLED + number)
    ended = _hold(options, job, child, watchdog, signals, held)
    if ended.code != LOST:
        close()
    return ended


def _acquire(
    options: argparse.Namespace, acquire: Acquire, runtime: InterruptibleRuntime, client: Client[BaseLease]
) -> Held | None:
    from fencelock.errors import LockTimeout
    from fencelock.runtime.blocking import run_sync

    try:
        with runtime:
            if options.verbose and not options.no_wait:
                _write_holders(client, options.names)
            return run_sync(acquire(client))
    except LockTimeout as error:  # its message names the holder
        if not options.quiet:
            write_error(f"{error}; {'come back later, or wait with --timeout' if options.no_wait else 'wait longer'}")
        return None


def _write_holders(client: Client[BaseLease], names: list[str]) -> None:
    """Write who holds the locks now."""
    from fencelock.cli.show import held, printable
    from fencelock.errors import FencelockError
    from fencelock.runtime.blocking import run_sync

    for name in names:
        with suppress(FencelockError):  # the acquire reports it
            snapshot = run_sync(client.inspect(name))
            who = ", ".join(f"{printable(it.owner)} (token {it.token}{held(it)})" for it in snapshot.holders)
            line = f", with {len(snapshot.waiters)} in line" if snapshot.waiters else ""
            if who:
                write_error(f"{name!r} is held by {who}{line}")


def _hold(
    options: argparse.Namespace,
    job: CommandRun | None,
    child: Child,
    watchdog: Watchdog,
    signals: Signals,
    held: Held,
) -> Ended:
    from fencelock.cli.supervise import Supervisor

    if options.verbose:
        for lease in held._leases():
            write_error(f"holding {lease.name!r} with token {lease.token}")
    supervisor = Supervisor(held, child, watchdog, signals, options.max_hold)
    if held.is_lost():  # this process was stopped meanwhile; from here on the watchdog covers that
        return _lost(held, "was not started")
    child.start(_environment(held) | (job.environment if job else {}), foreground=options.foreground)
    all_ended = supervisor.watch()
    watchdog.dismiss()  # before the release, which may last longer than the watchdog's deadline
    child.give_back_foreground()
    if not all_ended:
        write_error("a process of the command could not be killed: it runs as another user, or hangs in the kernel")
    _record(job, held, child.status if supervisor.ended_by_itself else None)
    if not supervisor.ended_by_itself:
        return _lost(held, "was stopped", again=all_ended and not supervisor.asked_to_stop)
    assert child.status is not None
    if held.is_lost() or not _release(held):
        write_error(f"{_loss(held)}; the command ended with code {child.status}")
        return Ended(LOST, again=not supervisor.asked_to_stop)
    if (failure := child.failure()) is not None:
        write_error(failure[1])
        return Ended(failure[0])
    return Ended(child.status, again=child.status == 0 and not supervisor.asked_to_stop)


def _record(job: CommandRun | None, held: Held, status: int | None) -> None:
    """Record how a job's command ended, within a bounded time; None if it was stopped or not started."""
    if job is not None:
        from fencelock.runtime.blocking import run_sync

        left = held.deadline - held._client.runtime.now()
        _bounded(lambda: run_sync(job.record(status)), min(max(left, MIN_RELEASE_TIMEOUT), RELEASE_TIMEOUT))


def _environment(held: Held) -> dict[str, str]:
    """Return what the command finds in its environment; lists of several locks have a line for each.

    Readers and permits get an empty token and id, also in place of those of an outer `fencelock run`: no fence may take
    them for a lock's.
    """
    from fencelock.model import Mode

    leases = held._leases()
    fenced = [lease for lease in leases if lease.mode is Mode.EXCLUSIVE]
    return {
        "FENCELOCK_NAME": "\n".join(lease.name for lease in leases),
        "FENCELOCK_TOKEN": "\n".join(str(lease.token) for lease in fenced),
        "FENCELOCK_ID": "\n".join(lease.id for lease in fenced),
        "FENCELOCK_OWNER": leases[0].owner,
        "FENCELOCK_MODE": leases[0].mode.value,
        "FENCELOCK_VALUE": leases[0]._grant.claim.value,
    }


def _bounded(work: Callable[[], T], timeout: float) -> T | FencelockError | None:
    """Return the result or the error of work in another thread, or None if it takes longer."""
    from threading import Thread

    from fencelock.errors import FencelockError

    results: list[T | FencelockError] = []

    def run() -> None:
        try:
            results.append(work())
        except FencelockError as error:
            results.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    return results[0] if results else None


def _loss(held: Held) -> str:
    """Return how it was lost, or is about to be; of several leases, that of the first to end."""
    lease = min(held._leases(), key=lambda lease: (lease.reason is None, lease.deadline))
    if lease.reason is None and lease._due == inf:
        return f"the lease on {lease.name!r} (token {lease.token}) was held for as long as --max-hold allows"
    if lease.reason is None:
        why = "" if lease._trouble is None else f" ({lease._trouble})"
        return f"the lease on {lease.name!r} (token {lease.token}) could not be renewed in time{why}"
    return lease._how_lost()


def _lost(held: Held, outcome: str, *, again: bool = True) -> Ended:
    """Release what may be left of the lease, then report the loss (the release may find its cause), then the warnings."""
    later: list[str] = []
    _release(held, later.append)
    write_error(f"{_loss(held)}; the command {outcome}")
    for warning in later:
        write_error(warning)
    return Ended(LOST, again)


def _release(held: Held, warn: Callable[[str], None] = write_error) -> bool:
    """Release within a bounded time; return False if the lease no longer held the lock. A failure is only a warning."""
    from fencelock.runtime.blocking import run_sync

    left = held.deadline - held._client.runtime.now()
    answer = _bounded(lambda: run_sync(held._release()), min(max(left, MIN_RELEASE_TIMEOUT), RELEASE_TIMEOUT))
    if isinstance(answer, bool):
        return answer
    warn(str(answer or f"{held.name!r} could not be released; it runs out within {held.ttl:g} s"))
    return True
