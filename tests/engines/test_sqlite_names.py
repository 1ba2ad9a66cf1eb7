"""One database under two names has two logs: SQLite keeps nobody apart there, so it is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fencelock
from fencelock.engines.sqlite.paths import other_names


def take(path: Path) -> int:
    """Take a lock there, and give it back."""
    with fencelock.connect(f"sqlite:///{path}") as locks, locks.lock("x") as lease:
        return lease.token


def test_hard_links(tmp_path: Path) -> None:
    """A database with two names is refused under both, and is good again with one."""
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    token = take(first)
    os.link(first, second)
    for path in (first, second):
        with pytest.raises(fencelock.EngineUnavailable, match="hard links"):
            take(path)
    first.unlink()
    assert take(second) > token


def test_symbolic_link(tmp_path: Path) -> None:
    """A symbolic link is another way to the same name."""
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "locks.db")
    with fencelock.connect(f"sqlite:///{tmp_path}/locks.db") as locks, locks.lock("x"):
        with fencelock.connect(f"sqlite:///{link}") as others:
            assert others.lock("x").try_acquire() is None


def test_mounted_file(tmp_path: Path) -> None:
    """A file that was mounted by itself, as containers do, lacks the log beside it; a mounted folder is fine."""
    path = tmp_path / "the locks.db"
    path.touch()
    file, folder = (str(place).replace(" ", "\\040") for place in (path, tmp_path))
    line = "36 35 98:0 /mnt1 {} rw,noatime master:1 - ext4 /dev/root rw\n"
    assert other_names(str(path), line.format(folder)) is None
    problem = other_names(str(path), line.format(folder) + line.format(file))
    assert problem is not None
    assert "mount its folder" in problem
