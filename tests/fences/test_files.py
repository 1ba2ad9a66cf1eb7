"""The file fence beside forks, other owners, and ids that are hard to write down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fencelock import FencelockError, StaleToken
from fencelock.fences import Fenced
from fencelock.fences.file import FileFence, _Place


def bearer(token: int, id: str | None = None) -> Fenced:
    return SimpleNamespace(token=token, id=id or f"holder of {token}")


FORK = """
import os, signal, sys, types
from fencelock.fences.file import FileFence, _Place
path = sys.argv[1]
ready, told = os.pipe()
with _Place.of(path).locked():                 # another thread of the program forks at this moment
    child = os.fork()
    if child == 0:
        signal.pause()                      # a worker that goes on for a long time
try:
    signal.alarm(20)
    FileFence().write(path, types.SimpleNamespace(token=1, id="a"), b"written")
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A process that is forked while a thread has the file's lock does not hold up others for as long as it lives."""
    path = tmp_path / "stock"
    subprocess.run([sys.executable, "-c", FORK, str(path)], check=True, timeout=60)
    assert path.read_bytes() == b"written"


@pytest.mark.parametrize("id", ["a\rb", "a\r\nb", "a\nb", "a\n", " a ", "ö", "\x85\u2028"])
def test_ids(tmp_path: Path, id: str) -> None:
    """Whatever the id, its owner passes again, and another one does not."""
    fence, path = FileFence(), tmp_path / "stock"
    fence.write(path, bearer(34, id), b"1")
    fence.write(path, bearer(34, id), b"2")
    with pytest.raises(StaleToken):
        fence.write(path, bearer(34, id + "x"), b"3")
    assert path.read_bytes() == b"2"


def test_owner_stays(tmp_path: Path) -> None:
    """A file that belongs to somebody else still does after it was replaced, with its mode."""
    fence, path = FileFence(), tmp_path / "stock"
    path.write_bytes(b"0")
    # Only root can give files away; others can choose among their groups.
    uid, gid = (1234, 5678) if os.geteuid() == 0 else (os.geteuid(), os.getgroups()[-1])
    os.chown(path, uid, gid)
    path.chmod(0o4640)
    fence.write(path, bearer(34), b"1")
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (uid, gid, 0o4640)


def test_mark_of_a_file_that_its_owner_may_not_read(tmp_path: Path) -> None:
    """The mark can be read by whoever wrote it, whatever the mode of the file."""
    fence, path = FileFence(), tmp_path / "stock"
    path.write_bytes(b"0")
    path.chmod(0o040)
    fence.write(path, bearer(34), b"1")
    assert path.stat().st_mode & 0o777 == 0o040
    assert os.stat(_Place.of(path)._mark).st_mode & 0o777 == 0o640


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A folder or a device is refused before anything is written, and not replaced by a file with the content."""
    place = tmp_path / "place"
    make(place)
    with pytest.raises(FencelockError, match="no regular file"):
        FileFence().enter(place, bearer(34))
    with pytest.raises(FencelockError, match="no regular file"):
        FileFence().write(place, bearer(34), b"1")
    assert os.listdir(tmp_path) == ["place"]
    assert not place.is_file()
