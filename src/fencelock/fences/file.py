"""The file fence: writes a new version beside the file, compares tokens under the file's own lock, and renames the new
version.

Beside `report.json` there are `.report.json.fence`, the mark, and `.report.json.fence-lock`, which is only ever locked.
The mark is on disk before the file changes, so that a crash between the two leaves the old file with the new mark, which
is safe. `.fence` has the `min_token` of a folder that was pruned.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO

from fencelock.errors import FencelockError
from fencelock.fences import Fenced, core
from fencelock.fences.core import HighWaterMark, TokenPair
from fencelock.runtime.both_apis import Api, BlockingApi, in_thread

Path = str | os.PathLike[str]
SUFFIX = ".fence"


class BaseFileFence(Api):
    """What both APIs share."""

    @in_thread
    def enter(self, lease: Fenced, path: Path) -> None:
        """Refuse older tokens from now on; raise StaleToken or LeaseLost. Call it before the first read."""
        pair, file = core.credentials_of(lease), _FencedFile.at(path)
        with file.locked():
            file.advance(pair)

    @in_thread
    def write(self, lease: Fenced, path: Path, data: bytes) -> None:
        """Replace the file's content, or raise StaleToken. The new content is on disk when this returns."""
        with self._replace(lease, path) as file:
            file.write(data)

    @contextmanager
    def _replace(self, lease: Fenced, path: Path) -> Iterator[IO[bytes]]:
        core.credentials_of(lease)
        fenced = _FencedFile.at(path)
        with fenced.temporary() as (file, temporary):
            yield file
            _sync(file)
            with fenced.locked():
                fenced.advance(core.credentials_of(lease))  # the lease may have ended while the file was written
                fenced.rename(temporary, fenced.path)

    @in_thread
    def token(self, path: Path) -> int | None:
        """Return the lowest token that the file accepts: the highest one so far, or the folder's `min_token`, or None.

        >>> FileFence().token("/no/such/file")
        """
        return core.token_of(_FencedFile.at(path).mark())

    @in_thread
    def rebase(self, path: Path, token: int, *, reason: str) -> None:
        """Move the fence of a file on purpose, down or up: it accepts every token from this one on. Logs the reason."""
        to, why, file = core.check_token(token), core.check_reason(reason), _FencedFile.at(path)
        with file.locked():
            before = file.mark()
            file.set_mark(HighWaterMark(to, ""))
        core.log_rebase(file.path, core.token_of(before), to, why)

    @in_thread
    def rebase_all(self, folder: Path, token: int, *, reason: str) -> int:
        """Move the fences of all files in a folder, and its `min_token`, to one token; return the number of files.

        Logs the reason.
        """
        to, why, real = core.check_token(token), core.check_reason(reason), os.path.realpath(os.fspath(folder))
        names = _marked_files(real)
        minimum = _FencedFile(real, "")
        for file in (minimum, *(_FencedFile(real, name) for name in names)):
            with file.locked():
                if file.own_mark() is not None:
                    file.set_mark(HighWaterMark(to, ""))
        core.log_rebase_all(len(names), to, why)
        return len(names)

    @in_thread
    def prune(self, folder: Path, min_token: int) -> int:
        """Remove the marks below `min_token` of the files in a folder, also of deleted files; return their number.

        From then on, a file without a mark in this folder refuses tokens below `min_token`. Choose one below every token that
        may still be in use: the token of a day ago is `int((time.time() - 86400) * 1e6)`.

        >>> import tempfile, types
        >>> folder, fence = tempfile.mkdtemp(), FileFence()
        >>> fence.write(types.SimpleNamespace(token=7, id="me"), os.path.join(folder, "report"), b"done")
        >>> fence.prune(folder, 1000), fence.token(os.path.join(folder, "report"))
        (1, 1000)
        """
        real = os.path.realpath(os.fspath(folder))
        # First min_token, then the marks: a holder that finds no mark from then on finds min_token.
        with (minimum := _FencedFile(real, "")).locked():
            in_force = max(core.check_token(min_token), core.token_of(minimum.own_mark()) or 0)
            minimum.set_mark(HighWaterMark(in_force, ""))
        count = sum(_FencedFile(real, name).remove_mark(min_token) for name in _marked_files(real))
        core.log_prune(count, in_force)
        return count


class FileFence(BaseFileFence, BlockingApi):
    """Replaces files, and refuses old tokens; the resource is the path.

    Call `enter` before the first read that a write depends on. For processes of one machine, or of several on a file system
    whose `flock` they share. Readers need no fence: they see the old file or the new one, complete.

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
    fencelock.errors.StaleToken: ...stock' refused token 33: it has accepted token 34. Stop, and acquire the lock again...
    """

    def replace(self, lease: Fenced, path: Path) -> AbstractContextManager[IO[bytes]]:
        """Open a new file, which replaces the old one at the end of the block; then raise StaleToken if the token is old.

        >>> import tempfile, types
        >>> path = os.path.join(tempfile.mkdtemp(), "report")
        >>> with FileFence().replace(types.SimpleNamespace(token=7, id="me"), path) as file:
        ...     _ = file.write(b"done")
        """
        return self._replace(lease, path)


class _FencedFile:
    """A file, its mark and its lock. With an empty name it is the `min_token` of its folder."""

    def __init__(self, folder: str, name: str) -> None:
        self.path = os.path.join(folder, name)
        self._folder = folder
        self._mark = os.path.join(folder, f".{name}{SUFFIX}" if name else SUFFIX)
        self._lock = f"{self._mark}-lock"

    @classmethod
    def at(cls, path: Path) -> _FencedFile:
        # The target of a symbolic link is fenced and replaced, not the link.
        real = os.path.realpath(os.fspath(path))
        if os.path.exists(real) and not os.path.isfile(real):
            raise FencelockError(f"{real} is not a regular file, so it cannot be replaced by one", real)
        return cls(*os.path.split(real))

    @contextmanager
    def locked(self) -> Iterator[None]:
        import fcntl

        while True:
            try:
                descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except PermissionError:
                descriptor = os.open(
                    self._lock, os.O_RDONLY | os.O_CLOEXEC
                )  # another user's file; NFS needs write access
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not _is_at(descriptor, self._lock):
                    continue  # pruned while we waited: others lock a new file
                yield
                return
            finally:
                # Unlock before closing: a forked child may have the descriptor, too, and would keep the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def mark(self) -> HighWaterMark | None:
        """Return what a token is compared with: the file's own mark, or the folder's `min_token`, or None."""
        own = self.own_mark()
        return _FencedFile(self._folder, "").own_mark() if own is None else own

    def own_mark(self) -> HighWaterMark | None:
        try:
            with open(self._mark, encoding="utf-8", newline="") as file:
                text = file.read().removesuffix("\n")
        except FileNotFoundError:
            return None
        if not text.partition(" ")[0].isdigit():
            raise FencelockError(f"{self._mark} is not the mark of a fence; find out what wrote to it", self.path)
        return HighWaterMark.parse(text)

    def remove_mark(self, min_token: int) -> bool:
        """Remove a mark below `min_token`, and its lock file; return whether it did."""
        with self.locked():
            mark = self.own_mark()
            if mark is None or mark.token >= min_token:
                return False
            os.unlink(self._mark)
            os.unlink(self._lock)
        return True

    def advance(self, pair: TokenPair) -> None:
        """Set the mark to this claim, or raise StaleToken. The caller holds the lock."""
        mark = self.mark()
        core.admit(self.path, pair, mark)
        if mark is None or not mark.is_of(pair):
            self.set_mark(HighWaterMark.of(pair))

    def set_mark(self, mark: HighWaterMark) -> None:
        with self.temporary(at_least=stat.S_IRUSR | stat.S_IWUSR) as (file, temporary):
            file.write(f"{mark.text}\n".encode())
            _sync(file)
            self.rename(temporary, self._mark)

    @contextmanager
    def temporary(self, at_least: int = 0) -> Iterator[tuple[IO[bytes], str]]:
        """Open a new file in the same folder, with the owner and mode of the old one. It is removed unless it is renamed."""
        temporary = f"{self._mark}-{os.urandom(8).hex()}"
        replaced = os.stat(self.path) if os.path.isfile(self.path) else None
        # Only the owner may open it until it has the mode of the file that it replaces.
        mode = 0o666 if replaced is None else 0o600
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with open(descriptor, "wb") as file:
                if replaced is not None:
                    _copy_owner_and_mode(temporary, replaced, at_least)
                yield file, temporary
        finally:
            with suppress(FileNotFoundError):  # it was renamed
                os.unlink(temporary)

    def rename(self, temporary: str, path: str) -> None:
        """Rename a file, and wait until the folder is on disk, too."""
        os.replace(temporary, path)
        folder = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _copy_owner_and_mode(path: str, other: os.stat_result, at_least: int) -> None:
    """Give a file the owner of another, as far as permissions allow, and its mode."""
    mode = stat.S_IMODE(other.st_mode) | at_least
    mine = os.stat(path)
    if (mine.st_uid, mine.st_gid) != (other.st_uid, other.st_gid):
        try:
            os.chown(path, other.st_uid, other.st_gid)
        except PermissionError:
            mode &= ~(stat.S_ISUID | stat.S_ISGID)  # they would grant the rights of another user
            with suppress(PermissionError):
                os.chown(path, -1, other.st_gid)
    os.chmod(path, mode)  # last, as a change of the owner clears bits


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _marked_files(folder: str) -> list[str]:
    """Return the names of the files in a folder that have marks, also of deleted files."""
    marks = (name for name in os.listdir(folder) if name.startswith(".") and name.endswith(SUFFIX))
    return [name[1 : -len(SUFFIX)] for name in marks if name != SUFFIX]
