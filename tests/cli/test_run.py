from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

import fencelock
from tests.cli.conftest import KEPT, UNTIL_TOLD, Cli, boottime, session_members
from tests.support.waiting import LONG, eventually_blocking


def test_environment_and_code(cli: Cli) -> None:
    """The command gets the lock's name, token, id and owner, and its exit code comes out."""
    script = 'echo "$FENCELOCK_NAME/$FENCELOCK_TOKEN/$FENCELOCK_ID/$FENCELOCK_OWNER"; exit 7'
    first = cli("run", "a b", "--owner", "me", "--", "sh", "-c", script)
    second = cli("run", "--owner", "me", "a b", "--", "sh", "-c", script)
    assert (first.returncode, first.stderr, second.returncode) == (7, "", 7)
    name, token, claim, owner = first.stdout.strip().split("/")
    assert (name, owner, len(claim)) == ("a b", "me", 32)
    assert int(second.stdout.split("/")[1]) > int(token)


def test_default_owner_is_host_and_pid(cli: Cli) -> None:
    """Without --owner the label is the host and the process id of fencelock itself."""
    process = cli.start("run", "x", "--", "sh", "-c", 'echo "$FENCELOCK_OWNER $PPID"')
    out, _ = process.communicate()
    assert out.split() == [f"{os.uname().nodename}:{process.pid}", str(process.pid)]


def test_no_shell(cli: Cli) -> None:
    """Arguments reach the command as they are, also a second -- and what a shell would expand."""
    words = ["a  b", "$HOME;*", "", "--", "--ttl", "é\udcff"]
    code = "import sys; sys.stdout.buffer.write(ascii(sys.argv[1:]).encode())"
    assert cli("run", "x", "--", sys.executable, "-c", code, *words).stdout == ascii(words)


def test_standard_streams_are_the_commands(cli: Cli) -> None:
    """The command reads fencelock's stdin and writes to its stdout and stderr."""
    process = cli.start("run", "x", "--", "sh", "-c", "cat; echo err >&2", stdin=subprocess.PIPE)
    assert process.communicate("in\n") == ("in\n", "err\n")


def test_death_by_signal_is_128_plus_n(cli: Cli) -> None:
    """A command that dies of a signal gives the code that a shell would."""
    assert cli("run", "x", "--", "sh", "-c", "kill -9 $$").returncode == 128 + 9


@pytest.mark.parametrize(
    ("name", "mode", "text", "code", "words"),
    [
        ("missing", None, "", 127, "was not found"),
        ("plain", 0o644, "#!/bin/sh\n", 126, "chmod +x"),
        ("shebang", 0o755, "#!/no/such/interpreter\n", 127, "#! line"),
        ("text", 0o755, "echo no shebang\n", 126, "#! line"),
    ],
)
def test_command_that_cannot_start(cli: Cli, name: str, mode: int | None, text: str, code: int, words: str) -> None:
    """A command that is missing or not executable gives 127 or 126, one line, and the lock back."""
    path = cli.file(name)
    if mode is not None:
        path.write_text(text)
        path.chmod(mode)
    result = cli("run", "x", "--", str(path))
    assert (result.returncode, result.stdout) == (code, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert cli("run", "x", "--no-wait", "--", "true").returncode == 0


@pytest.mark.parametrize("dashes", [["--"], []])
def test_command_in_one_quoted_string(cli: Cli, dashes: list[str]) -> None:
    """A command line in quotes is one word and no program: 127, and a line that says how to write it."""
    result = cli("run", "x", *dashes, "echo hi")
    assert (result.returncode, result.stdout) == (127, "")
    assert result.stderr == (
        "fencelock: 'echo hi' was not found; did you mean `-- echo hi`, without quotes? For a line of shell: "
        "-- sh -c 'echo hi'\n"
    )


def test_command_that_is_a_folder(cli: Cli) -> None:
    """A folder in the place of the command is called one: no chmod would help."""
    result = cli("run", "x", "--", "/tmp")
    assert (result.returncode, result.stderr) == (126, "fencelock: '/tmp' is a folder, not a program\n")


def test_command_that_is_empty(cli: Cli) -> None:
    """An empty command, as an unset variable gives it, is said to be so, and nothing is locked for it."""
    result = cli("run", "x", "--", "")
    assert (result.returncode, result.stdout) == (127, "")
    assert result.stderr == "fencelock: the command is empty; is a variable in it not set?\n"
    assert not cli.database.exists()


def test_unknown_option(cli: Cli) -> None:
    """An option that does not exist is named, before the -- and without one."""
    for arguments in (["x", "--wait", "--", "true"], ["x", "--wait"]):
        result = cli("run", *arguments)
        assert result.returncode == 64
        assert "there is no option --wait (did you mean --timeout?)" in result.stderr


def test_several_names_without_dashes(cli: Cli) -> None:
    """Without a --, the second name is taken for the command; the error says where the -- belongs."""
    result = cli("run", "x", "no-such-program", "true")
    assert result.returncode == 127
    assert result.stderr.endswith("; after several names, put -- before the command\n")


def test_not_acquired(cli: Cli) -> None:
    """With --no-wait or --timeout a lock that is not free gives 75, names the holder, and leaves nothing behind."""
    cli.hold("x", "--owner", "first")
    at_once = cli("run", "x", "--no-wait", "--", "touch", "ran")
    assert at_once.returncode == 75
    assert "'x' was not free within 0 s; it is held by first (token " in at_once.stderr
    assert "in line" not in at_once.stderr
    late = cli("run", "x", "--timeout", "300ms", "--", "touch", "ran")
    assert late.returncode == 75
    assert re.search(
        r"^fencelock: 'x' was not free within 0\.3 s; it is held by first \(token \d+, held for .* s\); wait longer$",
        late.stderr,
    )
    quiet = cli("run", "x", "--no-wait", "--quiet", "--", "touch", "ran")
    assert (quiet.returncode, quiet.stderr) == (75, "")
    assert cli.json("show", "x")["waiters"] == []
    assert not cli.file("ran").exists()
    for process in cli.started[1:]:
        eventually_blocking(lambda: session_members(process.pid) == [])  # noqa: B023


def test_ttl_above_one_hour(cli: Cli) -> None:
    """Such a ttl without a unit may be meant in milliseconds: a line says what it is. With a unit it is meant."""
    warned = cli("run", "x", "--ttl", "30000", "--", "true")
    assert warned.returncode == 0
    assert warned.stderr.startswith("fencelock: ttl is in seconds: 30000 is 8.3 hours")
    assert warned.stderr.count("\n") == 1
    for ttl in ("2h", "3600"):
        assert cli("run", "x", "--ttl", ttl, "--", "true").stderr == ""


def test_waits_for_its_turn(cli: Cli) -> None:
    """Without --timeout it waits, is woken when the holder is done, and --verbose tells about it."""
    cli.hold("x", "--owner", "first", command=UNTIL_TOLD)
    second = cli.start("run", "x", "--verbose", "--", "echo", "ran")
    eventually_blocking(lambda: cli.waiters("x"))
    cli.file("held").unlink()
    out, err = second.communicate(timeout=LONG)
    assert (second.returncode, out) == (0, "ran\n")
    assert "held by first" in err
    assert "holding 'x' with token" in err


def test_one_at_a_time(cli: Cli) -> None:
    """Ten processes that read, sleep and write one after the other lose no update."""
    cli.file("count").write_text("0")
    script = 'n=$(cat count); sleep 0.02; echo $((n + 1)) > count; echo "$FENCELOCK_TOKEN" >> tokens'
    processes = [cli.start("run", "count", "--", "sh", "-c", script) for _ in range(10)]
    assert [process.wait(LONG) for process in processes] == [0] * 10
    assert int(cli.file("count").read_text()) == 10
    tokens = [int(line) for line in cli.file("tokens").read_text().split()]
    assert tokens == sorted(set(tokens))


def test_flood_of_output(cli: Cli) -> None:
    """A command that floods its output while nobody reads keeps its lock; every byte comes through."""
    process = cli.hold("x", "--ttl", KEPT, command="touch held; head -c 20000000 /dev/zero | tr '\\0' x")
    cli.renewed("x")
    assert process.poll() is None
    out, err = process.communicate(timeout=LONG)
    assert (process.returncode, len(out), err) == (0, 20_000_000, "")


def test_longer_than_its_ttl(cli: Cli) -> None:
    """A command that runs for longer than its ttl holds its lock all the time."""
    process = cli.hold("x", "--ttl", KEPT, command=UNTIL_TOLD)
    end = cli.deadline("x")
    tokens: set[int | None] = set()
    with fencelock.connect(cli.env["FENCELOCK_URL"]) as locks:
        while boottime() < end + 0.5:
            tokens |= {holder.token for holder in locks.inspect("x").holders} or {None}
            time.sleep(0.1)
    cli.file("held").unlink()
    assert process.wait(LONG) == 0
    assert len(tokens) == 1
    assert tokens != {None}


def test_child_inherits_no_more_than_it_should(cli: Cli) -> None:
    """The command has no descriptor of ours, and the same ignored and blocked signals as without fencelock."""
    command = ["sh", "-c", "ls /proc/self/fd; grep -E 'Sig(Ign|Blk|Cgt)' /proc/self/status"]
    bare = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    assert cli("run", "x", "--", *command).stdout == bare.stdout


def test_background_process_outlives_the_command(cli: Cli) -> None:
    """What a command leaves running in the background is left alone when the command ends well."""
    command = "(sleep 0.3; touch later) > /dev/null 2>&1 &"
    assert cli("run", "x", "--", "sh", "-c", command).returncode == 0
    assert cli.json("ls")["locks"] == []
    eventually_blocking(cli.file("later").exists)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x"], "a command must follow"),
        (["x", "--"], "a command must follow"),
        (["--", "true"], "NAME"),
        (["x", "--ttl", "soon", "--", "true"], "'soon' is not a duration"),
        (["x", "--ttl", "0", "--", "true"], "ttl must be between"),
        (["x", "--ttl", "nan", "--", "true"], "nan"),
        (["x", "--timeout", "-1", "--", "true"], "'-1'"),
        (["x", "--timeout", "1", "--no-wait", "--", "true"], "not allowed with"),
        (["x", "--max-hold", "0", "--", "true"], "max_hold"),
        (["x", "--nonsense", "--", "true"], "--nonsense"),
        (["", "--", "true"], "must not be empty"),
        (["a\nb", "--", "true"], "control characters"),
        (["x", "--url", "gopher://h", "--", "true"], "names no engine"),
        (["x", "--namespace", "", "--", "true"], "namespace"),
    ],
)
def test_wrong_arguments(cli: Cli, arguments: list[str], words: str) -> None:
    """Wrong arguments give 64 and one line that says what is wrong; nothing is run."""
    result = cli("run", *arguments)
    assert result.returncode == 64
    assert words in result.stderr
    assert result.stderr.startswith("fencelock: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["sqlite:///no/such/folder/locks.db", "memory://"])
def test_unusable_engine_exits_69(cli: Cli, url: str) -> None:
    """An engine that cannot be reached, or cannot exclude processes, gives exit code 69 and one line."""
    result = cli("run", "x", "--url", url, "--", "touch", "ran")
    assert result.returncode == 69
    assert result.stderr.startswith("fencelock: ")
    assert result.stderr.endswith("; the command was not started, as 'x' was not acquired\n")
    assert result.stderr.count("\n") == 1
    assert not cli.file("ran").exists()


@pytest.mark.parametrize("command", [["run", "x"], ["ls"], ["show", "x"], ["release", "x", "--force", "--reason", "r"]])
def test_password_is_never_shown(cli: Cli, command: list[str]) -> None:
    """A password among the arguments is refused, one in the environment is used, and neither is printed."""
    tail = ["--", "true"] if command[0] == "run" else []
    url = "redis://me:s3cret@localhost:1/0"
    refused = cli(*command, "--url", url, *tail)
    assert refused.returncode == 64
    assert "$FENCELOCK_URL" in refused.stderr
    cli.env.update(FENCELOCK_URL=url, FENCELOCK_DEBUG="1")
    used = cli(*command, *tail)
    assert used.returncode != 0
    assert "s3cret" not in refused.stdout + refused.stderr + used.stdout + used.stderr


def test_debug_shows_where(cli: Cli) -> None:
    """FENCELOCK_DEBUG=1 adds the traceback."""
    cli.env["FENCELOCK_DEBUG"] = "1"
    assert "Traceback" in cli("run", "x", "--ttl", "0", "--", "true").stderr


def test_release_that_fails_is_a_warning(cli: Cli) -> None:
    """When the engine is away at the end, the command's own code comes out without long delay, with a warning."""
    later = "(while [ ! -e go ]; do sleep 0.05; done; touch later) > /dev/null 2>&1"
    process = cli.hold("x", "--ttl", KEPT, command=f"{later} & {UNTIL_TOLD}; exit 3")
    with closing(sqlite3.connect(cli.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        end = cli.deadline("x")
        cli.file("held").unlink()
        _, err = process.communicate(timeout=LONG)
    assert process.returncode == 3
    assert f"could not be released; it runs out within {KEPT} s" in err
    eventually_blocking(lambda: boottime() > end)
    cli.file("go").touch()
    eventually_blocking(cli.file("later").exists)  # what it left in the background is none of the watchdog's business


def test_console_script_and_closed_streams(cli: Cli) -> None:
    """The installed script works, also with stdin, stdout and stderr closed, as cron's relatives start it."""
    script = Path(sys.executable).with_name("fencelock")
    command = f"exec {script} run x -- sh -c 'exit 5' <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], env=cli.env, check=False).returncode == 5
    refused = f"exec {script} run x --ttl 0 -- true 2>&-"
    assert subprocess.run(["sh", "-c", refused], env=cli.env, check=False).returncode == 64


def test_sigchld_ignored_by_the_parent(cli: Cli) -> None:
    """A parent that ignores SIGCHLD, which children inherit, does not cost us the exit code."""
    result = cli(
        "run", "x", "--", "sh", "-c", "exit 6", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    )
    assert result.returncode == 6, result.stderr
