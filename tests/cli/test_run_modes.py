"""`fencelock run` with readers, permits and several names, flock's short options, and commands without `--`."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import Any

import pytest

import fencelock
from tests.cli.conftest import FENCELOCK, KEPT, UNTIL_TOLD, Cli, session_members
from tests.servers.redis import Redis
from tests.support.waiting import LONG, eventually_blocking

ENVIRONMENT = 'printf "%s/" "$FENCELOCK_NAME" "$FENCELOCK_TOKEN" "$FENCELOCK_ID" "$FENCELOCK_MODE" "$FENCELOCK_VALUE"'


@pytest.fixture(params=["sqlite", "redis"])
def shared_cli(request: pytest.FixtureRequest, cli: Cli) -> Cli:
    """The command line on SQLite and on a server."""
    if request.param == "redis":
        server: Redis = request.getfixturevalue("redis_node")
        cli.env["FENCELOCK_URL"] = f"redis://{server.address}/8"
    return cli


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name of the test's own: holders that are killed at the end keep it for a ttl, on a server that others use."""
    return f"{request.node.name} {os.getpid()}"


def holders(cli: Cli, name: str) -> list[Any]:
    """Return who holds a name."""
    with fencelock.connect(cli.env["FENCELOCK_URL"]) as locks:
        return list(locks.inspect(name).holders)


def test_readers_share_and_writers_wait(shared_cli: Cli, name: str) -> None:
    """Readers run at the same time, a writer waits for them, and a reader behind the writer does not overtake it."""
    cli = shared_cli
    cli.hold(name, "--shared", command=UNTIL_TOLD)
    assert cli("run", "--shared", "-n", name, "true").returncode == 0
    assert cli("run", "-n", name, "true").returncode == 75
    writer = cli.start("run", name, "--", "touch", "written")
    eventually_blocking(lambda: cli.waiters(name))
    assert cli("run", "--shared", "--timeout", "0.2", name, "true").returncode == 75
    assert not cli.file("written").exists()
    cli.file("held").unlink()
    assert writer.wait(LONG) == 0
    assert cli.file("written").exists()


def test_readers_and_permits_have_no_token(cli: Cli) -> None:
    """A command that reads, or has a permit, gets no token for a fence, not even that of an outer lock."""
    assert cli("run", "x", "--shared", "--", "sh", "-c", ENVIRONMENT).stdout == "x///shared//"
    nested = cli("run", "outer", "--", *FENCELOCK, "run", "x", "--limit", "2", "--", "sh", "-c", ENVIRONMENT)
    assert nested.stdout == "x///permit//"


def test_limit(shared_cli: Cli, name: str) -> None:
    """At most N run at a time; a permit that becomes free goes to the next."""
    cli = shared_cli
    cli.hold(name, "--limit", "2")
    cli.hold(name, "--limit", "2", command=UNTIL_TOLD)
    assert cli("run", "--limit", "2", "-n", name, "true").returncode == 75
    third = cli.start("run", "--limit", "2", name, "--", "echo", "ran")
    eventually_blocking(lambda: cli.waiters(name))
    cli.file("held").unlink()
    assert third.communicate(timeout=LONG)[0] == "ran\n"


def test_killed_permit_returns(shared_cli: Cli, name: str) -> None:
    """The permit of a killed process is free after its ttl, while the other holder goes on."""
    cli = shared_cli
    other = cli.hold(name, "--limit", "2", "--ttl", "30")
    killed = cli.hold(name, "--limit", "2", "--ttl", "1")
    killed.kill()
    eventually_blocking(lambda: session_members(killed.pid) == [])
    assert cli("run", "--limit", "2", "--timeout", "20", name, "true").returncode == 0  # less than the ttl of the other
    assert other.poll() is None


def test_limits_that_disagree(cli: Cli) -> None:
    """Each contender respects its own limit; `show` and `ls` say that limits disagree."""
    cli.hold("x", "--limit", "3", "--owner", "new")
    cli.start("run", "x", "--limit", "1", "--owner", "old", "--", "true")
    eventually_blocking(lambda: cli.waiters("x"))
    lines = cli("show", "x").stdout.splitlines()
    assert lines[:2] == ["x: 1 of 1 or 3 permits", "  contenders use the limits 1 and 3: each respects its own"]
    assert re.match(r"  held by new, token \d+, .*, one of 3 permits$", lines[2])
    assert lines[3] == "  waiting, number 1 in line: old, one of 1 permits"
    assert cli.json("show", "x")["limits"] == [1, 3]
    assert "x     1 of 1 or 3 permits  new" in cli("ls").stdout


def test_several_names(shared_cli: Cli, name: str) -> None:
    """All names are held while the command runs, which gets a line for each; all are free afterwards."""
    cli = shared_cli
    names = [f"{name} {letter}" for letter in "ba"]
    done = cli("run", *names, names[0], "--owner", "me", "--", "sh", "-c", f"{ENVIRONMENT}; sleep 0.1")
    assert done.returncode == 0, done.stderr
    held, tokens, ids, mode, value = done.stdout.split("/")[:5]
    assert held.split("\n") == sorted(names)
    assert len(set(ids.split("\n"))) == 2
    assert all(int(token) > 0 for token in tokens.split("\n"))
    assert (mode, value) == ("exclusive", "")
    assert [holders(cli, each) for each in names] == [[], []]


def test_fence_for_one_of_several_names(cli: Cli) -> None:
    """`from_environ(name=…)` selects one of several locks; without a name, or for a reader, it says what is wrong."""
    code = "import sys; from fencelock.fences import from_environ as f; print(f(name=(sys.argv[1:] or [None])[0]).name)"
    python = [sys.executable, "-c", code]
    assert cli("run", "a", "b", "--", *python, "b").stdout == "b\n"
    assert cli("run", "b", "--", *python, "b").stdout == "b\n"
    assert cli("run", "b", "--", *python).stdout == "b\n"
    assert "the locks 'a', 'b': give the name of one" in cli("run", "a", "b", "--", *python).stderr
    assert "without --shared" in cli("run", "b", "--shared", "--", *python).stderr
    assert "without --shared" in cli("run", "a", "b", "--shared", "--", *python, "a").stderr


def test_several_names_all_or_nothing(shared_cli: Cli, name: str) -> None:
    """If one of the names is not free, the command is not run, the message names it, and nothing is left of the others."""
    cli = shared_cli
    first, second = f"{name} a", f"{name} b"
    cli.hold(second, "--owner", "other")
    for options in (["-n"], ["-w", "0.3"]):
        refused = cli("run", first, second, *options, "--", "touch", "ran")
        assert refused.returncode == 75
        assert f"{second!r} was not free within" in refused.stderr
        assert "held by other" in refused.stderr
    waiter = cli.start("run", first, second, "--", "touch", "ran")
    eventually_blocking(lambda: cli.waiters(second))
    assert len(holders(cli, first)) == 1
    waiter.send_signal(signal.SIGTERM)
    assert waiter.wait(LONG) == 128 + signal.SIGTERM
    assert holders(cli, first) == []
    assert not cli.waiters(second)
    assert not cli.file("ran").exists()


def test_loss_of_one_of_several_names(shared_cli: Cli, name: str) -> None:
    """The command is stopped when one of its locks is lost, the message names that lock, and the others are released."""
    cli = shared_cli
    first, second = f"{name} a", f"{name} b"
    process = cli.hold(first, second, "--ttl", KEPT)
    assert cli("release", second, "--force", "--reason", "test").returncode == 0
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 76
    assert f"the lease on {second!r}" in err
    assert "; the command was stopped" in err
    assert session_members(process.pid) == []
    assert holders(cli, first) == []


def test_stopped_past_the_ttl_of_several_names(cli: Cli) -> None:
    """A fencelock that is stopped past its ttl has no command any more when others hold its locks, and exits "lost"."""
    process = cli.hold("a", "b", "--ttl", "2", command="trap '' TERM; touch held; while :; do sleep 0.02; done")
    process.send_signal(signal.SIGSTOP)
    successor = cli.hold("b", "a", "--timeout", "50", command=UNTIL_TOLD)
    assert [pid for pid in session_members(process.pid) if pid != process.pid] == []
    process.send_signal(signal.SIGCONT)
    assert process.wait(LONG) == 76
    cli.file("held").unlink()
    assert successor.wait(LONG) == 0


def test_several_names_to_read(cli: Cli) -> None:
    """With --shared, several names are read together."""
    cli.hold("a", "--shared")
    assert cli("run", "a", "b", "--shared", "-n", "--", "true").returncode == 0
    assert cli("run", "a", "b", "-n", "--", "true").returncode == 75


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-n", "x", "true"], 75),
        (["-n", "-E", "0", "x", "true"], 0),
        (["-nE", "9", "x", "true"], 9),
        (["-nE9", "x", "true"], 9),
        (["-w", "0.2", "--conflict-exit-code", "1", "x", "--", "true"], 1),
        (["x", "-w0.2", "-E1", "true"], 1),
    ],
)
def test_short_options(cli: Cli, arguments: list[str], code: int) -> None:
    """flock's short options do what they do there; the command's own code is not changed."""
    cli.hold("x")
    assert cli("run", *arguments).returncode == code
    assert cli("run", *["y" if word == "x" else word for word in arguments]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["x", "echo", "-n", "a"], "a"),
        (["x", "--ttl", "5", "sh", "-c", "echo $0 $1", "a", "-w"], "a -w\n"),
        (["--ttl", "5", "--owner=me", "x", "--verbose", "echo", "a"], "a\n"),
        (["--name=-x", "echo", "a"], "a\n"),
    ],
)
def test_command_without_dashes(cli: Cli, arguments: list[str], output: str) -> None:
    """After a single name the first word that is no option begins the command, and what follows is the command's own."""
    result = cli("run", *arguments)
    assert (result.returncode, result.stdout) == (0, output), result.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["x", "prog", "--quiet", "y"], "fencelock run x -- prog --quiet y"),
        (["x", "-n", "prog", "--ttl=5"], "fencelock run x -n -- prog --ttl=5"),
        (["x", "prog", "--help"], "fencelock run x -- prog --help"),
    ],
)
def test_command_with_our_options_needs_dashes(cli: Cli, arguments: list[str], line: str) -> None:
    """A long option that fencelock has, too, is refused in a command without --, with the line to write instead."""
    result = cli("run", *arguments)
    assert (result.returncode, result.stdout) == (64, "")
    assert f"put -- before the command: {line};" in result.stderr


def test_dashes_in_the_command(cli: Cli) -> None:
    """The first -- ends the names, so a command with a -- of its own needs one before it."""
    assert cli("run", "x", "--", "echo", "a", "--", "b").stdout == "a -- b\n"
    assert cli("run", "x", "echo", "--", "sh", "-c", ENVIRONMENT).stdout.startswith("echo\nx/")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--limit", "0", "--", "true"], "limit must be between 1 and"),
        (["x", "--limit", "many", "--", "true"], "invalid int value: 'many'"),
        (["x", "--limit", "2", "--shared", "--", "true"], "not allowed with"),
        (["x", "y", "--limit", "2", "--", "true"], "--limit takes one name"),
        (["x", "-E", "256", "--", "true"], "'256' is not a number from 0 to 255"),
        (["x", "-E", "no", "--", "true"], "'no' is not a number from 0 to 255"),
        (["x", "-n", "-w", "1", "--", "true"], "not allowed with"),
        (["x", *map(str, range(40)), "--", "true"], "1 to 32 names"),
        (["x", "", "--", "true"], "must not be empty"),
    ],
)
def test_wrong_arguments(cli: Cli, arguments: list[str], words: str) -> None:
    """Wrong arguments give 64 and one line that says what is wrong; nothing is run."""
    result = cli("run", *arguments)
    assert result.returncode == 64, result.stderr
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_engine_without_readers(cli: Cli, redis_node: Redis) -> None:
    """An engine that has no readers or permits refuses them before the command is started."""
    cli.env["FENCELOCK_URL"] = f"redlock://{redis_node.address}"
    for option in (["--shared"], ["--limit", "2"]):
        result = cli("run", "x", *option, "--", "touch", "ran")
        assert result.returncode == 69
        assert "was not started" in result.stderr
    assert not cli.file("ran").exists()
