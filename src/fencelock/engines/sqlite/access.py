"""Check whether this user may use a database, before SQLite opens it and without opening or creating a file.

SQLite opens a file that it may not write for reading, and creates a `-wal` and a `-shm` that the owner then cannot open.
This module must not open the file either: closing it drops the locks of other connections of this process.
"""

from __future__ import annotations

import os
import stat

SIDE_FILES = ("-wal", "-shm")
_EFFECTIVE = os.access in os.supports_effective_ids


def access_problem(path: str) -> str | None:
    """Return why this user cannot use or create the database at the path, and what to do; or None if that is possible."""
    real = os.path.realpath(path)  # SQLite creates its files beside the real one
    folder = os.path.dirname(real)
    shown = path if real == path else f"{path} (a link to {real})"
    try:
        around = os.stat(folder)
    except OSError as error:
        return _no_folder(shown, folder, error)
    if not stat.S_ISDIR(around.st_mode):
        return f"{shown}: {folder} is a file, not a folder; choose another path"
    try:
        found = os.stat(real)
    except FileNotFoundError:
        found = None
    except OSError as error:
        return f"{shown}: user {this_user()} may not look into {folder} ({error.strerror}); choose another path"
    if found is not None:
        if stat.S_ISDIR(found.st_mode):
            return f"{shown} is a folder, not a database file; add a file name, as in {os.path.join(path, 'locks.db')}"
        if not stat.S_ISREG(found.st_mode):
            return f"{shown} is not a regular file and cannot be a database; choose another path"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{shown} is on a file system that is mounted read-only, and fencelock has to write; choose another path"
    if found is not None and not _writable(real, os.R_OK | os.W_OK):
        return (
            f"{shown} belongs to user {user(found.st_uid)} and user {this_user()} may not write it; nothing was changed. "
            "Every user of it, even of `inspect` only, has to write: share it by a common group, or choose another path"
        )
    if found is not None and protected(found, around):
        return f"{shown} belongs to user {user(found.st_uid)}, and {_PROTECTED.format(folder)}; choose another folder"
    if not _writable(folder, os.W_OK | os.X_OK):
        why = "" if found is None else ", where SQLite keeps files beside the database"
        return f"{shown}: user {this_user()} may not write in {folder}{why}; choose another path, or change its permissions"
    return None


def foreign_side_file(path: str) -> str | None:
    """Return what to do about a `-wal` or `-shm` of another user that this user may not write; or None."""
    real = os.path.realpath(path)
    folder = os.path.dirname(real)
    for suffix in SIDE_FILES:
        side = real + suffix
        try:
            found, around = os.stat(side), os.stat(folder)
        except OSError:
            continue  # deleted meanwhile: the last connection was closed
        if _writable(side, os.R_OK | os.W_OK):
            if not protected(found, around):
                continue
            why = _PROTECTED.format(folder)
        else:
            why = f"user {this_user()} may not write it"
        # A log that is not empty may hold the only copy of commits. SQLite can always create the -shm again.
        alone = not os.path.exists(real)
        delete = "have it deleted by its owner or by root while nobody uses the database"
        give = f"have root give it to the owner of the database: chown --reference={real} {side}"
        advice = delete if alone else f"{delete}, or {give}" if suffix == "-shm" or not found.st_size else give
        return (
            f"{path}: {side} belongs to user {user(found.st_uid)}, and {why}; {advice}. Users who share a database need a "
            "common group"
        )
    return None


_PROTECTED = "in {}, which is sticky, the kernel lets nobody else open it for writing (fs.protected_regular)"


def protected(found: os.stat_result, around: os.stat_result, level: str | None = None) -> bool:
    """Return whether Linux refuses to open another user's file as SQLite does (O_CREAT) in a sticky folder like /tmp.

    This applies to root as well. `level` is the kernel's setting: 1 for world-writable folders, 2 for group-writable too.
    """
    if found.st_uid in (os.geteuid(), around.st_uid) or not around.st_mode & stat.S_ISVTX:
        return False
    if level is None:
        try:
            with open("/proc/sys/fs/protected_regular", encoding="ascii") as file:
                level = file.read().strip()
        except OSError:
            return False
    by_all, by_group = around.st_mode & stat.S_IWOTH, around.st_mode & stat.S_IWGRP
    return bool((level in ("1", "2") and by_all) or (level == "2" and by_group))


def user(number: int) -> str:
    """Return a user's name, or the number if there is no name."""
    import pwd  # only for messages

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def this_user() -> str:
    """Return the name of the effective user of this process."""
    return user(os.geteuid())


def _writable(path: str, mode: int) -> bool:
    return os.access(path, mode, effective_ids=_EFFECTIVE)


def _no_folder(shown: str, folder: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{shown}: the folder {folder} does not exist; create it{_with_four_slashes(folder)}"
    if isinstance(error, NotADirectoryError):
        part = folder
        while not os.path.isfile(part) and part != os.path.dirname(part):
            part = os.path.dirname(part)
        return f"{shown}: {part} is a file, not a folder; choose another path"
    return f"{shown}: user {this_user()} may not look into {folder} ({error.strerror}); choose another path"


def _with_four_slashes(folder: str) -> str:
    """Return a hint if the path is relative (three slashes in the URL) and the folder exists below the root."""
    try:
        below_root = folder.removeprefix(os.getcwd())
    except OSError:
        return ""  # the current folder was removed
    if below_root == folder or not os.path.isdir(below_root):
        return ""
    return f", or write four slashes for {below_root}: sqlite:///{below_root}/…"
