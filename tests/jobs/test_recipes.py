"""The recipes of "Run a job once" and its example program run with the real packages, on several hosts at once."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/run-a-job-once.md").read_text("utf-8")
YEARLY = ['"0 0 1 1 *"', "--within", "400d"]
"""A slot that is due at any time, so that no test depends on the minute at which it runs."""

APSCHEDULER = """
import threading
from datetime import datetime, timezone
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED

done = threading.Event()
failed = []
scheduler.add_listener(lambda event: (failed.append(event.exception), done.set()), EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
(job,) = scheduler.get_jobs()
job.modify(next_run_time=datetime.now(timezone.utc))
scheduler.start()
assert done.wait(30) and failed == [None], failed
scheduler.shutdown()
"""

CELERY = """
from celery.beat import Scheduler

app.conf.task_always_eager = app.conf.task_eager_propagates = True
beats = [Scheduler(app), Scheduler(app)]
for beat in beats:
    beat.apply_entry(beat.schedule["report"])
"""


def block(language: str) -> str:
    """Return the page's only block of this kind."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)
    return str(found)


def start(argv: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a program in a folder with a database of its own."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FENCELOCK_URL": f"sqlite:///{folder}/locks.db",
    }
    return subprocess.Popen(
        argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_on_hosts(argv: list[str], folder: Path, hosts: int) -> list[str]:
    """Run a program on several hosts at once; return the lines that they printed."""
    lines = []
    for process in [start(argv, folder) for _ in range(hosts)]:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        lines += out.splitlines()
    return lines


def make_script(folder: Path) -> None:
    """Make the command of the recipes."""
    script = folder / "bill-customers"
    script.write_text("#!/bin/sh\necho bill\n")
    script.chmod(0o755)


def with_slot(recipe: str) -> str:
    """Return a recipe in Python with a slot that is due at any time."""
    assert "every=3600" in recipe
    return recipe.replace("every=3600", "every=31536000, within=40000000")


def test_crontab_on_ten_hosts(tmp_path: Path) -> None:
    """One of ten hosts runs the command of the crontab; all exit with 0."""
    make_script(tmp_path)
    command = block("crontab").split(maxsplit=5)[5].replace('"0 2 * * *"', " ".join(YEARLY))
    assert run_on_hosts(shlex.split(command), tmp_path, 10) == ["bill"]


def test_two_pods_of_a_cronjob_run_the_slot_once(tmp_path: Path) -> None:
    """Of two pods that a CronJob starts for one slot, one runs the command."""
    make_script(tmp_path)
    (found,) = re.findall(r"command: (\[.*\])", block("yaml"))
    words = [word for given in json.loads(found) for word in ([given] if given != "0 2 * * *" else YEARLY)]
    command = [word.strip('"') for word in words]
    assert command[:2] == ["fencelock", "cron"]
    assert run_on_hosts(command, tmp_path, 2) == ["bill"]


@pytest.mark.parametrize(
    ("package", "program"), [("apscheduler", APSCHEDULER), ("celery", CELERY)], ids=["apscheduler", "celery"]
)
def test_two_hosts_with_schedulers_run_the_slot_once(tmp_path: Path, package: str, program: str) -> None:
    """Two hosts whose schedulers are due at the same time run the slot once."""
    (tmp_path / "jobs.py").write_text(with_slot(block(f"python {package}")) + program)
    lines = run_on_hosts([sys.executable, "jobs.py"], tmp_path, 2)
    assert [line[:10] for line in lines] == ["report for"]


def test_two_processes_of_the_example_run_each_slot_once(tmp_path: Path) -> None:
    """Two processes of examples/nightly_job.py run each slot once between them."""
    lines = run_on_hosts([sys.executable, str(ROOT / "examples/nightly_job.py"), "--seconds", "5"], tmp_path, 2)
    ran = Counter(line.split()[5].rstrip(",") for line in lines if "bill the customers" in line)
    assert len(ran) >= 2
    assert set(ran.values()) == {1}
    assert any(": succeeded on" in line for line in lines)
