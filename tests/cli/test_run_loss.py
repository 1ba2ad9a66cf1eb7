from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from fencelock.cli import watchdog
from fencelock.cli.supervise import plan
from tests.cli.conftest import KEPT, UNTIL_TOLD, Cli, boottime, session_members
from tests.servers.redis import Redis
from tests.support.waiting import LONG, eventually_blocking

BEATS = """
import os, signal, sys, time

def beat(name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    open("held", "w").close()
    while True:
        os.write(file, b"%f\\n" % time.clock_gettime(time.CLOCK_BOOTTIME))
        time.sleep(0.005)

if os.fork() == 0:      # a child
    beat("beats.child")
if os.fork() == 0:      # a daemon that stayed in the group: its parent is gone
    if os.fork() == 0:
        beat("beats.daemon")
    os._exit(0)
os.wait()
beat("beats.leader")
"""


def last_beats(cli: Cli) -> dict[str, float]:
    files = ("beats.leader", "beats.child", "beats.daemon")
    return {file: float(cli.file(file).read_text().split()[-1]) for file in files}


def test_dead_before_the_deadline(cli: Cli) -> None:
    """When renewals get no answer, a command that ignores SIGTERM is dead, with all that it forked, before the deadline."""
    cli.script("beats.py", BEATS)
    process = cli.hold("x", "--ttl", "15", command="exec python3 beats.py")
    eventually_blocking(lambda: all(cli.file(f"beats.{who}").exists() for who in ("leader", "child", "daemon")))
    successor = cli.start("run", "x", "--ttl", "90", "--", "sh", "-c", "cat /proc/uptime")
    eventually_blocking(lambda: cli.waiters("x"))
    with closing(sqlite3.connect(cli.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        end = cli.deadline("x")
        _, err = process.communicate(timeout=LONG)
        assert boottime() < end, "fencelock itself should be done in time as well"
        assert session_members(process.pid) == []
        other.execute("ROLLBACK")
    assert process.returncode == 76
    assert re.search(r"could not be renewed in time( \(.*\))?; the command was stopped", err)
    assert max(last_beats(cli).values()) < end
    out, _ = successor.communicate(timeout=LONG)
    assert float(out.split()[0]) > max(last_beats(cli).values())


def test_dead_before_the_deadline_of_a_stopped_fencelock(cli: Cli) -> None:
    """Also when fencelock itself is stopped, the command is dead before the deadline, and the exit code says "lost"."""
    cli.script("beats.py", BEATS)
    process = cli.hold("x", "--ttl", "15", command="exec python3 beats.py")
    eventually_blocking(lambda: all(cli.file(f"beats.{who}").exists() for who in ("leader", "child", "daemon")))
    process.send_signal(signal.SIGSTOP)
    end = cli.deadline("x")
    successor = cli("run", "x", "--timeout", "50", "--", "sh", "-c", "cat /proc/uptime")
    assert max(last_beats(cli).values()) < end
    assert float(successor.stdout.split()[0]) > max(last_beats(cli).values())
    process.send_signal(signal.SIGCONT)
    assert process.wait(LONG) == 76
    assert session_members(process.pid) == []


def test_asked_before_it_is_killed(cli: Cli) -> None:
    """The command is asked with a third of the ttl left and can clean up; its own code does not hide the loss."""
    trap = "trap 'cat /proc/uptime > asked; sleep 0.1; touch cleaned; exit 0' TERM"
    process = cli.hold("x", "--ttl", KEPT, command=f"{trap}; touch held; sleep 300 & wait")
    with closing(sqlite3.connect(cli.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        end = cli.deadline("x")
        eventually_blocking(cli.file("cleaned").exists)
    assert process.wait(LONG) == 76
    asked = float(cli.file("asked").read_text().split()[0])
    assert float(KEPT) / 10 < end - asked < float(KEPT) * 0.4


def test_forced_release(cli: Cli) -> None:
    """A command whose lock is released by force is stopped at the next renewal."""
    process = cli.hold("x", "--ttl", KEPT, command="trap 'touch asked; exit 0' TERM; touch held; sleep 300 & wait")
    released = cli("release", "x", "--force", "--reason", "test")
    assert released.returncode == 0
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 76
    assert "released by force" in err
    assert cli.file("asked").exists()


def test_deleted_database(cli: Cli) -> None:
    """A command whose database is deleted is stopped: others use a new one."""
    process = cli.hold("x", "--ttl", KEPT)
    for path in cli.folder.glob("locks.db*"):
        path.unlink()
    assert process.wait(LONG) == 76
    assert session_members(process.pid) == []


def test_max_hold(cli: Cli) -> None:
    """After --max-hold the command is over although all is well, and the lock is free for the next at once."""
    process = cli.hold("x", "--ttl", "300", "--max-hold", "4", command="trap '' TERM; touch held; sleep 300")
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 76
    assert "for as long as --max-hold allows; the command was stopped" in err
    assert session_members(process.pid) == []
    assert cli("run", "x", "--no-wait", "--", "true").returncode == 0


def test_stopped_command_is_killed_too(cli: Cli) -> None:
    """A command that is stopped when the lease ends does not wake up later."""
    process = cli.hold("x", "--ttl", KEPT, command="touch held; kill -STOP $$; touch ran")
    assert cli("release", "x", "--force", "--reason", "test").returncode == 0
    assert process.wait(LONG) == 76
    assert session_members(process.pid) == []


def test_lost_while_stopped_and_ended(cli: Cli) -> None:
    """A command that ended by itself while fencelock slept past its ttl counts as lost: nobody knows which came first."""
    process = cli.hold("x", "--ttl", "5", command=f"{UNTIL_TOLD}; exit 3")
    process.send_signal(signal.SIGSTOP)
    end = cli.deadline("x")
    cli.file("held").unlink()
    eventually_blocking(lambda: boottime() > end)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 76
    assert "ended with code 3" in err


@pytest.mark.parametrize(
    ("ttl", "max_hold"), [(0.1, None), (1, None), (30, None), (86400, None), (30, 3), (30, 7200), (10, 0.2)]
)
def test_order_of_warning_kill_and_deadline(ttl: float, max_hold: float | None) -> None:
    """There is always time to terminate the command, then to kill it, then to reap it, in this order."""
    ask, kill = plan(ttl, max_hold)
    assert ask == pytest.approx(min(ttl, max_hold or ttl) / 3)
    assert 0 < kill <= ask / 2


LOST_BEFORE_THE_START = """
import sys, time
from fencelock.cli import supervise
from fencelock.cli.errors import run_command

class Slow(supervise.Supervisor):
    def _update_watchdog(self):
        time.sleep(0.5)

supervise.Supervisor = Slow
sys.exit(run_command("run", "run", sys.argv[1:]))
"""


def test_lost_before_the_command_starts(cli: Cli) -> None:
    """A command whose lock was lost between the grant and its start is not started."""
    argv = [sys.executable, "-c", LOST_BEFORE_THE_START, "x", "--max-hold", "0.2", "--", "touch", "ran"]
    result = subprocess.run(
        argv, env=cli.env, cwd=cli.folder, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert result.returncode == 76, result.stderr
    assert "was not started" in result.stderr
    assert not cli.file("ran").exists()
    assert cli.json("ls")["locks"] == []


def test_stopped_watchdog(cli: Cli) -> None:
    """A watchdog that could not listen for long looks at the last deadline only, and leaves the command alone."""
    command = subprocess.Popen(["sleep", "60"], start_new_session=True)
    listen, tell = os.pipe()
    os.write(tell, b"".join(b"%.6f\n" % (boottime() - 1) for _ in range(2000)) + b"%.6f\n" % (boottime() + 60))
    pid = os.fork()
    if pid == 0:
        os.close(tell)
        watchdog._watch(command.pid, listen)
    try:
        time.sleep(0.5)
        assert command.poll() is None
        os.close(tell)
        assert command.wait(LONG) == -signal.SIGKILL
    finally:
        os.close(listen)
        command.kill()
        command.wait()
        os.waitpid(pid, 0)


def test_engine_that_goes_away(cli: Cli, own_redis: Callable[..., Redis]) -> None:
    """When the server is gone, holder and waiter say which lock that is and what became of the command, the reason first."""
    server = own_redis()
    cli.env["FENCELOCK_URL"] = server.url
    holder = cli.hold("x", "--ttl", KEPT)
    waiter = cli.start("run", "x", "--ttl", "3", "--", "touch", "ran")
    eventually_blocking(lambda: cli.waiters("x"))
    server.stop()
    _, lost = holder.communicate(timeout=LONG)
    _, refused = waiter.communicate(timeout=LONG)
    assert (holder.returncode, waiter.returncode) == (76, 69)
    assert re.search(r"^fencelock: the lease on 'x' \(token .*; the command was stopped$", lost, re.MULTILINE)
    assert refused.endswith("; the command was not started, as 'x' was not acquired\n")
    assert not cli.file("ran").exists()
