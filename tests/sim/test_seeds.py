"""Hundreds of seeds: every primitive keeps its promises on the simulated engines, and a seed repeats a run exactly."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fencelock.sim.__main__ import main
from fencelock.sim.many import Failure, Summary, cores, play_many
from fencelock.sim.run import play
from fencelock.sim.scenario import PRIMITIVES, Scenario, scenarios_of

ROOT = Path(__file__).resolve().parents[2]
LOCK_SEEDS = {"memory": 2000, "redis": 400, "redlock": 2000}
"""On Redis and Redlock every server runs a real Lua; `make torture` plays more seeds."""
OTHER_SEEDS = {"memory": 300, "redis": 40}
LONG_SEEDS = 2000
OTHERS = [primitive for primitive in PRIMITIVES if primitive != "lock"]
RUNS = [(engine, "lock", seeds) for engine, seeds in LOCK_SEEDS.items()]
RUNS += [(engine, primitive, seeds) for engine, seeds in OTHER_SEEDS.items() for primitive in OTHERS]
LONG_RUNS = [(engine, primitive, LONG_SEEDS) for engine in OTHER_SEEDS for primitive in OTHERS]
LONG_RUNS += [(engine, "lock", 5 * LONG_SEEDS) for engine in LOCK_SEEDS]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("engine", "primitive", "seeds"),
    [*RUNS, *(pytest.param(*run, marks=pytest.mark.long) for run in LONG_RUNS)],
)
def test_seeds(engine: str, primitive: str, seeds: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The primitive, its leases and the fence keep every promise through crashes, pauses, delays and partitions."""
    started = time.monotonic()

    def progress(summary: Summary) -> None:
        if summary.seeds % 1000 == 0:
            with capfd.disabled():
                print(f"\n  {summary.seeds}/{seeds} seeds, {time.monotonic() - started:.0f} s ", end="", flush=True)

    summary = play_many(range(seeds), jobs=cores(), engine=engine, primitive=primitive, progress=progress)
    assert summary.seeds == seeds
    assert summary.grants > 2 * seeds, "hardly any lock was granted"
    assert summary.refused > 0 or primitive != "lock", "no run was rough enough to need the fence"
    if summary.failures:
        first = summary.failures[0]
        main(first.command.split()[3:])
        pytest.fail("\n".join(f"{failure.violations[0]}\n    {failure.command}" for failure in summary.failures[:10]))


@pytest.mark.parametrize(
    "scenario",
    [
        *(scenario for engine in LOCK_SEEDS for scenario in scenarios_of(engine)),
        *(scenarios_of(engine, primitive)[-1] for engine in OTHER_SEEDS for primitive in OTHERS),
    ],
    ids=lambda scenario: f"{scenario.engine}-{scenario.primitive}-{scenario.name}",
)
def test_the_same_seed_is_the_same_history(scenario: Scenario) -> None:
    """A seed played twice leaves the same history, to the last digit of every time."""
    once, again = play(5, scenario), play(5, scenario)
    assert list(once.history.lines()) == list(again.history.lines())
    assert once.history.ops or once.history.reservations


@pytest.mark.parametrize("primitive", ["lock", "election"])
def test_the_same_seed_is_the_same_history_in_another_process(primitive: str) -> None:
    """A seed found on one machine replays on another: it depends on no hash order, no object's address, no real clock."""
    here = "\n".join(play(4, scenarios_of("memory", primitive)[4]).history.lines())
    command = [sys.executable, "-m", "fencelock.sim", "--seed", "4", "--primitive", primitive, "--json"]
    for hash_seed in ("1", "2"):
        there = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": hash_seed}
        )
        assert there.stdout.strip() == here


def test_a_failing_seed_prints_how_to_play_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure comes with the one command that replays it, and with its history; the command fails the same way."""
    variant = "tests.sim.variants:waiters_are_not_woken"
    arguments = ["--primitive", "rwlock", "--scenario", "calm", "--variant", variant]
    assert main(["--seeds", "1", "--start", "1", "--jobs", "1", *arguments]) == 1
    printed = capsys.readouterr().out
    command = f"python -m fencelock.sim --primitive rwlock --seed 1 --scenario calm --variant {variant}"
    assert command in printed
    assert "acquire 'x'" in printed
    assert "BROKEN wake-ups of 'x'" in printed
    again = subprocess.run(
        [sys.executable, *command.split()[1:]], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert again.returncode == 1
    assert again.stdout in printed


def test_a_seed_that_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Playing one seed without a violation prints its history and says so."""
    assert main(["--seed", "1"]) == 0
    assert "no promise is broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--engine redlock --primitive rwlock", "redlock has no rwlock"),
        ("--engine redlock --primitive once", "redlock has no once"),
        ("--primitive rwlock --scenario drift", "for rwlock on memory the scenarios are calm, "),
    ],
)
def test_what_cannot_be_played_is_refused(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A primitive that the engine lacks, and a scenario that is not played for it, are refused in one sentence."""
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments.split())
    assert f"error: {words}" in capsys.readouterr().err


def test_seeds_on_several_cores_and_on_one() -> None:
    """Seeds find the same in one process and in several."""
    variant = "tests.sim.variants:tokens_from_the_wall"
    one = play_many(range(60), jobs=1, scenario="calm", variant=variant)
    two = play_many(range(60), jobs=2, scenario="calm", variant=variant)
    assert one == two
    assert isinstance(one.failures[0], Failure)
