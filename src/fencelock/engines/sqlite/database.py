"""The connection to a fencelock database: transactions, tokens, checkpoints, forks, and the translation of errors.

Commits are not synced (WAL, synchronous=NORMAL): a crash of a process loses nothing, and a power cut voids every claim
anyway. Tokens must not repeat even then, so a synced transaction reserves the tokens of the next minutes ahead.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from itertools import count
from threading import RLock
from typing import TypeVar, TypeVarTuple

from fencelock.core.clock import boot_id, wall_us
from fencelock.engines.sqlite.opening import open_database
from fencelock.engines.sqlite.paths import make_default_folder
from fencelock.errors import ClientClosed, EngineUnavailable
from fencelock.model import TOKEN_MAX

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RESERVE_US = 300_000_000
COMMITS_PER_CHECKPOINT = 1000
MAX_WAL_FRAMES = 4000
MAX_WAL_BYTES = 4_000_000
TRUNCATE_TIMEOUT_MS = 100
YIELDS = 20
"""How often to yield the CPU before sleeping: a transaction is shorter than the shortest sleep (about 70 µs)."""
BUSY_PAUSES = (0.0001, 0.0002, 0.0005, 0.001, 0.002)
FORK_TIMEOUT = 2.0
CLOSE_TIMEOUT = 1.0
FILE_CHECK_INTERVAL = 0.1
"""Seconds between checks that the path still names the open file."""

_ADVICE = {
    sqlite3.SQLITE_READONLY: "it can only be read; make the file and its folder writable for this user",
    sqlite3.SQLITE_FULL: "the disk is full; free some space",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; does its folder exist, and may this user write there?",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite database; fencelock does not touch it. Choose another path",
    sqlite3.SQLITE_CORRUPT: "it is damaged; stop all users of it and move it away, tokens go on from the clock",
    sqlite3.SQLITE_IOERR: "the disk failed",
    sqlite3.SQLITE_PERM: "permission was denied",
}


class DatabaseBusy(Exception):
    """The step would take longer than its timeout: another connection writes, or the step needs a sync."""


class NeedsReserve(Exception):
    """All reserved tokens are used up."""


class Database:
    """One connection, opened on first use; the threads of a client share it under one mutex."""

    def __init__(self, path: str, now: Callable[[], float], *, make_folder: bool = False) -> None:
        self.path = path
        self._make_folder = make_folder
        self.boot = boot_id()
        self.now = now
        self._mutex = RLock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        """Device and inode of the open file."""
        self._opening = False
        self._check_file_at = 0.0
        self._commits = 0
        self._closed = False

    def write(self, timeout: float, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        """Run a step in a transaction; raise DatabaseBusy if that would take longer than `timeout` seconds.

        With timeout 0 it never waits and never syncs, so that an event loop can call it.
        """
        return self._run(timeout, self._write, timeout, self._transact, step, *args)

    def write_synced(self, timeout: float, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        """Run a step like `write` and sync the commit, so that a power cut does not undo it."""
        return self._run(timeout, self._write, timeout, self._transact_synced, step, *args)

    def read(self, timeout: float, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        """Run a step that only reads. It never waits for writers."""
        return self._run(timeout, self._read, step, *args)

    def close(self) -> None:
        """Close the connection. The wait is bounded, as the interpreter may be shutting down."""
        self._closed = True
        self._check_file_at = 0.0
        if self._mutex.acquire(timeout=CLOSE_TIMEOUT):
            try:
                self._disconnect()
            finally:
                self._mutex.release()

    def before_fork(self) -> None:
        """Close the connection before the fork: SQLite forbids even closing it in the child."""
        if self._mutex.acquire(timeout=FORK_TIMEOUT):
            self._disconnect()

    def after_fork_in_parent(self) -> None:
        """Release the mutex. Both processes open a new connection when they need one."""
        try:
            self._mutex.release()
        except RuntimeError:
            pass  # a transaction lasted for all of FORK_TIMEOUT

    def after_fork(self) -> None:
        """In the child, replace the mutex and drop the parent's connection without closing it."""
        _unclosable.append(self._connection)  # None, unless a transaction lasted for all of FORK_TIMEOUT
        self._connection = None
        self._mutex = RLock()

    def mint(self, cursor: sqlite3.Cursor) -> int:
        """Return the next token, in a step of a transaction. Raise NeedsReserve if the reserve is used up.

        It is above every earlier token and, unless the clock goes back, above the tokens of a lost database too.
        """
        last, reserved, boot = cursor.execute("SELECT token, reserved, boot FROM counter").fetchone()
        token: int = max(last + 1, wall_us())
        if token > reserved or boot != self.boot:
            raise NeedsReserve
        cursor.execute("UPDATE counter SET token = ?", (token,))
        return token

    # ------------------------------------------------------------------ under the mutex

    def _run(self, timeout: float, action: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run an action under the mutex, with an open connection."""
        mutex = self._mutex
        try:
            self._enter(timeout)
            return action(*args)
        except sqlite3.Error as error:
            raise self._translate(error) from error
        finally:
            try:
                mutex.release()  # inline: Ctrl-C could interrupt the call of a helper before its first line
            except RuntimeError:
                pass  # DatabaseBusy: this thread did not get the mutex

    def _enter(self, timeout: float) -> None:
        """Take the mutex and open the connection if necessary.

        The caller releases the mutex in any case: Ctrl-C may interrupt the instruction after `acquire`.
        """
        if not (self._mutex.acquire(True, timeout) if timeout else self._mutex.acquire(False)):
            raise DatabaseBusy
        if self._connection is None or self.now() >= self._check_file_at:
            self._check_or_open(timeout)

    def _read(self, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        # A new cursor: a signal handler or a finalizer may read in the middle of a transaction of this thread, and on the
        # transaction's cursor it would end that one's query.
        return step(self._cursor.connection.cursor(), *args)

    def _write(self, timeout: float, transact: Callable[[float, *Ts], T], *args: *Ts) -> T:
        if not timeout and self._commits >= COMMITS_PER_CHECKPOINT:
            raise DatabaseBusy
        try:
            result = transact(timeout, *args)
        except NeedsReserve:
            self._transact_synced(timeout, self._reserve_tokens)
            result = transact(timeout, *args)
        if timeout and self._commits >= COMMITS_PER_CHECKPOINT:
            self._checkpoint()
        return result

    def _transact(self, timeout: float, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        cursor = self._cursor
        if cursor.connection.in_transaction:
            raise self._reentered()
        try:  # begins before BEGIN: Ctrl-C may interrupt right after it
            self._begin(cursor, timeout)
            result = step(cursor, *args)
            cursor.execute("COMMIT")
        except BaseException:
            if cursor.connection.in_transaction:
                cursor.execute("ROLLBACK")
            raise
        self._commits += 1
        return result

    def _transact_synced(self, timeout: float, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        if not timeout:
            raise DatabaseBusy
        connection = self._cursor.connection
        if connection.in_transaction:
            raise self._reentered()
        connection.execute("PRAGMA synchronous = FULL")
        try:
            return self._transact(timeout, step, *args)
        finally:
            connection.execute("PRAGMA synchronous = NORMAL")

    def _begin(self, cursor: sqlite3.Cursor, timeout: float) -> None:
        """Begin; repeat that until the timeout. SQLite's own busy handler sleeps a millisecond or more, which is too long."""
        end = time.monotonic() + timeout
        for tries in count():
            try:
                cursor.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if time.monotonic() >= end:
                    raise DatabaseBusy from error
            if tries < YIELDS:
                _yield_cpu()
            else:
                time.sleep(BUSY_PAUSES[min(tries - YIELDS, len(BUSY_PAUSES) - 1)])

    def _checkpoint(self) -> None:
        """Move the log into the database, as far as readers allow. A failure is ignored; the next checkpoint repeats it."""
        self._commits = 0
        connection = self._cursor.connection
        try:
            frames = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
            if frames > MAX_WAL_FRAMES:
                # The log restarts only when all of it was moved, which writers without a pause prevent: block them
                # until their last commits are moved.
                connection.execute(f"PRAGMA busy_timeout = {TRUNCATE_TIMEOUT_MS}")
                try:
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                finally:
                    connection.execute("PRAGMA busy_timeout = 0")
        except sqlite3.Error:
            pass

    def _reserve_tokens(self, cursor: sqlite3.Cursor) -> None:
        """Reserve tokens for the next minutes, and delete expired claims, records and rates."""
        token, reserved, boot = cursor.execute("SELECT token, reserved, boot FROM counter").fetchone()
        if boot != self.boot:
            # The machine has rebooted: commits that were not synced may be lost, and times since boot are void.
            token = max(token, reserved)
            cursor.execute("DELETE FROM claim")
            cursor.execute("DELETE FROM rate")
        else:
            now = int(self.now() * 1e6)
            cursor.execute("DELETE FROM claim WHERE expires <= ?", (now,))
            cursor.execute("DELETE FROM rate WHERE time <= ?", (now,))
        cursor.execute("DELETE FROM record WHERE ends <= ?", (wall_us(),))
        end = min(max(token, wall_us()) + RESERVE_US, TOKEN_MAX)
        cursor.execute("UPDATE counter SET token = ?, reserved = ?, boot = ?", (token, max(end, reserved), self.boot))

    # ------------------------------------------------------------------ opening

    def _check_or_open(self, timeout: float) -> None:
        """Keep the connection if the path still names its file; otherwise open a new one."""
        if self._closed:
            raise ClientClosed("this client is closed; connect again")
        if self._connection is not None:
            try:
                same = _identity_of(self.path) == self._identity
            except OSError:
                same = False
            if same:
                self._check_file_at = self.now() + FILE_CHECK_INTERVAL
                return
            # The file was deleted or replaced: other processes use the new one, so claims in the old one protect nothing.
            self._disconnect()
        if not timeout:
            raise DatabaseBusy  # opening may sync, which would block an event loop
        if self._opening:
            raise self._reentered()
        self._opening = True
        try:
            self._open(timeout)
        except BaseException as error:
            self._disconnect()
            if isinstance(error, OSError) and not isinstance(error, EngineUnavailable):
                raise EngineUnavailable(f"{self.path}: it cannot be opened ({error})") from error
            raise
        finally:
            self._opening = False

    def _open(self, timeout: float) -> None:
        if self._make_folder:
            make_default_folder(self.path)
        connection = self._connection = open_database(self.path, self.boot)
        self._cursor = connection.cursor()  # reused: creating a cursor takes as long as a short statement
        if connection.execute("SELECT boot FROM counter").fetchone()[0] != self.boot:
            self._transact_synced(timeout, self._reserve_tokens)
        # A short-lived process never reaches COMMITS_PER_CHECKPOINT: check the size of the log instead.
        if os.stat(os.path.realpath(self.path) + "-wal").st_size > MAX_WAL_BYTES:
            self._commits = COMMITS_PER_CHECKPOINT
        self._identity = _identity_of(self.path)
        self._check_file_at = self.now() + FILE_CHECK_INTERVAL

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = self._identity = None
            self._check_file_at = 0.0

    def _reentered(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"{self.path}: this very thread is in the middle of a transaction; in a signal handler, raise an exception "
            "or set a flag instead"
        )

    def _translate(self, error: sqlite3.Error) -> Exception:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return DatabaseBusy()
        advice = _ADVICE.get(code, "SQLite refused")
        return EngineUnavailable(f"{self.path}: {advice} ({error})")


_unclosable: list[sqlite3.Connection | None] = []
"""Connections that a fork copied in the middle of a transaction: never closed, as that would release the parent's locks."""


_yield_cpu: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


def _identity_of(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
