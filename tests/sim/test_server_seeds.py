"""The production Redis and Redlock, Python and Lua, through thousands of seeds of the simulated world, and variants."""

from __future__ import annotations

import time

import pytest

from fencelock.sim.__main__ import main
from fencelock.sim.many import Summary, cores, play_many
from fencelock.sim.run import play
from fencelock.sim.scenario import REDIS, REDLOCK, Scenario, scenario_of
from tests.sim import redis_variants, redlock_variants
from tests.sim.variants import Variant

SEEDS = {
    "redis": 1000,
    "redlock": 5000,
}  # a real Lua runs on every node: 20 ms of a core each; `make torture` plays more


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("engine", "seeds"), SEEDS.items())
def test_seeds(engine: str, seeds: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Exclusion, and unique tokens that rise strictly, through crashes, stops, delays and clocks that are wrong."""
    started = time.monotonic()

    def progress(summary: Summary) -> None:
        if summary.seeds % 500 == 0:
            with capfd.disabled():
                print(f"\n  {summary.seeds}/{seeds} seeds, {time.monotonic() - started:.0f} s ", end="", flush=True)

    summary = play_many(range(seeds), jobs=cores(), engine=engine, progress=progress)
    assert summary.seeds == seeds
    assert summary.grants > 2 * seeds, "hardly anybody got the lock"
    assert summary.refused > 0, "no run was rough enough to need the fence"
    if summary.failures:
        first = summary.failures[0]
        main(["--engine", engine, "--seed", str(first.seed), "--scenario", first.scenario])
        pytest.fail("\n".join(f"{failure.violations[0]}\n    {failure.command}" for failure in summary.failures[:10]))


@pytest.mark.parametrize("scenario", [*REDIS, *REDLOCK], ids=lambda scenario: f"{scenario.engine}-{scenario.name}")
def test_the_same_seed_is_the_same_history(scenario: Scenario) -> None:
    """A seed played twice leaves the same history, to the last digit of every time."""
    once, again = play(5, scenario), play(5, scenario)
    assert list(once.history.lines()) == list(again.history.lines())
    assert once.history.ops


@pytest.mark.parametrize(
    ("engine", "variant"),
    [
        pytest.param(engine, variant, id=f"{engine}-{variant.name}")
        for engine, variants in {"redis": redis_variants.VARIANTS, "redlock": redlock_variants.VARIANTS}.items()
        for variant in variants
    ],
)
def test_variant_is_caught(engine: str, variant: Variant) -> None:
    """The broken code fails its check within so many seeds; the code as it is passes the one that catches it."""
    for seed in range(variant.within):
        scenario = scenario_of(seed, engine, variant.scenario)
        with variant.broken():
            violations = play(seed, scenario).violations
        if any(violation.check == variant.check for violation in violations):
            assert not any(violation.check == variant.check for violation in play(seed, scenario).violations)
            print(f"\n{variant.name}: {variant.check}, seed {seed} of {variant.scenario}")
            return
    pytest.fail(f"{variant.name} was not caught within {variant.within} seeds of {variant.scenario}")
