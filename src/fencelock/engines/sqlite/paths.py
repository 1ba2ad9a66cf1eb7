"""The path that a `sqlite:` URL names, and whether its file system works for locks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from fencelock.core.urls import redact
from fencelock.errors import EngineUnavailable, InvalidURL

NETWORK = """
    9p afs beegfs ceph cifs coda davfs fuse.ceph fuse.cephfs fuse.davfs fuse.glusterfs fuse.juicefs fuse.mfs fuse.rclone
    fuse.s3fs fuse.sshfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs prl_fs pvfs2 smb2 smb3 smbfs vboxsf
    virtiofs vmhgfs
"""
"""File systems that other machines can write to: SQLite's shared memory works on one machine only."""


def path_of(url: str) -> str:
    """Return the absolute path that a URL names; slashes are counted as SQLAlchemy does.

    `sqlite:////var/lib/app/locks.db` is absolute; `sqlite:///locks.db` and `sqlite:locks.db` are relative to the current
    folder, `sqlite:~/locks.db` to the home; `sqlite://` is the default.
    """
    if is_default(url):
        return default_path()
    rest = url.partition(":")[2]
    if rest.strip("/") == ":memory:":
        raise InvalidURL(f"{redact(url)!r} is a file with an odd name here; for locks in memory use memory://name")
    if rest.startswith("//"):
        if (home := rest.lstrip("/")).startswith("~"):
            meant = f"sqlite:{home}" if redact(url) == url else "sqlite:~/locks.db"
            raise InvalidURL(
                f"{redact(url)!r}: for a path in the home folder write {meant}, without slashes before the ~"
            )
        if not rest.startswith("///"):
            raise InvalidURL(
                f"{redact(url)!r} names a host; a path in the current folder is sqlite:locks.db, an absolute path has four "
                "slashes, as in sqlite:////var/lib/app/locks.db"
            )
        rest = "/" + rest.lstrip("/") if rest.startswith("////") else rest[3:]
    if "?" in rest or "#" in rest:
        raise InvalidURL(f"{redact(url)!r}: sqlite takes no options; write %3F or %23 for a ? or # in the path")
    if "%" in rest:
        from urllib.parse import unquote  # the import takes 3 ms, and most URLs do not need it

        rest = unquote(rest)
    if not rest.strip("/") or "\0" in rest:
        raise InvalidURL(f"{redact(url)!r} names no file")
    path = os.path.expanduser(rest)
    if path.startswith("~"):
        raise InvalidURL(f"{redact(url)!r}: there is no such home folder; give the whole path")
    return os.path.abspath(path)


def is_default(url: str) -> bool:
    """Return whether the URL names no path and means the database in the user's state folder."""
    return url.partition(":")[2] in ("", "//", "///")


def url_of(path: str) -> str:
    """Return the URL of an absolute path.

    >>> url_of("/var/lib/50%?.db")
    'sqlite:////var/lib/50%25%3F.db'
    """
    return f"sqlite:///{path.replace('%', '%25').replace('?', '%3F').replace('#', '%23')}"


def default_path() -> str:
    """Return the path of the database in the user's state folder. Nothing is created here."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if sys.platform == "darwin":
        state = os.path.expanduser("~/Library/Application Support")
    elif not os.path.isabs(state):  # the XDG standard ignores a relative path
        state = os.path.expanduser("~/.local/state")
    if not os.path.isabs(state):
        raise InvalidURL(f"this user has no home folder for the default place of locks; {_INSTEAD}")
    return os.path.join(state, "fencelock", "locks.db")


def make_default_folder(path: str) -> None:
    """Create the folder of the default database, for this user alone."""
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise EngineUnavailable(
            f"the default place for locks, {folder}, cannot be made ({error.strerror}); {_INSTEAD}"
        ) from error


_INSTEAD = "give a URL or set FENCELOCK_URL, for example to sqlite:////var/lib/app/locks.db"


def network_file_system(path: str, mounts: str | None = None) -> str | None:
    """Return the type of the network file system that the path is on, or None. `mounts` is Linux's table of mounts."""
    best, kind = "", None
    where = os.path.realpath(path)
    for point, type_ in _mounts(mounts):  # the last line for a mount point counts
        if len(point) >= len(best) and (where == point or where.startswith(point.rstrip("/") + "/")):
            best, kind = point, type_
    return kind if kind in NETWORK.split() else None


def other_names(path: str, mounts: str | None = None) -> str | None:
    """Return how the database has a second name, or None.

    SQLite finds the log by the name of the database. Under a second name it uses a second log, and locks do not exclude.
    """
    where = os.path.realpath(path)
    if os.stat(where).st_nlink > 1:
        return "has several hard links; remove the others, or use symbolic ones"
    if any(point == where for point, _ in _mounts(mounts)):
        return "is mounted by itself, without the log beside it; mount its folder instead"
    return None


def _mounts(table: str | None) -> Iterator[tuple[str, str]]:
    """Yield mount points and file system types; nothing if the system has no table of mounts."""
    if table is None:
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
                table = file.read()
        except OSError:
            return
    for line in table.splitlines():
        # 36 35 98:0 /root /mount/point options - type source options
        fields, _, tail = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])
        yield point, tail.split(" ")[0]
