"""The connection to a fencelock database: checks when it is opened, transactions, and the translation of errors.

Commits are not synced (WAL, synchronous=NORMAL): a crash of a process loses nothing, and a power cut voids every claim
anyway. Tokens must not repeat even then, so a synced transaction reserves the tokens of the next minutes ahead.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Callable
from itertools import count
from threading import RLock
from typing import TypeVar, TypeVarTuple

from fencelock.core.clock import boot_id, wall_us
from fencelock.engines.sqlite.access import access_problem, foreign_side_file
from fencelock.engines.sqlite.paths import make_default_folder, network_file_system, other_names
from fencelock.errors import ClientClosed, EngineUnavailable
from fencelock.model import TOKEN_MAX

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

APPLICATION_ID = 0x666C6F63  # "floc"
LAYOUT = 3
RESERVE_US = 300_000_000
# The next token: above every earlier one and, unless the clock goes back, above the tokens of a lost database too.
# It returns no row if the reserve is used up.
MINT = """UPDATE counter SET token = max(token + 1, ?) WHERE boot = ? AND max(token + 1, ?) <= reserved
          RETURNING token"""
COMMITS_PER_CHECKPOINT = 1000
MAX_WAL_FRAMES = 4000
TRUNCATE_TIMEOUT_MS = 100
YIELDS = 20
"""How often to yield the CPU before sleeping: a transaction is shorter than the shortest sleep (about 70 µs)."""
BUSY_PAUSES = (0.0001, 0.0002, 0.0005, 0.001, 0.002)
FORK_TIMEOUT = 2.0
CLOSE_TIMEOUT = 1.0
OPEN_TIMEOUT = 2.0
SIDE_FILE_CHECKS, SIDE_FILE_PAUSE = 10, 0.005
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
        self._check_file_at = 0.0
        self._commits = 0
        self._closed = False

    def write(self, timeout: float, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts, synced: bool = False) -> T:
        """Run a step in a transaction; raise DatabaseBusy if that would take longer than `timeout` seconds.

        With timeout 0 it never waits and never syncs, so that an event loop can call it.
        """
        mutex, transact = self._mutex, self._transact_synced if synced else self._transact
        if synced and not timeout:
            raise DatabaseBusy
        try:
            connection = self._enter(timeout)
            try:
                result = transact(connection, timeout, step, *args)
            except NeedsReserve:
                if not timeout:
                    raise DatabaseBusy from None
                self._transact_synced(connection, timeout, self._move_reserve)
                result = transact(connection, timeout, step, *args)
            if timeout and self._commits >= COMMITS_PER_CHECKPOINT:
                self._checkpoint(connection)
            return result
        except sqlite3.Error as error:
            raise self._translate(error) from error
        finally:
            try:
                mutex.release()  # inline: Ctrl-C could interrupt the call of a helper before its first line
            except RuntimeError:
                pass  # DatabaseBusy: this thread did not get the mutex

    def write_synced(self, timeout: float, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        """Run a step like `write` and sync the commit, so that a power cut does not undo it."""
        return self.write(timeout, step, *args, synced=True)

    def read(self, timeout: float, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        """Run a step that only reads. It never waits for writers."""
        mutex = self._mutex
        try:
            # A new cursor: a signal handler or a finalizer may read in the middle of a transaction of this thread,
            # and on the transaction's cursor it would end that one's query.
            return step(self._enter(timeout).cursor(), *args)
        except sqlite3.Error as error:
            raise self._translate(error) from error
        finally:
            try:
                mutex.release()  # inline: Ctrl-C could interrupt the call of a helper before its first line
            except RuntimeError:
                pass  # DatabaseBusy: this thread did not get the mutex

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
        self._release_mutex()

    def after_fork(self) -> None:
        """In the child, replace the mutex and drop the parent's connection without closing it."""
        _unclosable.append(self._connection)  # None, unless a transaction lasted for all of FORK_TIMEOUT
        self._connection = None
        self._mutex = RLock()

    def mint(self, cursor: sqlite3.Cursor) -> int:
        """Return the next token. Call it in a step of a transaction; it raises NeedsReserve."""
        wall = wall_us()
        row = cursor.execute(MINT, (wall, self.boot, wall)).fetchone()
        if row is None:
            raise NeedsReserve
        return row[0]  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ under the mutex

    def _enter(self, timeout: float) -> sqlite3.Connection:
        """Take the mutex and return the connection; open it if necessary. Every operation runs this.

        The caller releases the mutex in any case: Ctrl-C may interrupt the instruction after `acquire`.
        """
        if not (self._mutex.acquire(True, timeout) if timeout else self._mutex.acquire(False)):
            raise DatabaseBusy
        connection = self._connection
        if connection is None or self.now() >= self._check_file_at:
            return self._check_or_open(timeout)
        if not timeout and self._commits >= COMMITS_PER_CHECKPOINT:
            raise DatabaseBusy
        return connection

    def _release_mutex(self) -> None:
        """Release the mutex if this thread holds it."""
        try:
            self._mutex.release()
        except RuntimeError:
            pass

    def _transact(
        self,
        connection: sqlite3.Connection,
        timeout: float,
        step: Callable[[sqlite3.Cursor, *Ts], T],
        *args: *Ts,
    ) -> T:
        cursor = self._cursor
        execute = cursor.execute
        if connection.in_transaction:
            raise self._reentered()
        try:  # begins before BEGIN: Ctrl-C may interrupt right after it
            try:
                execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                self._begin(connection, timeout, error)
            result = step(cursor, *args)
            execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                execute("ROLLBACK")
            raise
        self._commits += 1
        return result

    def _begin(self, connection: sqlite3.Connection, timeout: float, error: sqlite3.OperationalError) -> None:
        """Retry BEGIN until the timeout. SQLite's own busy handler sleeps a millisecond or more, which is too long."""
        end = time.monotonic() + timeout
        for tries in count():
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise error
            if time.monotonic() >= end:
                raise DatabaseBusy from error
            if tries < YIELDS:
                _yield_cpu()
            else:
                time.sleep(BUSY_PAUSES[min(tries - YIELDS, len(BUSY_PAUSES) - 1)])
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as again:
                error = again

    def _transact_synced(
        self,
        connection: sqlite3.Connection,
        timeout: float,
        step: Callable[[sqlite3.Cursor, *Ts], T],
        *args: *Ts,
    ) -> T:
        if connection.in_transaction:
            raise self._reentered()
        connection.execute("PRAGMA synchronous = FULL")
        try:
            return self._transact(connection, timeout, step, *args)
        finally:
            connection.execute("PRAGMA synchronous = NORMAL")

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Move the log into the database, as far as readers allow. A failure is ignored; the next checkpoint repeats it."""
        self._commits = 0
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

    def _move_reserve(self, cursor: sqlite3.Cursor) -> None:
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

    def _check_or_open(self, timeout: float) -> sqlite3.Connection:
        if self._closed:
            raise ClientClosed("this client is closed; connect again")
        if self._connection is not None:
            if self._identity is None:
                raise self._reentered()  # a signal handler interrupted the opening
            try:
                status = os.stat(self.path)
                if (status.st_dev, status.st_ino) == self._identity:
                    self._check_file_at = self.now() + FILE_CHECK_INTERVAL
                    return self._connection
            except OSError:
                pass
            # The file was deleted or replaced: other processes use the new one, so claims in the old one protect nothing.
            self._disconnect()
        if not timeout:
            raise DatabaseBusy  # opening may sync, which would block an event loop
        try:
            connection = self._open()
        except BaseException as error:
            self._disconnect()
            if isinstance(error, OSError) and not isinstance(error, EngineUnavailable):
                raise EngineUnavailable(f"{self.path}: it cannot be opened ({error})") from error
            raise
        self._check_file_at = self.now() + FILE_CHECK_INTERVAL
        return connection

    def _open(self) -> sqlite3.Connection:
        if self._make_folder:
            make_default_folder(self.path)
        if (why := access_problem(self.path)) is not None:
            raise EngineUnavailable(why)
        if (kind := network_file_system(os.path.dirname(self.path))) is not None:
            raise EngineUnavailable(
                f"{self.path} is on a network file system ({kind}), where SQLite cannot keep processes apart; "
                "choose a local path, or an engine with a server"
            )
        self._check_side_files()
        _make_file(self.path)
        connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        self._connection = connection
        self._cursor = connection.cursor()  # reused: creating a cursor takes as long as a short statement
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        layout = self._layout(connection)
        if (problem := other_names(self.path)) is not None:
            raise EngineUnavailable(f"{self.path} {problem}")
        if layout == 0:
            self._create(connection)
        elif layout != LAYOUT:
            raise EngineUnavailable(
                f"{self.path} has layout {layout} and this release of fencelock knows layout {LAYOUT}; use one release "
                "everywhere, or another file"
            )
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            raise EngineUnavailable(f"{self.path}: write-ahead logging does not work there; choose a local file system")
        if connection.execute("SELECT boot FROM counter").fetchone()[0] != self.boot:
            self._transact_synced(connection, OPEN_TIMEOUT, self._move_reserve)
        status = os.stat(self.path)
        self._identity = (status.st_dev, status.st_ino)
        # A short-lived process never reaches COMMITS_PER_CHECKPOINT: check the size of the log instead.
        try:
            if os.stat(self.path + "-wal").st_size > 4_000_000:
                self._commits = COMMITS_PER_CHECKPOINT
        except OSError:
            pass
        return connection

    def _check_side_files(self) -> None:
        """Raise if this user may not write `-wal` or `-shm`. Retry: SQLite sets a new file's mode after creating it."""
        looks = 1
        while (why := foreign_side_file(self.path)) is not None:
            if looks == SIDE_FILE_CHECKS:
                raise EngineUnavailable(why)
            looks += 1
            time.sleep(SIDE_FILE_PAUSE)

    def _layout(self, connection: sqlite3.Connection) -> int:
        """Return the layout version, or 0 if the database is new; raise if it belongs to another program."""
        # Read the tables first: another process may be creating them, with the application id, in one transaction.
        tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        if application == APPLICATION_ID:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])
        if application == 0 and tables == 0:
            return 0
        raise EngineUnavailable(
            f"{self.path} is a database of another program; fencelock does not touch it. Choose another path"
        )

    def _create(self, connection: sqlite3.Connection) -> None:
        if sqlite3.sqlite_version_info < (3, 37):
            raise EngineUnavailable(f"fencelock needs SQLite 3.37 or later, this Python has {sqlite3.sqlite_version}")
        connection.execute("PRAGMA page_size = 2048")  # a commit writes whole pages, and ours hold little
        self._set_wal(connection)
        self._transact_synced(connection, OPEN_TIMEOUT, self._create_tables)
        _sync_folder(os.path.dirname(self.path))

    def _create_tables(self, cursor: sqlite3.Cursor) -> None:
        if self._layout(cursor.connection) != 0:
            return  # another process has created them
        with open(os.path.join(os.path.dirname(__file__), "schema.sql"), encoding="utf-8") as file:
            for statement in file.read().split(";\n"):
                cursor.execute(statement)
        token = wall_us()
        cursor.execute("INSERT INTO counter VALUES (1, ?, ?, ?)", (token, token, self.boot))
        cursor.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        cursor.execute(f"PRAGMA user_version = {LAYOUT}")

    def _set_wal(self, connection: sqlite3.Connection) -> None:
        """Switch to the write-ahead log. SQLite's busy handler does not wait for another process that does the same."""
        for _ in range(2000):
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
            time.sleep(0.001)
        raise DatabaseBusy

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


def _make_file(path: str) -> None:
    """Create an empty file that the group may write if the umask allows it; SQLite creates files without that bit.

    mknod does not open the file: closing it would drop the locks of another connection of this process.
    """
    try:
        os.mknod(path, 0o664 | stat.S_IFREG)
    except OSError:
        pass  # it exists; or, where only root may call mknod, SQLite creates it for its owner alone


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
