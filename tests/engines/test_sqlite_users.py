"""Several users of one SQLite database: who may use it, who is refused, and that nobody locks out anybody else."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fencelock
from fencelock import EngineUnavailable
from fencelock.engines.sqlite import opening as opening_module
from fencelock.engines.sqlite.access import foreign_side_file, protected, user

ALICE, BOB, TEAM = 65533, 65534, 65500

USE = """
import sys, json, os, fencelock
os.umask(int(sys.argv[2], 8))
try:
    with fencelock.connect("sqlite:///" + sys.argv[1]) as locks:
        if sys.argv[3] == "look": answer = list(locks.names())
        else:
            with locks.lock("x", timeout=5) as lease: answer = lease.token
            if sys.argv[3] == "crash": print(json.dumps(answer), flush=True); os._exit(0)
except fencelock.EngineUnavailable as error:
    answer = str(error)
print(json.dumps(answer))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder like /tmp, which everybody may reach and write in."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o1777)
        yield Path(name)


def use(uid: int, path: Path, how: str = "lock", *, umask: str = "022", groups: str = "", gid: int = 0) -> Any:
    """Use the database as that user; return the token, the names or the error."""
    who = ["--reuid", str(uid), "--regid", str(gid or uid), *(["--groups", groups] if groups else ["--clear-groups"])]
    outcome = subprocess.run(
        ["setpriv", *who, sys.executable, "-c", USE, str(path), umask, how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return json.loads(outcome.stdout)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the files of the folder, each with its owner and size."""
    return {file.name: (file.stat().st_uid, file.stat().st_size) for file in folder.iterdir()}


@pytest.mark.parametrize("how", ["look", "lock"])
def test_other_user_is_refused_and_changes_nothing(folder: Path, how: str) -> None:
    """Who may not write the database is told whose it is, leaves no files, and its owner goes on."""
    path = folder / "locks.db"
    token = use(ALICE, path)
    before = files(folder)
    refusal = use(BOB, path, how)
    assert f"{path} belongs to user {user(ALICE)} and user {user(BOB)} may not write it" in refusal
    assert files(folder) == before
    assert use(ALICE, path) > token


def test_other_user_is_refused_while_in_use(folder: Path) -> None:
    """The same holds while the owner's log is there, and after the owner was killed."""
    path = folder / "locks.db"
    token = use(ALICE, path, "crash")
    before = files(folder)
    assert set(before) == {"locks.db", "locks.db-wal", "locks.db-shm"}
    assert "may not write it" in use(BOB, path)
    assert files(folder) == before
    assert use(ALICE, path) > token


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
def test_files_that_another_user_left(folder: Path, suffix: str) -> None:
    """The owner of the database is told which file is in the way, whose it is, and what to do; that helps."""
    path = folder / "locks.db"
    token = use(ALICE, path)
    side = Path(f"{path}{suffix}")
    side.touch(mode=0o644)
    os.chown(side, BOB, BOB)
    refusal = use(ALICE, path)
    assert f"{side} belongs to user {user(BOB)}, and user {user(ALICE)} may not write it" in refusal
    assert "deleted" in refusal
    subprocess.run(["chown", f"--reference={path}", str(side)], check=True)
    assert f"chown --reference={path} {side}" in refusal
    assert use(ALICE, path) > token


def test_log_with_commits_is_not_to_be_deleted(folder: Path) -> None:
    """Nobody is advised to delete a log that may have commits which are nowhere else."""
    path = folder / "locks.db"
    use(ALICE, path, "crash")
    os.chown(f"{path}-wal", BOB, BOB)
    refusal = use(ALICE, path)
    assert f"{path}-wal belongs to user {user(BOB)}" in refusal
    assert "delete" not in refusal


def test_log_without_its_database(folder: Path) -> None:
    """A log that another user left when the database itself is gone can only be deleted."""
    path = folder / "locks.db"
    use(BOB, path, "crash")
    path.unlink()
    refusal = use(ALICE, path)
    assert f"{path}-wal belongs to user {user(BOB)}" in refusal
    assert "deleted" in refusal
    assert "chown" not in refusal
    assert not path.exists()


def test_root_does_not_lock_out_the_owner(folder: Path) -> None:
    """What root leaves beside a user's database belongs to that user."""
    path = folder / "locks.db"
    token = use(ALICE, path)
    for _ in range(2):
        assert (root := use(0, path, "crash")) > token
        assert (token := use(ALICE, path, "crash")) > root


def test_common_group(folder: Path) -> None:
    """With umask 002 and a folder of the common group that hands it on, users share a database, crashes or not."""
    os.chown(folder, 0, TEAM)
    os.chmod(folder, 0o2770)
    path = folder / "locks.db"
    turns = [(uid, how) for how in ("lock", "crash", "crash", "lock") for uid in (ALICE, BOB)]
    tokens = [use(uid, path, how, umask="002", groups=str(TEAM)) for uid, how in turns]
    assert tokens == sorted(set(tokens))
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


def test_common_group_with_any_umask_once_it_is_there(folder: Path) -> None:
    """Only the process that creates the database needs the umask: SQLite gives the files beside it the same mode."""
    os.chown(folder, 0, TEAM)
    os.chmod(folder, 0o2770)
    path = folder / "locks.db"
    tokens = [use(ALICE, path, "crash", umask="002", groups=str(TEAM))]
    tokens += [use(uid, path, "crash", umask="077", groups=str(TEAM)) for uid in (BOB, ALICE, BOB, ALICE)]
    assert tokens == sorted(set(tokens))


def test_never_writable_for_all(folder: Path) -> None:
    """A daemon with umask 000 does not make a database that everybody may write."""
    use(ALICE, folder / "locks.db", umask="000")
    assert stat.S_IMODE((folder / "locks.db").stat().st_mode) == 0o664


def test_file_mode_that_is_set_late(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits for a file that gets its mode a moment after its creation, as SQLite does it."""
    answers = iter(["it may not be written", "it may not be written", None])
    monkeypatch.setattr(opening_module, "foreign_side_file", lambda path: next(answers))
    with fencelock.connect(f"sqlite:///{folder}/locks.db") as locks, locks.lock("x"):
        assert list(answers) == []


@pytest.mark.parametrize(
    ("level", "mode", "owner", "around", "refused"),
    [
        ("0", 0o1777, ALICE, 0, False),
        ("1", 0o1777, ALICE, 0, True),
        ("2", 0o1777, ALICE, 0, True),
        ("1", 0o1770, ALICE, 0, False),
        ("2", 0o1770, ALICE, 0, True),
        ("2", 0o0777, ALICE, 0, False),
        ("2", 0o1777, os.geteuid(), BOB, False),
        ("2", 0o1777, ALICE, ALICE, False),
    ],
)
def test_protected_by_the_kernel(level: str, mode: int, owner: int, around: int, refused: bool) -> None:
    """In a sticky folder Linux refuses another user's file even to root, unless the folder is of the same user."""

    def status(mode: int, uid: int) -> os.stat_result:
        return os.stat_result((mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))

    assert protected(status(0o100666, owner), status(0o40000 | mode, around), level) is refused


def test_no_side_files(folder: Path) -> None:
    """A database alone has nothing in its way."""
    assert foreign_side_file(str(folder / "locks.db")) is None


# ---------------------------------------------------------------------------- paths that cannot be a database


def test_paths_that_cannot_be_a_database(folder: Path) -> None:
    """The message says what is wrong with the path, as far as it can be found out."""
    (folder / "file").touch()
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(folder / "gone" / "locks.db")
    for place, message in {
        "x/y/locks.db": f"the folder {folder}/x/y does not exist; create it",
        "": f"{folder} is a folder, not a database file",
        "file/locks.db": f"{folder}/file is a file, not a folder",
        "file/deep/locks.db": f"{folder}/file is a file, not a folder",
        "pipe": f"{folder}/pipe is not a regular file",
        "link": f"the folder {folder}/gone does not exist; create it",
    }.items():
        with fencelock.connect(f"sqlite:///{folder}/{place}") as locks:
            with pytest.raises(EngineUnavailable) as caught:
                locks.inspect("x")
            assert message in str(caught.value)


def test_folders_that_this_user_may_not_use(folder: Path) -> None:
    """Who may not write in a folder, or not even look into it, is told so by name."""
    assert f"user {user(BOB)} may not write in /etc;" in use(BOB, Path("/etc/locks.db"))
    (folder / "closed").mkdir(mode=0o700)
    assert f"user {user(BOB)} may not look into {folder}/closed" in use(BOB, folder / "closed" / "locks.db")
    assert f"user {user(BOB)} may not look into {folder}/closed" in use(BOB, folder / "closed" / "deep" / "locks.db")


@pytest.mark.parametrize("content", [None, b"not a database" * 100], ids=["no folder", "driver's error"])
def test_traceback_shows_no_internals(folder: Path, content: bytes | None) -> None:
    """The traceback of a failed open has the error and, if there is one, the driver's own: nothing internal."""
    path = folder / "locks.db" if content is not None else folder / "missing" / "locks.db"
    if content is not None:
        path.write_bytes(content)
    with fencelock.connect(f"sqlite:///{path}") as locks:
        for action in (locks.lock("x").acquire, lambda: locks.inspect("x"), lambda: list(locks.names())):
            with pytest.raises(EngineUnavailable) as caught:
                action()
            shown = "".join(traceback.format_exception(caught.value))
            assert "DatabaseBusy" not in shown
            assert shown.count("Traceback") == (1 if content is None else 2)
