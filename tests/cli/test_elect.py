"""`fencelock elect`: the command runs while its candidate leads, and again in the next term."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from contextlib import closing

import pytest

import fencelock
from fencelock.primitives.election import Leader
from tests.cli.conftest import KEPT, Cli, boottime, session_members
from tests.servers.redis import Redis
from tests.support.waiting import LONG, eventually_blocking

NOTE = 'echo "$FENCELOCK_OWNER $FENCELOCK_TOKEN" >> terms'
"""A command that writes down its term."""
LEAD = f"{NOTE}; exec sleep 300"
"""A command that writes down its term and runs until it is stopped."""


@pytest.fixture(params=["sqlite", "redis"])
def any_cli(request: pytest.FixtureRequest, cli: Cli) -> Cli:
    """The command line on SQLite and on a server."""
    if request.param == "redis":
        server: Redis = request.getfixturevalue("redis_node")
        cli.env["FENCELOCK_URL"] = f"redis://{server.address}/7"
    return cli


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name of the test's own: leaders that are killed at the end keep it for a ttl, on a server that others use."""
    return f"{request.node.name} {os.getpid()}"


def leader(cli: Cli, name: str) -> Leader | None:
    """Return who leads, without a process of its own for each look."""
    with fencelock.connect(cli.env["FENCELOCK_URL"]) as locks:
        return locks.election(name).leader()


def terms(cli: Cli, owner: str) -> list[int]:
    """Return the terms in which the command of a candidate was started."""
    if not cli.file("terms").exists():
        return []
    lines = [line.split() for line in cli.file("terms").read_text().splitlines()]
    return [int(token) for candidate, token in lines if candidate == owner]


def elect(cli: Cli, name: str, owner: str, *options: str, command: str = LEAD) -> subprocess.Popen[str]:
    """Start a candidate."""
    return cli.start("elect", name, "--value", f"at {owner}", "--owner", owner, *options, "--", "sh", "-c", command)


def test_environment_and_failure(any_cli: Cli, name: str) -> None:
    """The command gets the term and the value; its error is the exit code, and the candidate has resigned."""
    script = 'echo "$FENCELOCK_NAME/$FENCELOCK_TOKEN/$FENCELOCK_VALUE/$FENCELOCK_OWNER/$FENCELOCK_MODE"; exit 7'
    done = any_cli("elect", name, "--value", "http://me", "--owner", "me", "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (7, "")
    token = int(done.stdout.split("/")[1])
    assert done.stdout == f"{name}/{token}/http://me/me/exclusive\n"
    assert leader(any_cli, name) is None


def test_one_leads_and_the_next_follows(any_cli: Cli, name: str) -> None:
    """One candidate leads, with its value; when its command fails, the other leads, in a later term."""
    cli = any_cli
    first = elect(cli, name, "first", command=f"touch held; while [ -e held ]; do sleep 0.05; done; {NOTE}; exit 3")
    eventually_blocking(cli.file("held").exists)
    second = elect(cli, name, "second")
    eventually_blocking(lambda: cli.waiters(name))
    found = cli("leader", name)
    assert (found.returncode, found.stdout) == (0, "at first\n")
    cli.file("held").unlink()
    assert first.wait(LONG) == 3
    eventually_blocking(lambda: terms(cli, "second"))
    assert terms(cli, "second") > terms(cli, "first")
    document = cli.json("leader", name)
    assert document == {"owner": "second", "value": "at second", "token": terms(cli, "second")[0]}
    second.terminate()
    assert second.wait(LONG) == 128 + signal.SIGTERM
    none = cli("leader", name)
    assert (none.returncode, none.stdout, none.stderr) == (1, "", f"fencelock: nobody leads {name!r}\n")


def test_command_that_ends_well_runs_again(any_cli: Cli, name: str) -> None:
    """A command that ends with 0 is started again in the next term of the same process, behind the other candidates."""
    cli = any_cli
    both = [elect(cli, name, owner, command=NOTE) for owner in ("first", "second")]
    eventually_blocking(lambda: all(len(terms(cli, owner)) > 2 for owner in ("first", "second")))
    for process in both:
        process.terminate()
        assert process.wait(LONG) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)  # the last: between two terms
    assert leader(cli, name) is None
    for owner in ("first", "second"):
        assert terms(cli, owner) == sorted(set(terms(cli, owner)))
    with_turns = [line.split()[0] for line in cli.file("terms").read_text().splitlines()]
    assert "first second first second" in " ".join(with_turns) or "second first second first" in " ".join(with_turns)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("code", [0, 9])
def test_signal_while_leading(cli: Cli, number: signal.Signals, code: int) -> None:
    """A signal is forwarded; the command's code comes out, the candidate has resigned, and nothing is started again."""
    script = f"trap 'exit {code}' TERM INT; {NOTE}; touch held; while :; do sleep 0.05; done"
    process = elect(cli, "x", "me", command=script)
    eventually_blocking(cli.file("held").exists)
    process.send_signal(number)
    assert process.wait(LONG) == code
    assert leader(cli, "x") is None
    assert len(terms(cli, "me")) == 1
    eventually_blocking(lambda: session_members(process.pid) == [])


def test_signal_while_waiting(any_cli: Cli, name: str) -> None:
    """A signal ends a candidate that does not lead, and takes its claim back."""
    cli = any_cli
    elect(cli, name, "first")
    eventually_blocking(lambda: terms(cli, "first"))
    second = elect(cli, name, "second")
    eventually_blocking(lambda: cli.waiters(name))
    second.terminate()
    assert second.wait(LONG) == 128 + signal.SIGTERM
    assert not cli.waiters(name)
    assert terms(cli, "second") == []


def test_lost_term(any_cli: Cli, name: str) -> None:
    """When its term is taken away, a leader stops its command, stands again, and starts it in a later term."""
    cli = any_cli
    process = elect(cli, name, "me", "--ttl", KEPT)
    eventually_blocking(lambda: terms(cli, "me"))
    assert cli("release", name, "--force", "--reason", "test").returncode == 0
    eventually_blocking(lambda: len(terms(cli, "me")) == 2)
    first, second = terms(cli, "me")
    assert first < second
    assert process.poll() is None
    process.terminate()
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 128 + signal.SIGTERM
    assert "released by force" in err
    assert "; the command was stopped" in err


def test_outage(cli: Cli) -> None:
    """When renewals get no answer, the command is dead before the deadline; after the outage it runs in the next term."""
    beats = f"trap '' TERM; {NOTE}; while :; do cut -d' ' -f1 /proc/uptime > beat; done"
    process = elect(cli, "x", "me", "--ttl", KEPT, command=beats)
    eventually_blocking(cli.file("beat").exists)
    with closing(sqlite3.connect(cli.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        end = cli.deadline("x")
        eventually_blocking(lambda: boottime() > end)
        last = float((cli.file("beat").read_text() or "0").split()[0])
        assert last < end
        assert len(terms(cli, "me")) == 1
        other.execute("ROLLBACK")
    eventually_blocking(lambda: len(terms(cli, "me")) == 2)
    assert process.poll() is None


def test_killed(any_cli: Cli, name: str) -> None:
    """When a leader's fencelock is killed with SIGKILL, its command dies, and the next candidate leads after its ttl."""
    cli = any_cli
    first = elect(cli, name, "first", "--ttl", "1", command=f"(trap '' TERM; sleep 300) & {LEAD}")
    eventually_blocking(lambda: terms(cli, "first"))
    elect(cli, name, "second")
    eventually_blocking(lambda: cli.waiters(name))
    first.kill()
    first.wait()
    eventually_blocking(lambda: session_members(first.pid) == [])
    eventually_blocking(lambda: terms(cli, "second"), timeout=20)  # less than the ttl of the second
    assert terms(cli, "second") > terms(cli, "first")


def test_stopped_and_continued(any_cli: Cli, name: str) -> None:
    """A leader that is stopped past its ttl has no command any more when the next one leads; continued, it stands again."""
    cli = any_cli
    first = elect(cli, name, "first", "--ttl", "3")
    eventually_blocking(lambda: terms(cli, "first"))
    second = elect(cli, name, "second")
    eventually_blocking(lambda: cli.waiters(name))
    first.send_signal(signal.SIGSTOP)
    eventually_blocking(lambda: terms(cli, "second"))
    assert session_members(first.pid) == [first.pid]
    first.send_signal(signal.SIGCONT)
    eventually_blocking(lambda: cli.waiters(name))
    assert len(terms(cli, "first")) == 1
    second.terminate()
    eventually_blocking(lambda: len(terms(cli, "first")) == 2)
    assert max(terms(cli, "first")) > terms(cli, "second")[0]


def test_max_hold_passes_the_lead_on(cli: Cli) -> None:
    """With --max-hold a term ends although all is well, and the next candidate leads."""
    for owner in ("first", "second"):
        elect(cli, "x", owner, "--max-hold", "3")
    eventually_blocking(lambda: len(terms(cli, "first")) > 1 and len(terms(cli, "second")) > 1)


def test_engine_that_is_not_there_yet(cli: Cli) -> None:
    """An engine that cannot be reached is reported once and tried again."""
    folder = cli.file("later")
    process = elect(cli, "x", "me", "--url", f"sqlite:///{folder}/locks.db", command=f"{NOTE}; exit 3")
    assert process.stderr is not None
    assert process.stderr.readline().startswith("fencelock: cannot campaign for 'x'; it is tried again: ")
    folder.mkdir()
    assert process.communicate(timeout=LONG)[1] == ""
    assert process.returncode == 3


def test_command_that_cannot_start(cli: Cli) -> None:
    """A command that is not found ends the candidacy with 127."""
    done = cli("elect", "x", "--", "./missing")
    assert done.returncode == 127
    assert "was not found" in done.stderr
    assert leader(cli, "x") is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x"], "a command must follow"),
        (["x", "y", "--", "true"], "unrecognized arguments: y"),
        (["--", "true"], "NAME is missing"),
        (["x", "--value", "v" * 1025, "--", "true"], "value may have at most 1024 bytes"),
        (["x", "--timeout", "1", "--", "true"], "--timeout"),
        (["x", "prog", "--value", "v"], "put -- before the command: fencelock elect x -- prog --value v"),
    ],
)
def test_wrong_arguments(cli: Cli, arguments: list[str], words: str) -> None:
    """Wrong arguments give 64 and one line that says what is wrong; nothing is run."""
    result = cli("elect", *arguments)
    assert result.returncode == 64
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_child_inherits_no_more_in_its_second_term(cli: Cli) -> None:
    """Also in a later term the command has no descriptor of ours, and the signals are as without fencelock."""
    command = ["sh", "-c", "ls /proc/self/fd; grep -E 'Sig(Ign|Blk|Cgt)' /proc/self/status"]
    bare = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    script = f"if [ -e again ]; then {command[2]}; exit 3; fi; touch again"
    assert cli("elect", "x", "--", "sh", "-c", script).stdout == bare.stdout
