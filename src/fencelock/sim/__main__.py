"""`python -m fencelock.sim`: play many seeds, or replay one seed and print its history."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from fencelock.sim.many import Summary, broken, cores, play_many
from fencelock.sim.run import play
from fencelock.sim.scenario import ENGINES, PRIMITIVES, UNFENCED, scenario_of, scenarios_of
from fencelock.sim.timeline import timeline

SHOWN = 10
"""How many failing seeds are listed; the history of the first is printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m fencelock.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this seed and print its history")
    parser.add_argument("--seeds", type=int, default=5000, help="how many seeds to play (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes to use (%(default)s)")
    parser.add_argument("--engine", choices=ENGINES, default="memory", help="the engine to play on (%(default)s)")
    parser.add_argument("--primitive", choices=PRIMITIVES, default="lock", help="what clients use (%(default)s)")
    names = sorted({scenario.name for scenarios in ENGINES.values() for scenario in scenarios} | {UNFENCED.name})
    parser.add_argument("--scenario", choices=names, help="play this scenario instead of the one that the seed chooses")
    parser.add_argument("--variant", metavar="MODULE:NAME", help="break the code with this context manager first")
    parser.add_argument("--json", action="store_true", help="with --seed: print the history as lines of JSON")
    options = parser.parse_args(arguments)
    played = [scenario.name for scenario in scenarios_of(options.engine, options.primitive)]
    if not played:
        parser.error(f"{options.engine} has no {options.primitive}")
    if options.scenario not in (None, *played):
        parser.error(f"for {options.primitive} on {options.engine} the scenarios are {', '.join(played)}")
    if options.seed is not None:
        return replay(
            options.seed, options.scenario, options.variant, options.engine, options.primitive, json=options.json
        )
    started = time.monotonic()
    summary = play_many(
        range(options.start, options.start + options.seeds),
        jobs=options.jobs,
        engine=options.engine,
        primitive=options.primitive,
        scenario=options.scenario,
        variant=options.variant,
        progress=lambda summary: show_progress(summary, options.seeds, started),
    )
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    seconds = time.monotonic() - started
    say(f"{summary}, {summary.seeds / seconds:.0f} seeds a second")
    return print_failures(summary)


def replay(
    seed: int,
    scenario: str | None,
    variant: str | None,
    engine: str = "memory",
    primitive: str = "lock",
    *,
    json: bool = False,
) -> int:
    """Play one seed and print its history."""
    with broken(variant):
        played = scenario_of(seed, engine, scenario, primitive)
        result = play(seed, played)
    if json:
        say(*result.history.lines())
        return 1 if result.violations else 0
    say(f"seed {seed}, {played.primitive}, scenario {played.name}: {played.about}", *timeline(result.history))
    say(*(f"BROKEN {violation}" for violation in result.violations) if result.violations else ("no promise is broken",))
    return 1 if result.violations else 0


def print_failures(summary: Summary) -> int:
    """Print the command that replays each failing seed, and the history of the first; return the exit status."""
    for failure in summary.failures[:SHOWN]:
        say(f"\nseed {failure.seed} fails: {failure.violations[0]}", f"    {failure.command}")
    if len(summary.failures) > SHOWN:
        say(f"\n... and {len(summary.failures) - SHOWN} more")
    for first in summary.failures[:1]:
        say("")
        replay(first.seed, first.scenario, first.variant, first.engine, first.primitive)
    return 1 if summary.failures else 0


def show_progress(summary: Summary, of: int, started: float) -> None:
    """Print the progress: on a terminal in one line that is overwritten, in a log every 1,000 seeds."""
    terminal = sys.stderr.isatty()
    if not terminal and summary.seeds % 1000 and summary.seeds != of:
        return
    rate = summary.seeds / max(1e-9, time.monotonic() - started)
    line = f"{summary.seeds}/{of} seeds, {rate:.0f} a second, {len(summary.failures)} failed"
    sys.stderr.write(f"\r{line} " if terminal else f"{line}\n")
    sys.stderr.flush()


def say(*lines: str) -> None:
    """Print lines."""
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
