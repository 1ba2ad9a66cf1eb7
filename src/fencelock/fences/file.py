"""The file fence: a new version is written beside the file, compared under the file's own lock, and put in its place.

Beside `report.json` there are `.report.json.fence`, the mark, and `.report.json.fence-lock`, which is only ever locked. The
mark is on disk before the file changes, so that a crash between the two leaves the old file behind the new mark: safe.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from fencelock.errors import FencelockError
from fencelock.fences import Fenced
from fencelock.fences.core import Credentials, Mark, bearer, check_reason, check_token, refusal, tell_moved

Path = str | os.PathLike[str]


class FileFence:
    """Replaces files, and refuses whoever comes with an older token than somebody before; the resource is the path.

    `enter` comes before the first read that a write depends on. For processes of one machine, or of several on a file system
    whose `flock` they share. Readers need nothing: they see the old file or the new one, whole.

    >>> import tempfile, types
    >>> old, new = types.SimpleNamespace(token=33, id="a"), types.SimpleNamespace(token=34, id="b")
    >>> path = os.path.join(tempfile.mkdtemp(), "stock")
    >>> fence = FileFence()
    >>> fence.write(path, old, b"100")
    >>> fence.enter(path, new)
    >>> with open(path) as file:
    ...     left = int(file.read()) - 5
    >>> fence.write(path, new, str(left).encode())
    >>> fence.write(path, old, b"90")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fencelock.errors.StaleToken: ...stock' refused token 33: a holder with token 34 has been here. Stop, and acquire anew
    """

    def enter(self, path: Path, lease: Fenced) -> None:
        """Keep older tokens out from now on, or raise StaleToken. Call it before the first read."""
        place = _Place(path)
        with place.locked():
            place.raise_mark(bearer(lease))

    def write(self, path: Path, lease: Fenced, data: bytes) -> None:
        """Replace the file by one with this content, unless the token is old. It is on disk when this returns."""
        with self.replace(path, lease) as file:
            file.write(data)

    @contextmanager
    def replace(self, path: Path, lease: Fenced) -> Iterator[IO[bytes]]:
        """Give a file to write to, which takes the place of the other at the end of the block, unless the token is old.

        >>> import tempfile, types
        >>> path = os.path.join(tempfile.mkdtemp(), "report")
        >>> with FileFence().replace(path, types.SimpleNamespace(token=7, id="me")) as file:
        ...     _ = file.write(b"done")
        """
        place, mine = _Place(path), bearer(lease)
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
        mark = _Place(path).mark()
        return None if mark is None else mark.token

    def rebase(self, path: Path, token: int, *, reason: str) -> None:
        """Move the fence on purpose, down or up: every token from this one on is let in. Logged, with the reason."""
        place, to = _Place(path), check_token(token)
        check_reason(place.path, reason)
        with place.locked():
            before = place.mark()
            place.set_mark(Mark(to, ""))
        tell_moved(place.path, None if before is None else before.token, to, reason)


class _Place:
    """A file, its mark and its lock."""

    def __init__(self, path: Path) -> None:
        # What a link leads to is fenced and replaced, not the link.
        self.path = os.path.realpath(os.fspath(path))
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise FencelockError(f"{self.path} is no regular file, and is not to be replaced by one", self.path)
        self._folder, name = os.path.split(self.path)
        self._mark = os.path.join(self._folder, f".{name}.fence")
        self._lock = f"{self._mark}-lock"

    @contextmanager
    def locked(self) -> Iterator[None]:
        import fcntl

        # Never removed: whoever waits for it must wait for the same file.
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:
            descriptor = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC)  # another user made it; NFS wants to write
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            # A child that was forked meanwhile has the descriptor, too: closing ours would leave the lock to it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def mark(self) -> Mark | None:
        try:
            with open(self._mark, encoding="utf-8", newline="") as file:
                text = file.read()
        except FileNotFoundError:
            return None
        token, _, id_ = text.removesuffix("\n").partition(" ")
        if not token.isdigit():
            raise FencelockError(f"{self._mark} is not the mark of a fence; find out what wrote to it", self.path)
        return Mark(int(token), id_)

    def raise_mark(self, mine: Credentials) -> None:
        """Let a bearer pass; the lock is held."""
        mark = self.mark()
        if mark is not None and not mark.admits(mine):
            raise refusal(self.path, mine, mark)
        if mark is None or not mark.is_of(mine):
            self.set_mark(Mark(*mine))

    def set_mark(self, mark: Mark) -> None:
        with self.fresh(at_least=stat.S_IRUSR | stat.S_IWUSR) as (file, temporary):
            file.write(f"{mark.token} {mark.id}\n".encode())
            _to_disk(file)
            self.put(temporary, self._mark)

    @contextmanager
    def fresh(self, at_least: int = 0) -> Iterator[tuple[IO[bytes], str]]:
        """Give a new file in the same folder, with owner and mode of the one to be replaced; gone at the end if not used."""
        temporary = f"{self._mark}-{os.urandom(8).hex()}"
        file = open(temporary, "xb")  # noqa: SIM115
        try:
            with file:
                if os.path.exists(self.path):
                    _make_like(temporary, os.stat(self.path), at_least)
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
