"""The file fence: a new version is written beside the file, compared under the file's own lock, and put in its place.

Beside `report.json` there are `.report.json.fence`, the mark, and `.report.json.fence-lock`, which is only ever locked. The
mark is on disk before the file changes, so that a crash between the two leaves the old file behind the new mark: safe.
`.fence` is the floor of a folder whose marks have been collected.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from fencelock.errors import FencelockError
from fencelock.fences import Fenced
from fencelock.fences.core import (
    Credentials,
    Mark,
    admit,
    bearer,
    check_reason,
    check_token,
    tell_collected,
    tell_moved,
    token_of,
)

Path = str | os.PathLike[str]
MARK = ".fence"


class FileFence:
    """Replaces files, and refuses whoever comes with an older token than somebody before; the resource is the path.

    `enter` comes before the first read that a write depends on. For processes of one machine, or of several on a file system
    whose `flock` they share. Readers need nothing: they see the old file or the new one, whole.

    >>> import tempfile, types
    >>> old, new = types.SimpleNamespace(token=33, id="a"), types.SimpleNamespace(token=34, id="b")
    >>> path = os.path.join(tempfile.mkdtemp(), "stock")
    >>> fence = FileFence()
    >>> fence.write(old, path, b"100")
    >>> fence.enter(new, path)
    >>> with open(path) as file:
    ...     left = int(file.read()) - 5
    >>> fence.write(new, path, str(left).encode())
    >>> fence.write(old, path, b"90")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fencelock.errors.StaleToken: ...stock' refused token 33: a holder with token 34 has been here. Stop, and acquire anew
    """

    def enter(self, lease: Fenced, path: Path) -> None:
        """Keep older tokens out from now on, or raise StaleToken. Call it before the first read."""
        mine, place = bearer(lease), _Place.of(path)
        with place.locked():
            place.raise_mark(mine)

    def write(self, lease: Fenced, path: Path, data: bytes) -> None:
        """Replace the file by one with this content, unless the token is old. It is on disk when this returns."""
        with self.replace(lease, path) as file:
            file.write(data)

    @contextmanager
    def replace(self, lease: Fenced, path: Path) -> Iterator[IO[bytes]]:
        """Give a file to write to, which takes the place of the other at the end of the block, unless the token is old.

        >>> import tempfile, types
        >>> path = os.path.join(tempfile.mkdtemp(), "report")
        >>> with FileFence().replace(types.SimpleNamespace(token=7, id="me"), path) as file:
        ...     _ = file.write(b"done")
        """
        mine, place = bearer(lease), _Place.of(path)
        with place.fresh() as (file, temporary):
            yield file
            _to_disk(file)
            with place.locked():
                place.raise_mark(mine)
                place.put(temporary, place.path)

    def token(self, path: Path) -> int | None:
        """Return the highest token that was let through, or None.

        >>> FileFence().token("/no/such/file")
        """
        return token_of(_Place.of(path).mark())

    def rebase(self, path: Path, token: int, *, reason: str) -> None:
        """Move the fence on purpose, down or up: every token from this one on is let in. Logged, with the reason."""
        place, to = _Place.of(path), check_token(token)
        check_reason(place.path, reason)
        with place.locked():
            before = place.mark()
            place.set_mark(Mark(to, ""))
        tell_moved(place.path, token_of(before), to, reason)

    def collect(self, folder: Path, floor: int) -> int:
        """Forget the marks below the floor of the files in a folder, also of files that are gone; return how many.

        A file without a mark in this folder refuses tokens below the floor from then on. Choose one that is below every token
        that may still be at work: one of a day ago is `int((time.time() - 86400) * 1e6)`.

        >>> import tempfile, types
        >>> folder, fence = tempfile.mkdtemp(), FileFence()
        >>> fence.write(types.SimpleNamespace(token=7, id="me"), os.path.join(folder, "report"), b"done")
        >>> fence.collect(folder, floor=1000), fence.token(os.path.join(folder, "report"))
        (1, 1000)
        """
        real = os.path.realpath(os.fspath(folder))
        # The floor first: whoever finds no mark from then on finds the floor.
        with (least := _Place(real, "")).locked():
            before = least.own_mark()
            in_force = max(check_token(floor), 0 if before is None else before.token)
            least.set_mark(Mark(in_force, ""))
        count = sum(_Place(real, name).forget(floor) for name in _marked(real))
        tell_collected(count, in_force)
        return count


class _Place:
    """A file, its mark and its lock; without a name it is its folder's floor."""

    def __init__(self, folder: str, name: str) -> None:
        self.path = os.path.join(folder, name)
        self._folder = folder
        self._mark = os.path.join(folder, f".{name}{MARK}" if name else MARK)
        self._lock = f"{self._mark}-lock"

    @classmethod
    def of(cls, path: Path) -> _Place:
        # What a link leads to is fenced and replaced, not the link.
        real = os.path.realpath(os.fspath(path))
        if os.path.exists(real) and not os.path.isfile(real):
            raise FencelockError(f"{real} is no regular file, and is not to be replaced by one", real)
        return cls(*os.path.split(real))

    @contextmanager
    def locked(self) -> Iterator[None]:
        import fcntl

        while True:
            try:
                descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except PermissionError:
                descriptor = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC)  # another user made it; NFS wants to write
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not _is_at(descriptor, self._lock):
                    continue  # collected while we waited: what others lock is a new one
                yield
                return
            finally:
                # A child that was forked meanwhile has the descriptor, too: closing ours would leave the lock to it.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def mark(self) -> Mark | None:
        """Return what a bearer is compared with: the file's own mark, or the floor, or None."""
        own = self.own_mark()
        return _Place(self._folder, "").own_mark() if own is None else own

    def own_mark(self) -> Mark | None:
        try:
            with open(self._mark, encoding="utf-8", newline="") as file:
                text = file.read().removesuffix("\n")
        except FileNotFoundError:
            return None
        if not text.partition(" ")[0].isdigit():
            raise FencelockError(f"{self._mark} is not the mark of a fence; find out what wrote to it", self.path)
        return Mark.parse(text)

    def forget(self, floor: int) -> bool:
        """Remove a mark below the floor, and the lock with it; return whether it was."""
        with self.locked():
            mark = self.own_mark()
            if mark is None or mark.token >= floor:
                return False
            os.unlink(self._mark)
            os.unlink(self._lock)
        return True

    def raise_mark(self, mine: Credentials) -> None:
        """Let a bearer pass; the lock is held."""
        mark = self.mark()
        admit(self.path, mine, mark)
        if mark is None or not mark.is_of(mine):
            self.set_mark(Mark.of(mine))

    def set_mark(self, mark: Mark) -> None:
        with self.fresh(at_least=stat.S_IRUSR | stat.S_IWUSR) as (file, temporary):
            file.write(f"{mark.text}\n".encode())
            _to_disk(file)
            self.put(temporary, self._mark)

    @contextmanager
    def fresh(self, at_least: int = 0) -> Iterator[tuple[IO[bytes], str]]:
        """Give a new file in the same folder, with owner and mode of the one to be replaced; gone at the end if not used."""
        temporary = f"{self._mark}-{os.urandom(8).hex()}"
        replaced = os.stat(self.path) if os.path.isfile(self.path) else None
        # Only its owner may open it until it has the mode of the file that it replaces.
        mode = 0o666 if replaced is None else 0o600
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with open(descriptor, "wb") as file:
                if replaced is not None:
                    _make_like(temporary, replaced, at_least)
                yield file, temporary
        finally:
            try:
                os.unlink(temporary)
            except FileNotFoundError:
                pass  # it has taken its place

    def put(self, temporary: str, place: str) -> None:
        """Put a file in its place, for good: the folder is on disk, too, when this returns."""
        os.replace(temporary, place)
        folder = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _make_like(path: str, other: os.stat_result, at_least: int) -> None:
    """Give a file the owner of another, as far as we may, and its mode."""
    mode = stat.S_IMODE(other.st_mode) | at_least
    mine = os.stat(path)
    if (mine.st_uid, mine.st_gid) != (other.st_uid, other.st_gid):
        try:
            os.chown(path, other.st_uid, other.st_gid)
        except PermissionError:
            mode &= ~(stat.S_ISUID | stat.S_ISGID)  # they would be about somebody else now
            with suppress(PermissionError):
                os.chown(path, -1, other.st_gid)
    os.chmod(path, mode)  # after that, as a change of the owner takes bits away


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _marked(folder: str) -> list[str]:
    """Return the names of the files in a folder that have marks, whether they are still there or not."""
    marks = (name for name in os.listdir(folder) if name.startswith(".") and name.endswith(MARK))
    return [name[1 : -len(MARK)] for name in marks if name != MARK]
