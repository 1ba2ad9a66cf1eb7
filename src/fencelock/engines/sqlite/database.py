"""The connection to a fencelock database: opened with care, one transaction at a time, errors translated in one place.

Commits are not synced one by one (WAL, synchronous=NORMAL): a crash of a process loses nothing, and after a power cut
every claim is void anyway. Tokens must not repeat even then, so they are reserved ahead, for some minutes of the clock at
a time, in a transaction that is synced.
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
from fencelock.engines.sqlite.access import foreign_side_file, obstacle
from fencelock.engines.sqlite.place import make_default_folder, network_file_system, other_names
from fencelock.errors import ClientClosed, EngineUnavailable
from fencelock.model import TOKEN_MAX

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

APPLICATION_ID = 0x666C6F63  # "floc"
LAYOUT = 2
RESERVE_US = 300_000_000
# The next token: above every earlier one and, as long as the clock does not go back, above those of lost databases too.
# No row: the reserve is used up.
MINT = """UPDATE counter SET token = max(token + 1, ?) WHERE boot = ? AND max(token + 1, ?) <= reserved
          RETURNING token"""
COMMITS_PER_CHECKPOINT = 1000
FRAMES_TOO_MANY = 4000
TRUNCATE_PATIENCE_MS = 100
YIELDS = 20
"""A transaction is over sooner than the shortest sleep (some 70 µs): first only let others run."""
BUSY_PAUSES = (0.0001, 0.0002, 0.0005, 0.001, 0.002)
FORK_PATIENCE = 2.0
CLOSE_PATIENCE = 1.0
OPEN_PATIENCE = 2.0
SIDE_FILE_LOOKS, SIDE_FILE_PAUSE = 10, 0.005
LOOK_AGAIN = 0.1
"""How often to see whether the file is still the one that the path names, in seconds."""

_ADVICE = {
    sqlite3.SQLITE_READONLY: "it can only be read; make the file and its folder writable for this user",
    sqlite3.SQLITE_FULL: "the disk is full; free some space",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; does its folder exist, and may this user write there?",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite database; fencelock does not touch it. Choose another path",
    sqlite3.SQLITE_CORRUPT: "it is damaged; stop all users of it and move it away, tokens go on from the clock",
    sqlite3.SQLITE_IOERR: "the disk failed",
    sqlite3.SQLITE_PERM: "permission was denied",
}


class Occupied(Exception):
    """It would take longer than there is patience: others are writing, or something has to be synced."""


class NeedsReserve(Exception):
    """The tokens that are safe to use are used up."""


class Database:
    """One connection, opened when it is needed, shared by the threads of a client under one mutex."""

    def __init__(self, path: str, now: Callable[[], float], *, make_folder: bool = False) -> None:
        self.path = path
        self._make_folder = make_folder
        self.boot = boot_id()
        self.now = now
        self._mutex = RLock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._look_again = 0.0
        self._commits = 0
        self._closed = False

    def write(self, patience: float, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts, synced: bool = False) -> T:
        """Run a step in a transaction; raise Occupied if that would take longer than `patience`.

        Without any patience nothing is ever synced, so that an event loop can call it.
        """
        mutex, transact = self._mutex, self._transact_synced if synced else self._transact
        try:
            connection = self._enter(patience)
            try:
                result = transact(connection, patience, step, *args)
            except NeedsReserve:
                if not patience:
                    raise Occupied from None
                self._transact_synced(connection, patience, self._move_reserve)
                result = transact(connection, patience, step, *args)
            if patience and self._commits >= COMMITS_PER_CHECKPOINT:
                self._checkpoint(connection)
            return result
        except sqlite3.Error as error:
            raise self._translated(error) from error
        finally:
            try:
                mutex.release()  # right here: a call to a helper could be interrupted before it does anything
            except RuntimeError:
                pass  # Occupied: it was not ours

    def keep(self, patience: float, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        """Run a step like `write`, with some patience, so that a power cut does not undo it."""
        return self.write(patience, step, *args, synced=True)

    def read(self, patience: float, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        """Run a step that only reads: it never waits for writers."""
        mutex = self._mutex
        try:
            # A cursor of its own: a signal handler or a finalizer may look around in the middle of a transaction of
            # this very thread, and on the transaction's cursor it would cut short what that reads.
            return step(self._enter(patience).cursor(), *args)
        except sqlite3.Error as error:
            raise self._translated(error) from error
        finally:
            try:
                mutex.release()  # right here: a call to a helper could be interrupted before it does anything
            except RuntimeError:
                pass  # Occupied: it was not ours

    def close(self) -> None:
        """Close the connection for good, without waiting for ever: the interpreter may be on its way out."""
        self._closed = True
        self._look_again = 0.0
        if self._mutex.acquire(timeout=CLOSE_PATIENCE):
            try:
                self._disconnect()
            finally:
                self._mutex.release()

    def before_fork(self) -> None:
        """Have no connection while the process is copied: SQLite forbids even to close it in the child."""
        if self._mutex.acquire(timeout=FORK_PATIENCE):
            self._disconnect()

    def after_fork(self, *, child: bool) -> None:
        """Open anew when needed, in both processes."""
        if child:
            _inherited.append(self._connection)  # None, unless a transaction hung for all of FORK_PATIENCE
            self._connection = None
            self._mutex = RLock()
        else:
            self._leave()

    def mint(self, cursor: sqlite3.Cursor) -> int:
        """Return the next token, in a step of a transaction."""
        wall = wall_us()
        row = cursor.execute(MINT, (wall, self.boot, wall)).fetchone()
        if row is None:
            raise NeedsReserve
        return row[0]  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ under the mutex

    def _enter(self, patience: float) -> sqlite3.Connection:
        """Take the mutex and return the connection, opened if need be. The hot path of every operation.

        The caller gives it back whatever happens: Ctrl-C may come at any instruction, also at the one after `acquire`.
        """
        if not (self._mutex.acquire(True, patience) if patience else self._mutex.acquire(False)):
            raise Occupied
        connection = self._connection
        if connection is None or self.now() >= self._look_again:
            return self._ready(patience)
        if not patience and self._commits >= COMMITS_PER_CHECKPOINT:
            raise Occupied
        return connection

    def _leave(self) -> None:
        """Give back the mutex if it is ours."""
        try:
            self._mutex.release()
        except RuntimeError:
            pass

    def _transact(
        self,
        connection: sqlite3.Connection,
        patience: float,
        step: Callable[[sqlite3.Cursor, *Ts], T],
        *args: *Ts,
    ) -> T:
        cursor = self._cursor
        execute = cursor.execute
        if connection.in_transaction:
            raise self._reentered()
        try:  # from before BEGIN: Ctrl-C may come right after it
            try:
                execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                self._begin(connection, patience, error)
            result = step(cursor, *args)
            execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                execute("ROLLBACK")
            raise
        self._commits += 1
        return result

    def _begin(self, connection: sqlite3.Connection, patience: float, error: sqlite3.OperationalError) -> None:
        """Begin to write, later. SQLite's own wait sleeps for a millisecond and more, many times what we need."""
        end = time.monotonic() + patience
        for tries in count():
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise error
            if time.monotonic() >= end:
                raise Occupied from error
            if tries < YIELDS:
                _give_way()
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
        patience: float,
        step: Callable[[sqlite3.Cursor, *Ts], T],
        *args: *Ts,
    ) -> T:
        if connection.in_transaction:
            raise self._reentered()
        connection.execute("PRAGMA synchronous = FULL")
        try:
            return self._transact(connection, patience, step, *args)
        finally:
            connection.execute("PRAGMA synchronous = NORMAL")

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Move the log into the database, as far as readers allow. If it fails, another time will do."""
        self._commits = 0
        try:
            frames = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
            if frames > FRAMES_TOO_MANY:
                # The log begins anew only at a moment when all of it was moved. Writers that never pause leave none:
                # keep them out for as long as it takes to move what they added meanwhile.
                connection.execute(f"PRAGMA busy_timeout = {TRUNCATE_PATIENCE_MS}")
                try:
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                finally:
                    connection.execute("PRAGMA busy_timeout = 0")
        except sqlite3.Error:
            pass

    def _move_reserve(self, cursor: sqlite3.Cursor) -> None:
        """Reserve tokens for the coming minutes, and clear away what has run out."""
        token, reserved, boot = cursor.execute("SELECT token, reserved, boot FROM counter").fetchone()
        if boot != self.boot:
            # Another start of the machine: what was not synced may be gone, and all times have lost their meaning.
            token = max(token, reserved)
            cursor.execute("DELETE FROM claim")
        else:
            cursor.execute("DELETE FROM claim WHERE expires <= ?", (int(self.now() * 1e6),))
        cursor.execute("DELETE FROM record WHERE ends <= ?", (wall_us(),))
        end = min(max(token, wall_us()) + RESERVE_US, TOKEN_MAX)
        cursor.execute("UPDATE counter SET token = ?, reserved = ?, boot = ?", (token, max(end, reserved), self.boot))

    # ------------------------------------------------------------------ opening

    def _ready(self, patience: float) -> sqlite3.Connection:
        if self._closed:
            raise ClientClosed("this client is closed; connect again")
        if self._connection is not None:
            if self._identity is None:
                raise self._reentered()  # a signal handler, while it is being opened
            try:
                status = os.stat(self.path)
                if (status.st_dev, status.st_ino) == self._identity:
                    self._look_again = self.now() + LOOK_AGAIN
                    return self._connection
            except OSError:
                pass
            # Deleted or replaced under our feet: others use the new file, what we hold in the old one protects nothing.
            self._disconnect()
        if not patience:
            raise Occupied  # opening may have to sync: not where that would hold up an event loop
        try:
            connection = self._open()
        except BaseException as error:
            self._disconnect()
            if isinstance(error, OSError) and not isinstance(error, EngineUnavailable):
                raise EngineUnavailable(f"{self.path}: it cannot be opened ({error})") from error
            raise
        self._look_again = self.now() + LOOK_AGAIN
        return connection

    def _open(self) -> sqlite3.Connection:
        if self._make_folder:
            make_default_folder(self.path)
        if (why := obstacle(self.path)) is not None:
            raise EngineUnavailable(why)
        if (kind := network_file_system(os.path.dirname(self.path))) is not None:
            raise EngineUnavailable(
                f"{self.path} is on a network file system ({kind}), where SQLite cannot keep processes apart; "
                "choose a local path, or an engine with a server"
            )
        self._await_side_files()
        _make_file(self.path)
        connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        self._connection = connection
        self._cursor = connection.cursor()  # one for all: making one takes as long as a short statement
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
            self._transact_synced(connection, OPEN_PATIENCE, self._move_reserve)
        status = os.stat(self.path)
        self._identity = (status.st_dev, status.st_ino)
        # Short-lived processes never count to a checkpoint of their own: look at what the others have left.
        try:
            if os.stat(self.path + "-wal").st_size > 4_000_000:
                self._commits = COMMITS_PER_CHECKPOINT
        except OSError:
            pass
        return connection

    def _await_side_files(self) -> None:
        """Raise if another user's `-wal` or `-shm` is in the way; SQLite gives a new one its mode only after creating it."""
        looks = 1
        while (why := foreign_side_file(self.path)) is not None:
            if looks == SIDE_FILE_LOOKS:
                raise EngineUnavailable(why)
            looks += 1
            time.sleep(SIDE_FILE_PAUSE)

    def _layout(self, connection: sqlite3.Connection) -> int:
        """Return the layout's number, or 0 if the database is new; raise if it is somebody else's."""
        # In this order: somebody may be creating it, and ours gets its tables and its id in one transaction.
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
        connection.execute("PRAGMA page_size = 2048")  # a commit writes whole pages, and ours are nearly empty
        self._until_free(lambda: connection.execute("PRAGMA journal_mode = WAL"))
        self._transact_synced(connection, OPEN_PATIENCE, self._fill)
        _sync_folder(os.path.dirname(self.path))

    def _fill(self, cursor: sqlite3.Cursor) -> None:
        if self._layout(cursor.connection) != 0:
            return  # somebody else was faster
        with open(os.path.join(os.path.dirname(__file__), "schema.sql"), encoding="utf-8") as file:
            for statement in file.read().split(";\n"):
                cursor.execute(statement)
        token = wall_us()
        cursor.execute("INSERT INTO counter VALUES (1, ?, ?, ?)", (token, token, self.boot))
        cursor.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        cursor.execute(f"PRAGMA user_version = {LAYOUT}")

    def _until_free(self, action: Callable[[], object]) -> None:
        """Repeat what others who create the same database at this moment keep us from."""
        for _ in range(2000):
            try:
                action()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
            time.sleep(0.001)
        raise Occupied

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = self._identity = None
            self._look_again = 0.0

    def _reentered(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"{self.path}: this very thread is in the middle of a transaction; in a signal handler, raise an exception "
            "or set a flag instead"
        )

    def _translated(self, error: sqlite3.Error) -> Exception:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return Occupied()
        advice = _ADVICE.get(code, "SQLite refused")
        return EngineUnavailable(f"{self.path}: {advice} ({error})")


_inherited: list[sqlite3.Connection | None] = []
"""Connections that a fork copied in the middle of a transaction: never closed, as that would harm the parent."""


_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


def _make_file(path: str) -> None:
    """Create an empty file that the group may write if the umask allows it: SQLite itself never lets the group write.

    Not by opening it: closing it again would drop the locks of whoever in this process was faster.
    """
    try:
        os.mknod(path, 0o664 | stat.S_IFREG)
    except OSError:
        pass  # it is there already; or, where only root may do this, SQLite creates it for its owner alone


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
