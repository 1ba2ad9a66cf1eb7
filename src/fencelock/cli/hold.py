"""Hold a lock while a command runs: what `fencelock run`, `elect`, `once` and `cron` share."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from fencelock.cli.child import Child
from fencelock.cli.codes import LOST, SIGNALLED
from fencelock.cli.errors import explain, log_to_stderr, write_error
from fencelock.cli.options import engine_url
from fencelock.cli.signals import TERMINATING, Signals
from fencelock.cli.watchdog import Watchdog

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Coroutine

    from fencelock.core.client import Client
    from fencelock.core.group import BaseGroup
    from fencelock.core.lease import BaseLease
    from fencelock.errors import FencelockError

    T = TypeVar("T")
    Held = BaseLease | BaseGroup
    Acquire = Callable[[Client[BaseLease]], Coroutine[Any, Any, Held | None]]

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


class Hold:
    """A command that runs while this process holds a lock."""

    def __init__(self, options: Namespace, command: list[str], *, foreground: bool = True) -> None:
        """Fork the command's process and the watchdog, before this process has any thread or connection."""
        for fd in (0, 1, 2):
            # The next open() would get the number of a closed standard stream. /dev/null takes its place until exec.
            try:
                os.fstat(fd)
            except OSError:
                os.open(os.devnull, os.O_RDWR)
        self._options = options
        self._foreground = foreground
        self._child = Child(command)
        self._watchdog = Watchdog(self._child)
        self.signals = Signals()

    def run(self, acquire: Acquire) -> Ended:
        """Run the command while holding what `acquire` returns. Errors become a line on stderr and an exit code."""
        child, names = self._child, self._options.names
        try:
            ended = self._run(acquire)
        except Exception as error:
            were = f"{', '.join(map(repr, names))} {'was' if len(names) == 1 else 'were'}"
            outcome = "was killed" if child.started else f"was not started, as {were} not acquired"
            ended = Ended(explain(error, f"; the command {outcome}"))
            if child.started:
                child.send(signal.SIGKILL)
        self._watchdog.dismiss()
        if not child.started:
            child.dismiss()
        return ended

    def start_again(self) -> NoReturn:
        """Become a new program in the same process: the next command is forked where there is no thread or connection."""
        os.execv(sys.executable, sys.orig_argv)

    def exit(self, code: int) -> NoReturn:
        """Exit without the interpreter's shutdown, which takes as long as the locking."""
        if sys.stdout is not None:
            sys.stdout.flush()
        os._exit(code)

    def environment(self, held: Held) -> dict[str, str]:
        """Return what the command finds in its environment; lists of several locks have a line for each.

        Readers and permits get an empty token and id, also in place of those of an outer `fencelock run`: no fence may
        take them for a lock's.
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

    def record(self, held: Held, status: int | None) -> None:
        """Record how a job's command ended, before the release; None if it was stopped, or not started."""

    def _run(self, acquire: Acquire) -> Ended:
        from fencelock.cli.waiting import Interrupted, InterruptibleRuntime
        from fencelock.core.client import Client
        from fencelock.core.lease import BaseLease
        from fencelock.core.urls import open_engine, shown
        from fencelock.core.validation import check_name
        from fencelock.errors import GuaranteeUnavailable
        from fencelock.model import TokenGuarantee

        options, signals = self._options, self.signals
        log_to_stderr("lease", quiet=options.quiet)  # _lost() reports a loss
        runtime = InterruptibleRuntime(signals)
        url = engine_url(options)
        engine = open_engine(runtime, url, check_name(options.namespace, "a namespace"))
        if options.verbose:
            write_error(f"engine {shown(url, engine)}")
        if engine.traits.guarantee is TokenGuarantee.MEMORY:
            raise GuaranteeUnavailable(
                "locks in memory end with the process: no two `fencelock run` would see each other"
            )
        client = Client(
            runtime, engine, BaseLease, ttl=options.ttl, owner=options.owner, on_lost=lambda *_: signals.wake()
        )
        try:
            with runtime:
                held = self._acquire(acquire, client)
        except Interrupted as interrupted:
            return Ended(SIGNALLED + interrupted.number)
        if held is None:
            ended = Ended(options.conflict_exit_code)
        elif (number := next(filter(TERMINATING.__contains__, signals.take()), None)) is not None:
            self.record(held, None)
            _release(held)
            return Ended(SIGNALLED + number)
        else:
            ended = self._hold(held)
        if ended.code != LOST:
            bounded(engine.close(), CLOSE_TIMEOUT)  # servers log connections that end without a close
        return ended

    def _acquire(self, acquire: Acquire, client: Client[BaseLease]) -> Held | None:
        from fencelock.errors import LockTimeout
        from fencelock.runtime.blocking import run_sync

        options = self._options
        try:
            if options.verbose and not options.no_wait:
                _write_holders(client, options.names)
            return run_sync(acquire(client))
        except LockTimeout as error:  # its message names the holder
            advice = "come back later, or wait with --timeout" if options.no_wait else "wait longer"
            if not options.quiet:
                write_error(f"{error}; {advice}")
            return None

    def _hold(self, held: Held) -> Ended:
        from fencelock.cli.supervise import Supervisor

        options, child = self._options, self._child
        if options.verbose:
            for lease in held._leases():
                write_error(f"holding {lease.name!r} with token {lease.token}")
        supervisor = Supervisor(held, child, self._watchdog, self.signals, options.max_hold)
        if held.is_lost():  # this process was stopped meanwhile; from here on the watchdog covers that
            return _lost(held, "was not started")
        child.start(self.environment(held), foreground=self._foreground)
        all_ended = supervisor.watch()
        self._watchdog.dismiss()  # before the release, which may last longer than the watchdog's deadline
        child.give_back_foreground()
        if not all_ended:
            write_error("a process of the command could not be killed: it runs as another user, or hangs in the kernel")
        self.record(held, child.status if supervisor.ended_by_itself else None)
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


def _write_holders(client: Client[BaseLease], names: list[str]) -> None:
    """Write who holds the locks now."""
    from fencelock.cli.look import describe
    from fencelock.errors import FencelockError
    from fencelock.runtime.blocking import run_sync

    for name in names:
        with suppress(FencelockError):  # the acquire reports it
            for holder in run_sync(client.inspect(name)).holders:
                write_error(f"{name!r} is held by {describe(holder)}")


def bounded(work: Coroutine[Any, Any, T], timeout: float) -> T | FencelockError | None:
    """Return the result or the error of work in another thread, or None if it takes longer."""
    from threading import Thread

    from fencelock.errors import FencelockError
    from fencelock.runtime.blocking import run_sync

    results: list[T | FencelockError] = []

    def run() -> None:
        try:
            results.append(run_sync(work))
        except FencelockError as error:
            results.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    return results[0] if results else None


def time_left(held: Held) -> float:
    """Return how long the last requests for a lease may take, in seconds."""
    return min(max(held.deadline - held._client.runtime.now(), MIN_RELEASE_TIMEOUT), RELEASE_TIMEOUT)


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
    answer = bounded(held._release(), time_left(held))
    if isinstance(answer, bool):
        return answer
    warn(str(answer or f"{held.name!r} could not be released; it runs out within {held.ttl:g} s"))
    return True
