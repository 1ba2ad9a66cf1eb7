"""Write the --help output of every command into docs/cli.md: `make docs`. A test compares them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/cli.md"
BLOCK = re.compile(r"```console\n\$ fencelock ([a-z ]*)--help\n.*?```\n", re.DOTALL)


def help_block(command: str) -> str:
    """Return the block of the page with the help of a command, or of fencelock itself for ""."""
    arguments = [sys.executable, "-m", "fencelock", *command.split(), "--help"]
    done = subprocess.run(arguments, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True)
    return f"```console\n$ fencelock {command}{' ' if command else ''}--help\n{done.stdout}```\n"


def page() -> str:
    """Return the page with the current help texts."""
    return BLOCK.sub(lambda found: help_block(found[1].strip()), PAGE.read_text("utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
