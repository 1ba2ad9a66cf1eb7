"""`make demo` shows what it says: an update is lost without the fence, and none with it."""

from __future__ import annotations

import ast
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import session_members
from tests.support.waiting import eventually_blocking

ROOT = Path(__file__).parent.parent
STORY = ROOT / "demo" / "story.py"
WORKERS = ("alice", "bob", "carol")

pytestmark = pytest.mark.xdist_group("demo")  # all tests check the output of one run


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of `make demo` without a virtual environment."""
    environment = {**os.environ, "HOME": str(tmp_path_factory.mktemp("home")), "VIRTUAL_ENV": ""}
    environment.pop("FORCE_COLOR", None)
    done = subprocess.run(["make", "demo"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def parts_of(output: str) -> tuple[str, str]:
    first, _, second = output.partition("2. The same with the fence")
    return first, second


def events(part: str) -> list[tuple[float, str, str]]:
    """Return time, worker and text of each event of a worker."""
    lines = (re.match(r" *(\d+\.\d\d) s  ( *)([^- ].*)", line) for line in part.splitlines())
    return [(float(found[1]), WORKERS[len(found[2]) // 23], found[3]) for found in lines if found is not None]


def test_demo_shows_the_loss_and_the_refusal(output: str) -> None:
    """The demo loses an update without the fence, and refuses the stale write with it."""
    bare, fenced = re.findall(r"(\d+) writes were reported as done; the record says (\d+)", output)
    assert int(bare[0]) > int(bare[1]), "the part without the fence lost nothing"
    assert int(fenced[0]) == int(fenced[1])
    first, second = parts_of(output)
    assert "OVER" in first
    assert "bob did learn that its lease was lost, but too late" in first
    assert "REFUSED" not in first
    assert "REFUSED" in second
    assert "OVER" not in second


def test_demo_fits_a_terminal(output: str) -> None:
    """No line of the demo is wider than 80 columns, and all are ASCII."""
    assert max(map(len, output.splitlines())) <= 80
    assert output.isascii()


def test_demo_numbers_tokens_in_order(output: str) -> None:
    """The demo shows tokens as small increasing numbers, and one of them in full."""
    for part in parts_of(output):
        numbers = [int(text.partition("#")[2]) for _, _, text in events(part) if text.startswith("holds")]
        assert numbers == list(range(1, len(numbers) + 1))
    (refused,) = re.findall(r"REFUSED: #(\d+) is stale, #(\d+) has been here", output)
    assert int(refused[0]) < int(refused[1])
    assert len(re.findall(r"this #1 is \d{16}\.", output)) == 1


def test_demo_shows_exclusion(output: str) -> None:
    """The demo shows no new holder before the previous one wrote, except the one that is stopped."""
    for part in parts_of(output):
        holding: set[str] = set()
        last = 0.0
        for at, who, text in events(part):
            assert at >= last
            last = at
            if text.startswith("holds"):
                assert holding <= {"bob"}, f"{who} holds at {at} while {holding} does"
                holding.add(who)
            elif text.startswith(("writes", "REFUSED")):
                holding.remove(who)


def test_interrupted_demo_leaves_no_workers() -> None:
    """Ctrl-C ends the demo with status 130 and without output, and kills all workers, also the stopped one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    demo = subprocess.Popen(
        [sys.executable, str(STORY)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that starts the tests in the background ignores SIGINT, and the demo would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert demo.stdout is not None
    try:
        while "-- bob is stopped" not in (line := demo.stdout.readline()):
            assert line, "the demo ended before a worker was stopped"
        assert len(session_members(demo.pid)) == 1 + len(WORKERS)
        os.killpg(demo.pid, signal.SIGINT)
        _, err = demo.communicate(timeout=60)
        assert (demo.returncode, err) == (130, "")
        eventually_blocking(lambda: not session_members(demo.pid))
    finally:
        for pid in session_members(demo.pid):
            os.kill(pid, signal.SIGKILL)
        demo.communicate()


@pytest.mark.parametrize(
    ("environment", "terminal", "colors"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, True),
    ],
)
def test_demo_uses_colors_on_terminals(environment: dict[str, str], terminal: bool, colors: bool) -> None:
    """The demo uses colors on terminals; NO_COLOR turns them off, and FORCE_COLOR on."""
    assert runpy.run_path(str(STORY))["use_colors"](environment, terminal) is colors


def test_demo_on_old_python_names_the_required_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Python that is too old, the demo ends with one line that names the version that it needs."""
    ast.parse(STORY.read_text(), feature_version=(3, 7))
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    with pytest.raises(SystemExit, match=r"the demo needs Python 3\.11 or later") as end:
        runpy.run_path(str(STORY))
    assert "\n" not in str(end.value)
