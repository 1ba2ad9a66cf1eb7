"""Thousands of seeds: the production core keeps its promises in all of them, and a seed says it all."""

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
from fencelock.sim.scenario import SCENARIOS, Scenario

SEEDS = 5000
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1200)
def test_seeds(capfd: pytest.CaptureFixture[str]) -> None:
    """The lock, its leases and the fence keep every promise through thousands of runs full of faults."""
    started = time.monotonic()

    def progress(summary: Summary) -> None:
        if summary.seeds % 1000 == 0:
            with capfd.disabled():
                print(f"\n  {summary.seeds}/{SEEDS} seeds, {time.monotonic() - started:.0f} s ", end="", flush=True)

    summary = play_many(range(SEEDS), jobs=cores(), progress=progress)
    assert summary.seeds == SEEDS
    assert summary.refused > 0, "no run was rough enough to need the fence"
    if summary.failures:
        first = summary.failures[0]
        main(["--seed", str(first.seed), "--scenario", first.scenario])
        pytest.fail("\n".join(f"{failure.violations[0]}\n    {failure.command}" for failure in summary.failures[:10]))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_same_seed_is_the_same_history(scenario: Scenario) -> None:
    """A seed played twice leaves the same history, to the last digit of every time."""
    seed = SCENARIOS.index(scenario) + len(SCENARIOS) * 3
    once, again = play(seed), play(seed)
    assert once.scenario == again.scenario
    assert list(once.history.lines()) == list(again.history.lines())
    assert once.history.ops


def test_the_same_seed_is_the_same_history_in_another_process() -> None:
    """A seed found on one machine replays on another: no hash order, no object's address, no real clock gets in."""
    here = "\n".join(play(4).history.lines())
    command = [sys.executable, "-m", "fencelock.sim", "--seed", "4", "--json"]
    for hash_seed in ("1", "2"):
        there = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": hash_seed}
        )
        assert there.stdout.strip() == here


def test_a_failing_seed_prints_how_to_play_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure comes with the one command that replays it, and with its history; the command fails the same way."""
    arguments = ["--scenario", "calm", "--variant", "tests.sim.variants:nobody_is_woken"]
    assert main(["--seeds", "1", "--start", "1", "--jobs", "1", *arguments]) == 1
    printed = capsys.readouterr().out
    command = "python -m fencelock.sim --seed 1 --scenario calm --variant tests.sim.variants:nobody_is_woken"
    assert command in printed
    assert "asks to acquire 'x'" in printed
    assert "BROKEN wake-ups of 'x'" in printed
    again = subprocess.run(
        [sys.executable, *command.split()[1:]], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert again.returncode == 1
    assert again.stdout in printed


def test_a_seed_that_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Playing one seed that is all right prints its history and says so."""
    assert main(["--seed", "1"]) == 0
    assert "no promise is broken" in capsys.readouterr().out


def test_seeds_on_several_cores_and_on_one() -> None:
    """It makes no difference to what is found whether the seeds are played in one process or in several."""
    variant = "tests.sim.variants:tokens_from_the_wall"
    one = play_many(range(60), jobs=1, scenario="calm", variant=variant)
    two = play_many(range(60), jobs=2, scenario="calm", variant=variant)
    assert one == two
    assert isinstance(one.failures[0], Failure)
