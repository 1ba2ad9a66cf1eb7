"""`python -m bench [pairs|contended|startup …] [--rounds N]`."""

from __future__ import annotations

import argparse
import tempfile

from bench import contended, pairs, startup
from bench.harness import Goal, show_goals

PARTS = {"pairs": (pairs.main, 25), "contended": (contended.main, 3), "startup": (startup.main, 11)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Speed, beside the bare statements and the peers."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, help="rounds for each part; more are steadier")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    goals: list[Goal] = []
    for name in options.parts or PARTS:
        run, rounds = PARTS[name]
        with tempfile.TemporaryDirectory(prefix="fencelock-bench-") as folder:
            goals += run(folder, options.rounds or rounds)
    show_goals(goals)


if __name__ == "__main__":
    main()
