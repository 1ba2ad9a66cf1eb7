"""Measure the time of `fencelock run x -- true` from start to end: cron starts such commands thousands of times."""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.harness import Goal, Run, interleaved, show


def command(*argv: str, url: str) -> Run:
    environment = {**os.environ, "FENCELOCK_URL": url}

    def run(repetitions: int) -> None:
        for _ in range(repetitions):
            subprocess.run(argv, check=True, env=environment, stdout=subprocess.DEVNULL)

    return run


def main(rounds: int) -> list[Goal]:
    # If PYTHONDONTWRITEBYTECODE is set, the package is not compiled yet.
    compileall.compile_dir(str(Path(__file__).parent.parent / "src"), quiet=1)
    script = str(Path(sys.executable).parent / "fencelock")
    base = "python -c 'import sqlite3, json'"
    with tempfile.TemporaryDirectory(prefix="fencelock-bench-") as folder:
        url = f"sqlite:///{folder}/startup.db"
        timings = interleaved(
            {
                base: command(sys.executable, "-c", "import sqlite3, json", url=url),
                "python -c pass": command(sys.executable, "-c", "pass", url=url),
                "fencelock run x -- true": command(script, "run", "x", "--", "true", url=url),
                "fencelock ls": command(script, "ls", url=url),
            },
            rounds,
            repetitions=3,
        )
    show("Start-up, by wall time", timings, base=base)
    ratio = timings["fencelock run x -- true"].over(timings[base])
    return [Goal("`fencelock run x -- true` ÷ `python -c 'import sqlite3, json'`", ratio, 3.0)]
