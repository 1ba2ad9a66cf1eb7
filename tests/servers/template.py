"""The initial data of an engine: created once, then copied."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.servers.packages import CACHE, Program
from tests.servers.process import Account

TEMPLATES = CACHE / "templates"


def fill(data: Path, name: str, recipe: Sequence[str], make: Callable[[], None]) -> None:
    """Fill an empty data folder from the template of this recipe; if there is none, create the data and keep a copy.

    If the cache cannot be written, the data are created each time.
    """
    digest = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:12]
    template = TEMPLATES / f"{name}-{digest}"
    if template.is_dir():
        try:
            _copy(template, data)
            return
        except subprocess.CalledProcessError:
            for entry in list(data.iterdir()):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    make()
    try:
        TEMPLATES.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{name}-partial-", dir=TEMPLATES))
    except OSError:
        return
    try:
        _copy(data, partial)
        partial.rename(template)
    except (OSError, subprocess.CalledProcessError):
        # The disk is full, or another run was faster.
        shutil.rmtree(partial, ignore_errors=True)


def run(
    program: Program, *arguments: str, folder: Path, account: Account | None = None, feed: str | None = None
) -> str:
    """Run a tool of an engine and wait for its end."""
    done = subprocess.run(
        [str(program.path), *arguments],
        input=feed or "",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=120.0,
        cwd=folder,
        env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": str(folder), **program.environment()},
        user=account.uid if account is not None else None,
        group=account.gid if account is not None else None,
        extra_groups=[] if account is not None else None,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program.path.name} ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def _copy(source: Path, target: Path) -> None:
    subprocess.run(
        ["cp", "-a", "--reflink=auto", f"{source}/.", str(target)], check=True, stderr=subprocess.DEVNULL, timeout=120.0
    )
