"""The production Redis engine, Python and Lua, through a thousand seeds of the simulated world, and its broken variants."""

from __future__ import annotations

import pytest

from fencelock.sim.__main__ import main
from fencelock.sim.many import cores, play_many
from fencelock.sim.run import play
from fencelock.sim.scenario import REDIS, Scenario, scenario_of
from tests.sim.redis_variants import VARIANTS
from tests.sim.variants import Variant

SEEDS = 1000


def test_seeds() -> None:
    """The scripts, the connections and the leases keep every promise through a thousand runs full of faults."""
    summary = play_many(range(SEEDS), jobs=cores(), engine="redis")
    assert summary.seeds == SEEDS
    assert summary.refused > 0, "no run was rough enough to need the fence"
    if summary.failures:
        first = summary.failures[0]
        main(["--engine", "redis", "--seed", str(first.seed), "--scenario", first.scenario])
        pytest.fail("\n".join(f"{failure.violations[0]}\n    {failure.command}" for failure in summary.failures[:10]))


@pytest.mark.parametrize("scenario", REDIS, ids=lambda scenario: scenario.name)
def test_the_same_seed_is_the_same_history(scenario: Scenario) -> None:
    """A seed played twice leaves the same history, to the last digit of every time."""
    once, again = play(5, scenario), play(5, scenario)
    assert list(once.history.lines()) == list(again.history.lines())
    assert once.history.ops


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variant_is_caught(variant: Variant) -> None:
    """The broken code fails its check within so many seeds, and the code as it is passes every one of them."""
    for seed in range(variant.within):
        scenario = scenario_of(seed, "redis", variant.scenario)
        with variant.broken():
            violations = play(seed, scenario).violations
        if any(violation.check == variant.check for violation in violations):
            assert play(seed, scenario).violations == []
            print(f"\n{variant.name}: {variant.check}, seed {seed} of {variant.scenario}")
            return
    pytest.fail(f"{variant.name} was not caught within {variant.within} seeds of {variant.scenario}")
