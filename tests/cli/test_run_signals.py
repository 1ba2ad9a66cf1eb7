from __future__ import annotations

import os
import pty
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.conftest import FENCELOCK, KEPT, UNTIL_TOLD, Cli, session_members, state
from tests.support.waiting import LONG, eventually_blocking

WAIT_FOR_SIGNAL = """
import os, signal, sys, time
def got(number, frame):
    print(signal.Signals(number).name, flush=True)
    sys.exit(9)
for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH"):
    signal.signal(getattr(signal, "SIG" + name), got)
open("held", "w").close()
time.sleep(300)
"""


def arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signal_while_waiting(cli: Cli, number: signal.Signals) -> None:
    """A signal that ends the wait gives 128 + n at once and takes the claim back; the holder notices nothing."""
    holder = cli.hold("x")
    waiter = cli.start("run", "x", "--", "touch", "ran")
    eventually_blocking(lambda: cli.waiters("x"))
    waiter.send_signal(number)
    assert waiter.wait(LONG) == 128 + number
    assert cli.json("show", "x")["waiters"] == []
    assert session_members(waiter.pid) == []
    assert holder.poll() is None
    assert not cli.file("ran").exists()


def test_signal_that_means_nothing_yet(cli: Cli) -> None:
    """SIGUSR1, SIGWINCH and SIGCONT while waiting neither end the wait nor reach the command later."""
    cli.hold("x", command=UNTIL_TOLD)
    waiter = cli.start("run", "x", "--", "echo", "ran")
    eventually_blocking(lambda: cli.waiters("x"))
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT):
        waiter.send_signal(number)
    cli.file("held").unlink()
    assert waiter.communicate(timeout=LONG)[0] == "ran\n"
    assert waiter.returncode == 0


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has its own way with a signal by now: it has come to where it acquires."""
    (caught,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_signal_while_acquiring(cli: Cli) -> None:
    """A signal while the engine does not answer ends fencelock soon, and nothing is left behind."""
    assert cli("run", "x", "--", "true").returncode == 0
    with closing(sqlite3.connect(cli.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        process = cli.start("run", "x", "--", "touch", "ran")
        eventually_blocking(lambda: catches(process.pid, signal.SIGTERM))
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        other.execute("ROLLBACK")
        assert process.wait(LONG) == 128 + signal.SIGTERM
    assert cli.json("ls")["locks"] == []
    assert not cli.file("ran").exists()


def test_second_signal_while_acquiring(cli: Cli) -> None:
    """A second signal ends the run at once, also if the engine does not reply; the command is killed."""
    assert cli("run", "x", "--", "true").returncode == 0
    with closing(sqlite3.connect(cli.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        process = cli.start("run", "x", "--", "touch", "ran")
        eventually_blocking(lambda: catches(process.pid, signal.SIGTERM))
        time.sleep(0.3)

        def asked_again() -> bool:
            process.send_signal(signal.SIGINT)  # those that come while it does not run are one
            time.sleep(0.5)
            return process.poll() is not None

        eventually_blocking(asked_again)
        assert process.returncode == -signal.SIGINT
    eventually_blocking(lambda: session_members(process.pid) == [])


def test_signal_sent_twice_at_once(cli: Cli) -> None:
    """A signal that comes to the process and to its group, as from `timeout`, is one: the queue entry is removed."""
    cli.hold("x")
    for _ in range(5):
        process = cli.start("run", "x", "--", "touch", "ran")
        eventually_blocking(lambda: len(cli.waiters("x")) == 1)
        until = time.monotonic() + 0.02
        while time.monotonic() < until:  # without a pause, which could last for too long
            process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 128 + signal.SIGTERM
        assert cli.json("show", "x")["waiters"] == []
    assert not cli.file("ran").exists()


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH"])
def test_signal_while_holding(cli: Cli, name: str) -> None:
    """A signal is passed on to the command, whose own code comes out."""
    process = cli.start("run", "x", "--", sys.executable, "-c", WAIT_FOR_SIGNAL)
    eventually_blocking(cli.file("held").exists)
    process.send_signal(getattr(signal, f"SIG{name}"))
    out, err = process.communicate(timeout=LONG)
    assert (process.returncode, out, err) == (9, f"SIG{name}\n", "")
    assert cli.json("ls")["locks"] == []


def test_signal_reaches_the_whole_group(cli: Cli) -> None:
    """What the command has started gets the signal too."""
    process = cli.hold("x", command="sleep 300 & sleep 300 & touch held; wait")
    members = 5  # fencelock, its watchdog, a shell and two sleeps; the touch may take a moment to be gone
    eventually_blocking(lambda: len(session_members(process.pid)) == members)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG) == 128 + signal.SIGTERM
    eventually_blocking(lambda: session_members(process.pid) == [])


def test_ignored_signal_stays_ignored(cli: Cli) -> None:
    """Under nohup neither fencelock nor the command cares about SIGHUP."""
    process = cli.start(
        "run", "x", "--", "sh", "-c", f"touch held; kill -HUP $$; {UNTIL_TOLD}; echo alive",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    eventually_blocking(cli.file("held").exists)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    cli.file("held").unlink()
    assert process.communicate(timeout=LONG)[0] == "alive\n"


def test_killed_with_its_command(cli: Cli) -> None:
    """When fencelock is killed with SIGKILL, the command dies with it, and the lock is free after its ttl."""
    process = cli.hold("x", "--ttl", "1")
    process.kill()
    process.wait()
    eventually_blocking(lambda: session_members(process.pid) == [])
    assert cli("run", "x", "--timeout", "20", "--", "true").returncode == 0  # less than the ttl that others have


def test_killed_with_all_that_it_started(cli: Cli) -> None:
    """When fencelock is killed, what the command has started dies too, not only the command itself."""
    process = cli.hold("x", command="(trap '' TERM HUP; sleep 300) & (sleep 300 &) & touch held; wait")
    process.kill()
    process.wait()
    eventually_blocking(lambda: session_members(process.pid) == [])


def test_killed_together_with_its_watchdog(cli: Cli) -> None:
    """When both processes of fencelock are killed (`pkill -9 fencelock`), the kernel still kills the command."""
    process = cli.hold("x")
    watchdog = next(pid for pid in session_members(process.pid) if pid != process.pid and "fencelock" in arguments(pid))
    os.kill(watchdog, signal.SIGKILL)
    process.kill()
    process.wait()
    eventually_blocking(lambda: session_members(process.pid) == [])


def test_killed_while_waiting(cli: Cli) -> None:
    """When fencelock is killed while it waits, the process that was to become the command goes too."""
    cli.hold("x")
    waiter = cli.start("run", "x", "--", "touch", "ran")
    eventually_blocking(lambda: cli.waiters("x"))
    waiter.kill()
    waiter.wait()
    eventually_blocking(lambda: session_members(waiter.pid) == [])
    assert not cli.file("ran").exists()


def test_stopped_past_its_ttl(cli: Cli) -> None:
    """Stopped past its ttl and resumed, fencelock kills the command at once and exits "lost"; a successor has the lock."""
    script = "trap '' TERM; touch held; while :; do sleep 0.02; done"
    process = cli.hold("x", "--ttl", "2", command=script)
    process.send_signal(signal.SIGSTOP)
    successor = cli.hold("x", "--timeout", "50", command=UNTIL_TOLD)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 76
    assert "is lost" in err
    assert session_members(process.pid) == []
    assert successor.poll() is None
    cli.file("held").unlink()
    assert successor.wait(LONG) == 0


def test_stopped_within_its_ttl(cli: Cli) -> None:
    """Stopped and resumed in time, nothing happens."""
    process = cli.hold("x", "--ttl", "30", command=f"{UNTIL_TOLD}; exit 4")
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGCONT)
    cli.file("held").unlink()
    assert process.wait(LONG) == 4


def test_stopped_command_keeps_its_lock(cli: Cli) -> None:
    """A command that is stopped with SIGSTOP, away from any terminal, stays under its lock."""
    process = cli.hold("x", "--ttl", KEPT, command=f"echo $$ > pid; {UNTIL_TOLD}; exit 4")
    child = int(cli.file("pid").read_text())
    os.kill(child, signal.SIGSTOP)
    cli.renewed("x")
    assert state(child) == "T"
    os.kill(child, signal.SIGCONT)
    cli.file("held").unlink()
    assert process.wait(LONG) == 4


class Terminal:
    """A shell with job control on a terminal of its own."""

    def __init__(self, cli: Cli) -> None:
        self.seen = ""
        self._master, slave = pty.openpty()
        env = {**cli.env, "PS1": "ready> ", "ENV": "", "FENCELOCK": " ".join(FENCELOCK)}

        def own_terminal() -> None:
            os.setsid()
            os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first terminal that a session's leader opens is its own

        self.shell = subprocess.Popen(
            ["sh", "-i"], stdin=slave, stdout=slave, stderr=slave, env=env, cwd=cli.folder, preexec_fn=own_terminal, text=True
        )  # fmt: skip
        cli.started.append(self.shell)
        os.close(slave)
        os.set_blocking(self._master, False)
        self.until("ready> ")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str) -> str:
        """Read until the text is seen; return what came before it."""

        def look() -> bool:
            try:
                self.seen += os.read(self._master, 4096).decode()
            except OSError:
                pass
            return text in self.seen

        try:
            eventually_blocking(look)
        except AssertionError:
            raise AssertionError(f"{text!r} is not in {self.seen!r}") from None
        before, _, self.seen = self.seen.partition(text)
        return before


def test_control_c(cli: Cli) -> None:
    """Ctrl-C at the terminal reaches the command once, and the shell gets its terminal back."""
    terminal = Terminal(cli)
    terminal.type("$FENCELOCK run x -- sh -c 'trap \"echo int; exit 9\" INT; echo up; read line' ; echo code=$?\n")
    terminal.until("up\r\n")
    terminal.type("\x03")
    assert terminal.until("code=9\r\n").count("int\r\n") == 1
    terminal.type("echo $((6 * 7))\n")
    terminal.until("42\r\n")


def test_command_reads_the_terminal(cli: Cli) -> None:
    """A command can read from the terminal, also in a pipeline, where it gets it when it asks for it."""
    terminal = Terminal(cli)
    terminal.type("$FENCELOCK run x -- sh -c 'echo up; read line; echo got $line'\n")
    terminal.until("up\r\n")
    terminal.type("hello\n")
    terminal.until("got hello\r\n")
    terminal.type("$FENCELOCK run x -- sh -c 'echo up; read line; echo got $line' | cat\n")
    terminal.until("up\r\n")
    terminal.type("again\n")
    terminal.until("got again\r\n")


def test_control_z_and_back(cli: Cli) -> None:
    """Ctrl-Z stops the command and fencelock with it; back within the ttl, both go on."""
    cli.file("held").touch()
    cli.file("beat.py").write_text(
        "import os, time\nprint(f'up {os.getpid()}', flush=True)\n"
        "while os.path.exists('held'):\n    time.sleep(0.05)\nprint('done', flush=True)\nos._exit(4)\n"
    )
    terminal = Terminal(cli)
    terminal.type(f"$FENCELOCK run x --ttl 60 -- {shlex.quote(sys.executable)} beat.py\n")
    terminal.until("up ")
    pid = int(terminal.until("\r\n"))
    terminal.type("\x1a")
    terminal.until("ready> ")
    assert state(pid) == "T"
    terminal.type("fg; echo code=$?\n")
    cli.file("held").unlink()
    terminal.until("done\r\n")
    terminal.until("code=4\r\n")


def test_control_z_past_the_ttl(cli: Cli) -> None:
    """After a Ctrl-Z for longer than the ttl another may have had the lock: the command is killed before it wakes up."""
    # No shell that starts others: one that is stopped in the middle of a vfork does not stop, with or without fencelock.
    cli.file("beat.py").write_text(
        "import time\nprint('up', flush=True)\nwhile True:\n    open('beats', 'a').write('beat ')\n    time.sleep(0.01)\n"
    )
    terminal = Terminal(cli)
    terminal.type(f"$FENCELOCK run x --ttl 6 -- {shlex.quote(sys.executable)} beat.py\n")
    terminal.until("up\r\n")
    eventually_blocking(cli.file("beats").exists)
    terminal.type("\x1a")
    terminal.until("ready> ")
    beats = cli.file("beats").read_text()
    assert cli("run", "x", "--timeout", "50", "--", "true").returncode == 0
    terminal.type("fg; echo code=$?\n")
    terminal.until("code=76\r\n")
    assert cli.file("beats").read_text() == beats
