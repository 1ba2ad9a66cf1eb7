"""`make demo` tells the truth: an update is lost without the fence, and none with it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_demo_shows_the_loss_and_the_refusal(tmp_path: Path) -> None:
    """The demo needs nothing but Python, loses an update without the fence, and refuses the stale write with it."""
    environment = {**os.environ, "HOME": str(tmp_path), "VIRTUAL_ENV": ""}
    done = subprocess.run(["make", "demo"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    bare, fenced = re.findall(r"(\d+) writes were reported as done; the record says (\d+)", done.stdout)
    assert int(bare[0]) > int(bare[1]), "the half without the fence lost nothing"
    assert int(fenced[0]) == int(fenced[1])
    first, _, second = done.stdout.partition("2. The same with the fence")
    assert "OVER" in first
    assert "REFUSED" not in first
    assert "REFUSED" in second
    assert "OVER" not in second
