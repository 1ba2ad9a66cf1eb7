"""`python -m bench [PART …] [--rounds N]`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from bench.harness import Goal, progress, show_goals

# Modules by name, not imported here: every process that a part spawns imports this file again.
PARTS = {
    "sqlite-pairs": 25,
    "sqlite-contended": 3,
    "startup": 11,
    "redis-pairs": 40,
    "redis-contended": 3,
    "redis-waiters": 1,
    "redis-names": 1,
    "redlock-pairs": 40,
    "etcd-pairs": 20,
    "etcd-contended": 3,
    "zookeeper-pairs": 20,
    "zookeeper-contended": 3,
    "postgres-pairs": 20,
    "postgres-contended": 3,
    "mysql-pairs": 30,
    "mysql-contended": 3,
    "primitives": 20,
    "primitives-contended": 3,
    "limits-and-caches": 20,
    "fleet": 10,
    "fences": 20,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Compare fencelock's speed with bare commands and with other packages."
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"one of {', '.join(PARTS)}, or a word of several names, such as redis or pairs (default: all)",
    )
    parser.add_argument("--rounds", type=int, help="rounds for each part; with more rounds the results vary less")
    options = parser.parse_args()
    for word in options.parts:
        if not any(chosen(part, [word]) for part in PARTS):
            parser.error(f"there is no part {word}; there are {', '.join(PARTS)}")
    # Each table appears as soon as it is complete, also in a file or a pipe.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    goals: list[Goal] = []
    for part, rounds in PARTS.items():
        if chosen(part, options.parts):
            progress(f"{part} …")
            module = import_module(f"bench.{part.replace('-', '_')}")
            goals += module.main(options.rounds or rounds)
    show_goals(goals)


def chosen(part: str, words: list[str]) -> bool:
    return not words or any(word == part or word in part.split("-") for word in words)


if __name__ == "__main__":
    main()
