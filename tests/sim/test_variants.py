"""The simulation finds bugs: every broken variant is caught, by the check that is there for it."""

from __future__ import annotations

import pytest

from fencelock.sim.run import play
from fencelock.sim.scenario import UNFENCED, scenario_of
from tests.sim import record_variants, redis_variants, redlock_variants, variants
from tests.sim.variants import Variant

VARIANTS = {
    "memory": variants.VARIANTS + record_variants.VARIANTS,
    "redis": redis_variants.VARIANTS,
    "redlock": redlock_variants.VARIANTS,
}


@pytest.mark.parametrize(
    ("engine", "variant"),
    [
        pytest.param(engine, variant, id=f"{engine}-{variant.name}")
        for engine, of_engine in VARIANTS.items()
        for variant in of_engine
    ],
)
def test_variant_is_caught(engine: str, variant: Variant) -> None:
    """The broken code fails its check within so many seeds; the code as it is passes the seed that catches it."""
    scenario = scenario_of(0, engine, variant.scenario, variant.primitive)
    for seed in range(variant.within):
        with variant.broken():
            violations = play(seed, scenario).violations
        if any(violation.check == variant.check for violation in violations):
            assert play(seed, scenario).violations == []
            print(f"\n{variant.name}: {variant.check}, seed {seed} of {variant.primitive} {variant.scenario}")
            return
    pytest.fail(f"{variant.name} was not caught within {variant.within} seeds of {variant.scenario}")


def test_data_breaks_without_a_fence() -> None:
    """Without the fence some run corrupts the data although the lock itself keeps all its promises; with it, none."""
    for seed in range(200):
        found = {violation.check for violation in play(seed, UNFENCED).violations}
        assert found <= {"resource"}
        if found:
            return
    pytest.fail("no run without a fence corrupted the data")
