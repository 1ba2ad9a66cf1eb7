from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing

import pytest

from fencelock import connect
from fencelock.cli.look import columns
from tests.cli.conftest import FENCELOCK, UNTIL_TOLD, Cli
from tests.servers.redis import Redis, RedisNodes
from tests.support.waiting import LONG, eventually_blocking


def test_ls(cli: Cli) -> None:
    """`ls` lists what is held, with holder, token, time left and waiters; a prefix selects."""
    assert cli("ls").stdout == ""
    cli.hold("jobs:b", "--owner", "worker 1")
    cli.hold("other", "--owner", "worker 2")
    cli.start("run", "jobs:b", "--owner", "next", "--", "true")
    eventually_blocking(lambda: cli.waiters("jobs:b"))
    header, first, second = cli("ls").stdout.splitlines()
    assert header.split("  ")[0] == "NAME"
    assert header.split() == ["NAME", "STATE", "HOLDER", "VALUE", "HELD", "FOR", "TOKEN", "EXPIRES", "IN", "WAITERS"]
    assert re.match(r"jobs:b  held   worker 1  - +\d+\.\d s +1\d+ ", first)
    assert first.endswith(" s      1")
    assert re.match(r"other   held   worker 2  - +\d+\.\d s +1\d+ ", second)
    assert len(cli("ls", "jobs:").stdout.splitlines()) == 2
    assert cli("ls", "--namespace", "elsewhere").stdout == ""


def test_ls_of_nothing(cli: Cli) -> None:
    """At a terminal `ls` says that there is nothing to list; a program that reads it gets nothing."""
    assert cli("run", "x", "--", "true").returncode == 0
    engine = f"fencelock: engine sqlite:///{cli.database}\n"
    master, slave = os.openpty()
    try:
        assert cli("ls", stdout=slave).stderr == f"{engine}fencelock: no lock is held\n"
        assert cli("ls", "a", stdout=slave).stderr == f"{engine}fencelock: no lock is held whose name begins with 'a'\n"
    finally:
        os.close(master)
        os.close(slave)
    piped = cli("ls")
    assert (piped.stdout, piped.stderr) == ("", engine)


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["jobs"], ["show", "x"], ["watch", "x"], ["leader", "x"], ["release", "x", "--force", "--reason", "test"]],
    ids=lambda arguments: arguments[0],
)
def test_looking_creates_no_database(cli: Cli, arguments: list[str]) -> None:
    """A SQLite file that does not exist gives 69 and its path, and is not created: the path may be misspelt."""
    result = cli(*arguments, "--url", "sqlite:lokcs.db")
    assert (result.returncode, result.stdout) == (69, "")
    assert result.stderr.startswith(f"fencelock: there is no database at {cli.file('lokcs.db')}: ")
    assert result.stderr.count("\n") == 1
    assert list(cli.folder.iterdir()) == []


def test_redis_database_that_does_not_exist(cli: Cli, redis_node: Redis) -> None:
    """The number of a database that the server does not have gives 69 and the usual range."""
    result = cli("ls", "--url", f"redis://{redis_node.address}/9999999")
    assert result.returncode == 69
    assert "DB index is out of range; a server has the databases 0 to 15" in result.stderr


def test_ls_with_wide_characters(cli: Cli) -> None:
    """A character that takes two columns, or none, does not shift the rest of its line."""
    assert [columns(text) for text in ("ab", "\N{ROCKET}", "\u9396\u5b9a", "e\u0301", "\xe9")] == [2, 2, 4, 1, 1]
    cli.hold("\N{ROCKET}\u9396", "--owner", "me")
    cli.hold("abcde", "--owner", "me")
    assert [line.partition("held")[0] for line in cli("ls").stdout.splitlines()[1:]] == [
        "abcde  ",
        "\N{ROCKET}\u9396   ",
    ]


def test_name_that_begins_with_a_dash(cli: Cli) -> None:
    """Any name can be given to any command: --name takes one that looks like an option."""
    cli.hold("--name=-x", "--owner", "me")
    assert cli("show", "--name=-x").stdout.startswith("-x: held\n")
    assert cli("show", "--", "-x").stdout.startswith("-x: held\n")
    assert len(cli("ls", "--", "-").stdout.splitlines()) == 2
    released = cli("release", "--name=-x", "--force", "--reason", "test")
    assert released.stdout.startswith("-x: released by force\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show"], "the lock's NAME is missing"),
        (["show", "-x"], "there is no option -x; a name that begins with a dash is given as --name=-x"),
        (["run", "-x", "--", "true"], "there is no option -x; a name that begins with a dash is given as --name=-x"),
        (["run", "x", "--timeot", "5", "--", "true"], "there is no option --timeot (did you mean --timeout?); see"),
        (["run", "x", "--timeot=5", "true"], "there is no option --timeot=5 (did you mean --timeout?); see"),
        (["ls", "--jsn"], "there is no option --jsn (did you mean --json?); see fencelock ls --help"),
        (["schema", "--print", "x"], "unrecognized arguments: x"),
        (["show", "--name", "a", "b"], "unrecognized arguments: b"),
        (["show", "a", "--json", "b"], "unrecognized arguments: b"),
    ],
)
def test_name_that_is_missing_or_doubled(cli: Cli, arguments: list[str], words: str) -> None:
    """One name, no less and no more."""
    result = cli(*arguments)
    assert (result.returncode, result.stdout) == (64, "")
    assert result.stderr.startswith(f"fencelock: {words}")


def test_ls_json(cli: Cli) -> None:
    """`ls --json` has the documented keys."""
    assert cli("run", "x", "--", "true").returncode == 0
    engine = f"sqlite:///{cli.database}"
    assert cli.json("ls") == {"engine": engine, "locks": []}
    cli.hold("x", "--owner", "me", "--ttl", "20")
    (lock,) = cli.json("ls")["locks"]
    (holder,) = lock["holders"]
    assert 0 < holder.pop("expires_in") <= 20
    assert 0 <= holder.pop("held_for") <= LONG
    assert holder.pop("token") == lock.pop("token") > 0
    assert holder == {"owner": "me", "mode": "exclusive", "limit": None, "value": ""}
    assert lock == {"name": "x", "holders": [holder], "waiters": [], "limits": []}


def test_show(cli: Cli) -> None:
    """`show` tells about holders and waiters in order, and about a name that is free."""
    assert cli("run", "x", "--", "true").returncode == 0
    assert cli("show", "x").stdout == "x: free\n"
    cli.hold("x", "--owner", "me")
    for owner in ("first", "second"):
        cli.start("run", "x", "--owner", owner, "--", "true")
        eventually_blocking(lambda: f": {owner}\n" in cli("show", "x").stdout)  # noqa: B023
    lines = cli("show", "x").stdout.splitlines()
    assert lines[0] == "x: held"
    assert lines[1].startswith("  held by me, token 1")
    assert lines[2:] == ["  waiting, number 1 in line: first", "  waiting, number 2 in line: second"]
    document = cli.json("show", "x")
    assert sorted(document) == ["engine", "holders", "limits", "name", "token", "waiters"]
    assert [waiter.pop("expires_in") > 0 for waiter in document["waiters"]] == [True, True]
    assert document["waiters"] == [
        {"owner": owner, "mode": "exclusive", "limit": None, "value": "", "position": position}
        for position, owner in enumerate(("first", "second"), 1)
    ]


def test_show_readers_and_candidates(cli: Cli) -> None:
    """`show` and `ls` print the mode of readers, and the value of candidates."""
    cli.hold("x", "--shared", "--owner", "reader")
    cli.start("elect", "x", "--value", "http://me", "--owner", "me", "--", "true")
    eventually_blocking(lambda: cli.waiters("x"))
    lines = cli("show", "x").stdout.splitlines()
    assert lines[0] == "x: shared"
    assert re.match(r"  held by reader, token \d+, held for .*, expires in .*, shared$", lines[1])
    assert lines[2:] == ["  waiting, number 1 in line: me, value 'http://me'"]
    assert cli("ls").stdout.splitlines()[1].startswith("x     shared  reader  -      ")
    (holder,), (waiter,) = (cli.json("show", "x")[key] for key in ("holders", "waiters"))
    assert (holder["mode"], holder["value"], waiter["mode"], waiter["value"]) == (
        "shared",
        "",
        "exclusive",
        "http://me",
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_watch(cli: Cli, as_json: bool) -> None:
    """`watch` prints the state and then a line for each change; Ctrl-C ends it."""
    assert cli("run", "x", "--", "true").returncode == 0
    watch = cli.start("watch", "x", *(["--json"] if as_json else []))
    assert watch.stdout is not None
    first = watch.stdout.readline()
    cli.hold("x", "--owner", "me", command=UNTIL_TOLD)
    second = watch.stdout.readline()
    cli.file("held").unlink()
    third = watch.stdout.readline()
    watch.send_signal(signal.SIGINT)
    assert watch.wait(LONG) == 130
    if as_json:
        states = [json.loads(line) for line in (first, second, third)]
        assert [[holder["owner"] for holder in state["holders"]] for state in states] == [[], ["me"], []]
        assert sorted(states[0]) == ["engine", "holders", "limits", "name", "time", "token", "waiters"]
    else:
        time = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 x: "
        assert re.match(f"{time}free; 0 waiting$", first)
        assert re.match(rf"{time}held by me \(token \d+\); 0 waiting$", second)
        assert re.match(f"{time}free; 0 waiting$", third)


def test_leader_at_a_terminal(cli: Cli) -> None:
    """A value with control characters reaches a program as it is, and a terminal escaped."""
    cli.start("elect", "x", "--value", "a\x1b[2J", "--", "sleep", "300")
    eventually_blocking(lambda: cli("leader", "x").stdout == "a\x1b[2J\n")
    master, slave = os.openpty()
    try:
        assert cli("leader", "x", stdout=slave).returncode == 0
        assert os.read(master, 100) == b"'a\\x1b[2J'\r\n"
    finally:
        os.close(master)
        os.close(slave)


def test_show_without_an_order(cli: Cli, own_redis_nodes: Callable[..., RedisNodes]) -> None:
    """Where nobody knows who will be next, waiters have no numbers."""
    url = own_redis_nodes(3).url
    cli.hold("x", "--url", url)
    cli.start("run", "x", "--url", url, "--owner", "lucky", "--", "true")
    eventually_blocking(lambda: "  waiting: lucky\n" in cli("show", "x", "--url", url).stdout)


def test_engine_is_shown_without_its_password(cli: Cli, own_redis: Callable[..., Redis]) -> None:
    """`ls`, `show` and `run --verbose` say which engine they use, on stderr and without the password."""
    server = own_redis(settings={"requirepass": "s3cr3t"})
    cli.env["FENCELOCK_URL"] = f"redis://:s3cr3t@{server.address}/0"
    line = f"fencelock: engine redis://:***@{server.address}/0\n"
    for arguments in (["ls"], ["show", "x"], ["run", "x", "--verbose", "--", "true"]):
        done = cli(*arguments)
        assert done.returncode == 0
        assert done.stderr.startswith(line)
        assert "engine" not in done.stdout
    assert cli("run", "x", "--", "true").stderr == ""
    for arguments in (["ls"], ["show", "x"]):
        assert cli.json(*arguments)["engine"] == f"redis://:***@{server.address}/0"


def test_engine_of_a_relative_path(cli: Cli) -> None:
    """Of a database in the current folder, the whole path is shown: another folder would be another engine."""
    assert cli("run", "x", "--", "true").returncode == 0
    assert cli("ls", "--url", "sqlite:locks.db").stderr == f"fencelock: engine sqlite:///{cli.folder}/locks.db\n"


def test_release_needs_force_and_reason(cli: Cli) -> None:
    """Without --force, or without a reason, nothing is released, and one line says what is missing."""
    holder = cli.hold("x")
    for arguments, words in (
        (["x"], "--force"),
        (["x", "--force"], "--reason"),
        (["x", "--force", "--reason", " "], "--reason"),
    ):
        refused = cli("release", *arguments)
        assert refused.returncode == 64
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert len(cli.json("show", "x")["holders"]) == 1
    assert holder.poll() is None


def test_release(cli: Cli) -> None:
    """A forced release says whom it dropped, logs who did it and why, and later tokens are higher."""
    cli.hold("x", "--owner", "stuck")
    token = cli.json("show", "x")["token"]
    released = cli("release", "x", "--force", "--reason", "host is gone", "--owner", "admin")
    assert released.returncode == 0
    assert released.stdout.startswith(f"x: released by force\n  dropped stuck, token {token}, held for ")
    assert released.stderr == "fencelock: admin released 'x' by force, dropping 1 holder: host is gone\n"
    out = cli("run", "x", "--no-wait", "--", "sh", "-c", "echo $FENCELOCK_TOKEN").stdout
    assert int(out) > token
    assert cli("release", "x", "--force", "--reason", "again").stdout == "x: nobody held it\n"


def test_release_json(cli: Cli) -> None:
    """`release --json` has the documented keys."""
    cli.hold("x", "--owner", "stuck")
    document = cli.json("release", "x", "--force", "--reason", "why")
    (holder,) = document.pop("holders")
    assert document == {"name": "x", "dropped": 1, "reason": "why"}
    assert holder["owner"] == "stuck"


def test_library_and_command_line_exclude_each_other(cli: Cli) -> None:
    """A lock that a program holds through the library is the one that `run` waits for and `show` shows."""
    with connect(cli.env["FENCELOCK_URL"], owner="lib") as locks, locks.lock("x"):
        assert cli.json("show", "x")["holders"][0]["owner"] == "lib"
        assert cli("run", "x", "--no-wait", "--", "true").returncode == 75


def test_name_that_would_move_the_cursor(cli: Cli) -> None:
    """A name with characters that change how text is shown is escaped for people, and exact for programs."""
    name = "a\u202eb"
    cli.hold(name)
    assert cli("ls").stdout.splitlines()[1].startswith("'a\\u202eb'")
    assert cli("show", name).stdout.startswith("'a\\u202eb': held")
    assert cli.json("ls")["locks"][0]["name"] == name


def test_label_and_reason_that_would_move_the_cursor(cli: Cli) -> None:
    """Control characters in an owner or a reason are escaped in output for people."""
    label, shown = "\x1b[2J\u202eroot\x07", "\\x1b[2J\\u202eroot\\x07"
    cli.hold("x", "--owner", "harmless")
    cli.start("run", "x", "--owner", "next", "--", "true")
    eventually_blocking(lambda: cli.waiters("x"))
    plant(cli, label)
    document = cli.json("show", "x")
    assert [place["owner"] for place in document["holders"] + document["waiters"]] == [label, label]
    refused = cli("run", "x", "--no-wait", "--", "true")
    timed_out = cli("run", "x", "--timeout", "0.05", "--", "true")
    results = [cli("ls"), cli("show", "x"), refused, timed_out]
    results.append(cli("release", "x", "--force", "--reason", f"why\n{label}"))
    assert [result.returncode for result in results] == [0, 0, 75, 75, 0]
    for result in results:
        assert all(line.isprintable() for line in (result.stdout + result.stderr).split("\n"))
    assert f"'{shown}'" in results[0].stdout
    assert results[1].stdout.count(f"'{shown}'") == 2
    for result in (refused, timed_out):
        assert f"is held by {shown} (token" in result.stderr
    assert results[4].stderr.endswith(f": why\\n{shown}\n")


def plant(cli: Cli, label: str) -> None:
    """Give all claims in the database this label, as a program of another kind could."""
    with closing(sqlite3.connect(cli.database)) as database, database:
        database.execute("UPDATE claim SET owner = ?", (label,))


def test_top(cli: Cli) -> None:
    """Help, version, and hints for what is neither a command nor an option."""
    assert cli("--version").stdout.startswith("fencelock 0.")
    assert cli().stdout == cli("--help").stdout == cli("-h").stdout
    unknown = cli("lock")
    assert (unknown.returncode, "there is no command 'lock'; there are run, elect" in unknown.stderr) == (64, True)
    misspelt = cli("relaese")
    assert misspelt.returncode == 64
    assert "there is no command 'relaese' (did you mean release?)" in misspelt.stderr
    misplaced = cli("--url", "sqlite://", "ls")
    assert (misplaced.returncode, "after the command" in misplaced.stderr) == (64, True)


def test_reader_that_leaves(cli: Cli) -> None:
    """`fencelock ls --json | head` ends quietly."""
    cli.hold("x")
    process = cli.start("ls", "--json")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(LONG) == 128 + 13
    process.stdout = None


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["run", "--help"], ["ls"], ["ls", "--json"], ["show", "x"], ["show", "x", "--json"]],
)
def test_output_that_cannot_be_written(cli: Cli, arguments: list[str]) -> None:
    """A full disk behind stdout, or a stdout that is closed, is one line and 74: no bug, no traceback."""
    cli.hold("x")
    engine = f"fencelock: engine sqlite:///{cli.database}\n"
    words = "fencelock: the output cannot be written"
    for unbuffered in ("", "1"):
        cli.env["PYTHONUNBUFFERED"] = unbuffered
        with open("/dev/full", "w") as full:
            result = cli(*arguments, stdout=full)
        assert result.returncode == 74
        assert result.stderr.removeprefix(engine) == f"{words}: No space left on device\n"
    command = ["sh", "-c", '"$@" >&-', "", *FENCELOCK, *arguments]
    closed = subprocess.run(command, env=cli.env, capture_output=True, text=True)
    assert closed.returncode == 74
    assert closed.stderr.removeprefix(engine) == f"{words}: it is closed\n"


def test_stderr_that_cannot_be_written(cli: Cli) -> None:
    """With nobody to complain to, the exit code still tells."""
    with open("/dev/full", "w") as full:
        for arguments in (["ls", "--no-such-option"], ["show"], ["run", "x"], ["nothing"]):
            assert cli(*arguments, stderr=full).returncode == 64


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_terminal_that_cannot_show_it_all(cli: Cli, encoding: str) -> None:
    """What an encoding does not have is escaped, in the help, in a name and in an error."""
    cli.hold("job-\N{ROCKET}")
    cli.env["PYTHONIOENCODING"] = encoding
    for command in ([], ["run"], ["ls"], ["show"], ["release"]):
        result = cli(*command, "--help")
        assert (result.returncode, result.stderr, result.stdout.isascii()) == (0, "", True)
    assert cli("ls").stdout.splitlines()[1].startswith("job-\\U0001f680  held")
    assert cli("show", "job-\N{ROCKET}").stdout.startswith("job-\\U0001f680: held\n")
    assert "job-\\U0001f680" in cli("run", "job-\N{ROCKET}", "--no-wait", "--", "true").stderr


def test_module_and_script_are_the_same(cli: Cli) -> None:
    """`python -m fencelock` and the installed script answer alike."""
    assert cli("run", "x", "--", "true").returncode == 0
    script = FENCELOCK[0].rpartition("/")[0] + "/fencelock"
    bare = subprocess.run([script, "ls", "--json"], env=cli.env, capture_output=True, text=True, check=True)
    assert json.loads(bare.stdout) == cli.json("ls")


def test_labels_cannot_move_the_cursor(cli: Cli) -> None:
    """The label of an owner reaches the terminal escaped, also one that was put into the database by hand."""
    cli.hold("x", "--owner", "me\u202eyou")
    assert "'me\\u202eyou'" in cli("ls").stdout
    with closing(sqlite3.connect(cli.database)) as database, database:
        database.execute("UPDATE claim SET owner = ?", ("\x1b[2Jme",))
    waiter = cli.start("run", "x", "--", "true")
    eventually_blocking(lambda: len(cli.waiters("x")) == 1)
    for command in (["ls"], ["show", "x"], ["run", "x", "--no-wait", "--", "true"]):
        result = cli(*command)
        assert "\\x1b[2Jme" in result.stdout + result.stderr
    result = cli("release", "x", "--force", "--reason", "test")
    assert "'\\x1b[2Jme'" in result.stdout
    assert waiter.wait(LONG) == 0


def test_name_that_the_terminal_cannot_show(cli: Cli) -> None:
    """A name that the terminal's encoding does not have is shown escaped, and the table goes on."""
    cli.hold("\N{LOCK}")
    cli.env["PYTHONIOENCODING"] = "ascii"
    result = cli("ls")
    assert result.returncode == 0
    assert "\\U0001f512" in result.stdout
