"""`fencelock once`, `fencelock cron` and `fencelock jobs`: real processes on one database."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing

from tests.cli.conftest import UNTIL_TOLD, Cli
from tests.support.waiting import LONG, eventually_blocking

APPEND = 'echo "$FENCELOCK_SLOT $FENCELOCK_ATTEMPT $FENCELOCK_TOKEN" >> runs'


def runs(cli: Cli) -> list[list[str]]:
    """Return what the commands have written."""
    path = cli.folder / "runs"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_once_on_several_hosts(cli: Cli) -> None:
    """Of five processes that are called for a slot, one runs the command; all exit with 0; another slot runs again."""
    started = [cli.start("once", "bill", "monday", "--", "sh", "-c", APPEND) for _ in range(5)]
    assert [process.wait(LONG) for process in started] == [0] * 5
    assert [run[:2] for run in runs(cli)] == [["monday", "1"]]
    told = cli("once", "bill", "monday", "--verbose", "--", "sh", "-c", APPEND)
    assert (told.returncode, "ran before" in told.stderr) == (0, True)
    assert cli("once", "bill", "tuesday", "--", "sh", "-c", APPEND).returncode == 0
    assert cli("once", "bill", "monday", "--again", "--", "sh", "-c", APPEND).returncode == 0
    assert [run[:2] for run in runs(cli)] == [["monday", "1"], ["tuesday", "1"], ["monday", "2"]]


def test_once_returns_the_code_and_repeats_failures(cli: Cli) -> None:
    """The command's code comes out; a failed slot runs again only while it has attempts."""
    failing = ("--", "sh", "-c", f"{APPEND}; exit 3")
    assert cli("once", "bill", "monday", *failing).returncode == 3
    assert cli("once", "bill", "monday", *failing).returncode == 0
    assert cli("once", "bill", "monday", "--attempts", "2", *failing).returncode == 3
    assert cli("once", "bill", "monday", "--attempts", "2", *failing).returncode == 0
    assert [run[1] for run in runs(cli)] == ["1", "2"]
    assert cli("once", "bill", "sunday", "--", "no-such-program").returncode == 127
    assert cli("once", "bill", "sunday", *failing).returncode == 0  # that was its attempt


def test_killed_fencelock_kills_its_command(cli: Cli) -> None:
    """If `fencelock once` is killed, so is its command; the slot is abandoned, and a second attempt runs it."""
    holder = cli.start("once", "bill", "monday", "--ttl", "1", "--", "sh", "-c", UNTIL_TOLD)
    eventually_blocking((cli.folder / "held").exists)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert cli("once", "bill", "monday", "--", "sh", "-c", APPEND).returncode == 0
    assert runs(cli) == []

    def ran() -> bool:
        assert cli("once", "bill", "monday", "--attempts", "2", "--", "sh", "-c", APPEND).returncode == 0
        return bool(runs(cli))

    eventually_blocking(ran)
    assert [run[:2] for run in runs(cli)] == [["monday", "2"]]


def test_cron_on_several_hosts(cli: Cli) -> None:
    """The crontab of five hosts calls it for a slot: one runs it, and `fencelock jobs` shows how it ended."""
    started = [cli.start("cron", "report", "0 0 1 1 *", "--within", "400d", "--", "sh", "-c", APPEND) for _ in range(5)]
    assert [process.wait(LONG) for process in started] == [0] * 5
    (run,) = runs(cli)
    assert run[0].endswith("-01-01T00:00:00Z")
    listed = cli.json("jobs", "--json")
    (job,) = listed["jobs"]
    assert (job["name"], job["schedule"], job["next"][-6:]) == ("report", "cron 0 0 1 1 * UTC", "00:00Z")
    last = job["last"]
    assert (last["slot"], last["outcome"], last["attempt"], str(last["token"])) == (run[0], "succeeded", 1, run[2])
    assert last["duration"] >= 0
    table = cli("jobs").stdout.splitlines()
    assert table[0].split()[:3] == ["NAME", "SCHEDULE", "NEXT"]
    assert "succeeded" in table[1]


def test_cron_repeats_a_failed_run(cli: Cli) -> None:
    """With two attempts, a failed command runs again at once; the code of the last one comes out."""
    done = cli(
        "cron",
        "report",
        "--every",
        "365d",
        "--within",
        "400d",
        "--attempts",
        "2",
        "--",
        "sh",
        "-c",
        f"{APPEND}; exit 3",
    )
    assert done.returncode == 3
    assert [run[1] for run in runs(cli)] == ["1", "2"]
    assert cli.json("jobs", "--json")["jobs"][0]["last"]["error"] == "exit code 3"


def test_job_that_is_terminated_is_failed(cli: Cli) -> None:
    """A signal is forwarded to the command, and the run counts as failed."""
    process = cli.start("cron", "report", "--every", "365d", "--within", "400d", "--", "sh", "-c", UNTIL_TOLD)
    eventually_blocking((cli.folder / "held").exists)
    process.terminate()
    assert process.wait(LONG) == 128 + signal.SIGTERM
    last = cli.json("jobs", "--json")["jobs"][0]["last"]
    assert (last["outcome"], last["error"]) == ("failed", "signal 15")


def test_lock_taken_away_during_a_job(cli: Cli) -> None:
    """If the lease of a job is gone, its command is stopped, the exit code is 76, and the run is abandoned."""
    process = cli.start(
        "cron", "report", "--every", "365d", "--within", "400d", "--ttl", "1", "--", "sh", "-c", UNTIL_TOLD
    )
    eventually_blocking((cli.folder / "held").exists)
    assert cli("release", "schedule:report", "--force", "--reason", "a test").returncode == 0
    assert process.wait(LONG) == 76
    assert cli.json("jobs", "--json")["jobs"][0]["last"]["outcome"] == "abandoned"


def test_nothing_runs_without_the_engine(cli: Cli) -> None:
    """If the engine cannot be reached, the command does not run and the code is 69."""
    with closing(sqlite3.connect(cli.database)) as connection:
        connection.execute("CREATE TABLE strange (x)")
        connection.commit()
    for arguments in (("once", "bill", "monday"), ("cron", "bill", "--every", "1h")):
        assert cli(*arguments, "--", "sh", "-c", APPEND).returncode == 69
    assert runs(cli) == []


def test_wrong_arguments(cli: Cli) -> None:
    """What is missing or wrong is said in one line, with the code 64."""
    for arguments in (
        ("once", "bill", "--", "true"),
        ("once", "bill", "monday"),
        ("once", "bill", "monday", "./bill", "--all"),
        ("once", "bill", "monday", "tuesday", "--", "true"),
        ("once", "bill", "monday", "--attempts", "0", "--", "true"),
        ("cron", "bill", "--", "true"),
        ("cron", "bill", "99 * * * *", "--", "true"),
        ("cron", "bill", "* * * * *", "--every", "5m", "--", "true"),
        ("cron", "bill", "* * * * *", "--tz", "Nowhere", "--", "true"),
    ):
        done = cli(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (64, 1), arguments
    assert "put -- before the command, as in `fencelock once" in cli("once", "bill", "monday", "./bill", "--all").stderr
