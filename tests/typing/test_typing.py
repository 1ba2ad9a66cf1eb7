"""The types of the public API are checked by mypy, strictly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fencelock

HERE = Path(__file__).parent


def test_types_of_the_public_api() -> None:
    """mypy in strict mode finds in api.py exactly the types and mistakes that are written there."""
    outcome = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", str(HERE / "api.py")],
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_package_has_py_typed() -> None:
    """The package has the marker py.typed."""
    assert (Path(fencelock.__file__).parent / "py.typed").exists()
