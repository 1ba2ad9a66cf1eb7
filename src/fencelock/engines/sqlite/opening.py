"""Open a fencelock database: check the path and the file, and create the tables in a new file."""

from __future__ import annotations

import os
import sqlite3
import stat
import time

from fencelock.core.clock import wall_us
from fencelock.engines.sqlite.access import access_problem, foreign_side_file
from fencelock.engines.sqlite.paths import network_file_system, other_names
from fencelock.errors import EngineUnavailable

APPLICATION_ID = 0x666C6F63  # "floc"
LAYOUT = 3
OPEN_TIMEOUT = 2.0
"""Seconds to wait for another process that is creating the same database."""
SIDE_FILE_CHECKS, SIDE_FILE_PAUSE = 10, 0.005


def open_database(path: str, boot: str) -> sqlite3.Connection:
    """Return a connection to the database at the path; create it if there is none.

    Raise EngineUnavailable, or an error of SQLite, if this user or fencelock cannot use the file. It is not changed then.
    """
    _check_path(path)
    _make_file(path)
    connection = sqlite3.connect(path, timeout=OPEN_TIMEOUT, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, path, boot)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_path(path: str) -> None:
    """Raise EngineUnavailable if SQLite must not open the file."""
    if (why := access_problem(path)) is not None:
        raise EngineUnavailable(why)
    if (kind := network_file_system(os.path.dirname(path))) is not None:
        raise EngineUnavailable(
            f"{path} is on a network file system ({kind}), where SQLite cannot keep processes apart; "
            "choose a local path, or an engine with a server"
        )
    checks = 1
    while (why := foreign_side_file(path)) is not None:
        if checks == SIDE_FILE_CHECKS:
            raise EngineUnavailable(why)
        checks += 1
        time.sleep(SIDE_FILE_PAUSE)  # SQLite sets the mode of a new file after it has created it


def _make_file(path: str) -> None:
    """Create an empty file that the group may write if the umask allows it; SQLite creates files without that bit.

    mknod does not open the file: closing it would drop the locks of another connection of this process.
    """
    try:
        os.mknod(path, 0o664 | stat.S_IFREG)
    except OSError:
        pass  # it exists; or, where only root may call mknod, SQLite creates it for its owner alone


def _prepare(connection: sqlite3.Connection, path: str, boot: str) -> None:
    layout = layout_of(connection, path)
    if (problem := other_names(path)) is not None:
        raise EngineUnavailable(f"{path} {problem}")
    if layout == 0:
        _create(connection, path, boot)
    elif layout != LAYOUT:
        raise EngineUnavailable(
            f"{path} has layout {layout} and this release of fencelock knows layout {LAYOUT}; use one release "
            "everywhere, or another file"
        )
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        raise EngineUnavailable(f"{path}: write-ahead logging does not work there; choose a local file system")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA busy_timeout = 0")


def layout_of(connection: sqlite3.Connection, path: str) -> int:
    """Return the layout version, or 0 if the database is new; raise if it belongs to another program."""
    # Read the tables first: another process may be creating them, with the application id, in one transaction.
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application == APPLICATION_ID:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])
    if application == 0 and tables == 0:
        return 0
    raise EngineUnavailable(
        f"{path} is a database of another program; fencelock does not touch it. Choose another path"
    )


def _create(connection: sqlite3.Connection, path: str, boot: str) -> None:
    """Create the tables, in one synced transaction."""
    if sqlite3.sqlite_version_info < (3, 37):
        raise EngineUnavailable(f"fencelock needs SQLite 3.37 or later, this Python has {sqlite3.sqlite_version}")
    connection.execute("PRAGMA page_size = 1024")  # a commit writes whole pages, and ours hold little
    _set_wal(connection)
    connection.execute("PRAGMA synchronous = FULL")
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        if layout_of(connection, path) != 0:
            return  # another process has created them
        with open(os.path.join(os.path.dirname(__file__), "schema.sql"), encoding="utf-8") as file:
            for statement in file.read().split(";\n"):
                connection.execute(statement)
        token = wall_us()
        connection.execute("INSERT INTO counter VALUES (1, ?, ?, ?)", (token, token, boot))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {LAYOUT}")
    _sync_folder(os.path.dirname(path))


def _set_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. SQLite's busy handler does not wait for another process that does the same."""
    until = time.monotonic() + OPEN_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(0.001)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
