"""The file fence: its files, prune, killed writers, forks, other owners, unusual ids."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fencelock import FencelockError, StaleToken
from fencelock.fences.file import FileFence, _copy_owner_and_mode, _FencedFile
from tests.fences.fake_lease import fake_lease
from tests.support.processes import Child


def test_only_the_newest_token_writes_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stale write changes nothing and leaves no file behind; the file's mode and links stay; a moved mark is logged."""
    fence, path, link = FileFence(), tmp_path / "stock", tmp_path / "link"
    link.symlink_to(path)
    fence.write(fake_lease(33), path, b"100")
    path.chmod(0o640)
    fence.enter(fake_lease(34), link)
    with fence.replace(fake_lease(34), link) as file:
        file.write(b"95")
    for stale in (fake_lease(33), fake_lease(34, "another claim")):
        with pytest.raises(StaleToken) as caught:
            fence.write(stale, path, b"0")
        assert (caught.value.token, caught.value.seen, caught.value.name) == (stale.token, 34, str(path))
    assert path.read_bytes() == b"95"
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    fence.rebase(path, 5, reason="another engine")
    assert "moved from token 34 to token 5: another engine" in caplog.text
    fence.write(fake_lease(5), path, b"90")
    assert fence.token(path) == 5
    with pytest.raises(RuntimeError, match="half way"), fence.replace(fake_lease(6), path) as file:
        file.write(b"0")
        raise RuntimeError("half way")
    assert (path.read_bytes(), fence.token(path)) == (b"90", 5)
    assert sorted(os.listdir(tmp_path)) == [".stock.fence", ".stock.fence-lock", "link", "stock"]
    (tmp_path / ".stock.fence").write_text("x")
    with pytest.raises(FencelockError, match="is not the mark of a fence"):
        fence.enter(fake_lease(7), path)


def test_prune(tmp_path: Path) -> None:
    """Prune removes marks below min_token and their lock files; files without a mark refuse tokens below min_token."""
    fence, old, new = FileFence(), tmp_path / "old", tmp_path / "new"
    fence.write(fake_lease(33), old, b"1")
    fence.write(fake_lease(1000), new, b"1")
    old.unlink()
    assert fence.prune(tmp_path, 1000) == 1
    assert fence.prune(tmp_path, 500) == 0
    assert sorted(os.listdir(tmp_path)) == [".fence", ".fence-lock", ".new.fence", ".new.fence-lock", "new"]
    for path in (old, tmp_path / "never seen"):
        with pytest.raises(StaleToken, match="its fence was set to token 1000"):
            fence.write(fake_lease(999), path, b"2")
        fence.write(fake_lease(1000), path, b"2")


def test_prune_while_others_wait_for_the_lock(tmp_path: Path) -> None:
    """A writer that waits for a lock file which is pruned meanwhile does not lock the removed file."""
    fence, path = FileFence(), tmp_path / "count"
    path.write_bytes(b"0")
    tokens, done = itertools.count(1), []

    def add() -> None:
        for _ in range(60):
            mine = fake_lease(next(tokens), f"owner {threading.get_ident()}")
            try:
                fence.enter(mine, path)
                fence.write(mine, path, str(int(path.read_bytes()) + 1).encode())
            except StaleToken:
                continue
            done.append(mine.token)

    adders = [threading.Thread(target=add) for _ in range(4)]
    for thread in adders:
        thread.start()
    removed = 0
    while any(thread.is_alive() for thread in adders):
        removed += fence.prune(tmp_path, next(tokens))
    for thread in adders:
        thread.join()
    assert removed > 0
    assert len(done) > 0
    assert int(path.read_bytes()) == len(done)


def test_file_writer_killed(tmp_path: Path) -> None:
    """A writer that is killed at any moment leaves a complete file and a mark that is at least as new."""
    program = (
        "import sys, types\nfrom fencelock.fences.file import FileFence\nprint('on', flush=True)\ntoken = int(sys.argv[2])\n"
        "while True:\n    token += 1\n"
        "    FileFence().write(types.SimpleNamespace(token=token, id='a'), sys.argv[1], str(token).encode() * 1000)\n"
    )
    path, fence, token = tmp_path / "stock", FileFence(), 0
    for pause in (0.0, 0.005, 0.02):
        with Child.of_source(program, str(path), str(token)) as writer:
            assert writer.read_line() == "on"
            while not path.exists():
                pass
            time.sleep(pause)
        written = path.read_text()
        length = len(written) // 1000
        assert written == written[:length] * 1000
        token = fence.token(path) or 0
        assert token >= int(written[:length])


FORK = """
import os, signal, sys, types
from fencelock.fences.file import FileFence, _FencedFile
path = sys.argv[1]
with _FencedFile.at(path).locked():                 # another thread of the program forks at this moment
    child = os.fork()
    if child == 0:
        signal.pause()                      # a worker that runs for a long time
try:
    signal.alarm(20)
    FileFence().write(types.SimpleNamespace(token=1, id="a"), path, b"written")
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A child that was forked while the parent held the file's lock does not keep the lock."""
    path = tmp_path / "stock"
    subprocess.run([sys.executable, "-c", FORK, str(path)], check=True, timeout=60)
    assert path.read_bytes() == b"written"


@pytest.mark.parametrize("id", ["a\rb", "a\r\nb", "a\nb", "a\n", " a ", "ö", "\x85\u2028"])
def test_unusual_ids(tmp_path: Path, id: str) -> None:
    """With any id, the same claim is accepted again, and another claim is refused."""
    fence, path = FileFence(), tmp_path / "stock"
    fence.write(fake_lease(34, id), path, b"1")
    fence.write(fake_lease(34, id), path, b"2")
    with pytest.raises(StaleToken):
        fence.write(fake_lease(34, id + "x"), path, b"3")
    assert path.read_bytes() == b"2"


def test_temporary_files_are_never_more_open_than_the_file_they_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a file that only its owner may read is replaced, no other user can open the new version."""
    fence, path = FileFence(), tmp_path / "secret"
    path.write_bytes(b"0")
    path.chmod(0o600)
    modes: list[int] = []

    def make_like(temporary: str, *rest: Any) -> None:
        modes.append(os.stat(temporary).st_mode & 0o777)
        _copy_owner_and_mode(temporary, *rest)

    monkeypatch.setattr("fencelock.fences.file._copy_owner_and_mode", make_like)
    with fence.replace(fake_lease(34), path) as file:
        file.write(b"1")
    assert modes == [0o600, 0o600]  # the new version and the mark, before they got the mode of the file
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / ".secret.fence").stat().st_mode & 0o777 == 0o600


def test_a_new_file_has_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    """A new file has the same mode as other new files of this process."""
    other = tmp_path / "other"
    other.touch()
    FileFence().write(fake_lease(34), tmp_path / "new", b"1")
    assert (tmp_path / "new").stat().st_mode == other.stat().st_mode


def test_owner_stays(tmp_path: Path) -> None:
    """A replaced file keeps its owner and its mode."""
    fence, path = FileFence(), tmp_path / "stock"
    path.write_bytes(b"0")
    # Only root can give files away; others can choose among their groups.
    uid, gid = (1234, 5678) if os.geteuid() == 0 else (os.geteuid(), os.getgroups()[-1])
    os.chown(path, uid, gid)
    path.chmod(0o4640)
    fence.write(fake_lease(34), path, b"1")
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (uid, gid, 0o4640)


def test_mark_of_a_file_that_its_owner_may_not_read(tmp_path: Path) -> None:
    """The process that wrote the mark can read it, with any mode of the file."""
    fence, path = FileFence(), tmp_path / "stock"
    path.write_bytes(b"0")
    path.chmod(0o040)
    fence.write(fake_lease(34), path, b"1")
    assert path.stat().st_mode & 0o777 == 0o040
    assert os.stat(_FencedFile.at(path)._mark).st_mode & 0o777 == 0o640


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_folders_and_devices_are_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """The fence refuses a folder or a device before it writes anything."""
    place = tmp_path / "place"
    make(place)
    with pytest.raises(FencelockError, match="not a regular file"):
        FileFence().enter(fake_lease(34), place)
    with pytest.raises(FencelockError, match="not a regular file"):
        FileFence().write(fake_lease(34), place, b"1")
    assert os.listdir(tmp_path) == ["place"]
    assert not place.is_file()
