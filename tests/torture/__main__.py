"""`make torture`: runs for minutes and prints progress. Exits with 1 and writes the history if a promise is broken."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from fencelock.sim.check import Invariants, check
from tests.torture.director import TTL, Torture


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="total duration (default 300)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the first round's random faults")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    seed = options.seed
    while time.monotonic() < end:
        folder = Path(tempfile.mkdtemp(prefix="fencelock-torture-"))
        torture = Torture(f"sqlite:///{folder}/locks.db", folder, fenced=True, seed=seed)
        history = torture.run(min(30.0, end - time.monotonic()))
        violations = check(history, Invariants(order=False, clean=False, ttl=TTL))
        faults = f"{len(torture.killed)} killed, {len(history.notes) - len(torture.killed)} stops"
        print(f"seed {seed}: {len(history.ops)} operations, {len(history.writes)} writes, {faults}: ", end="")
        if violations:
            (folder / "history.jsonl").write_text("\n".join(history.lines()))
            print(f"BROKEN, see {folder}/history.jsonl", *violations[:10], sep="\n  ")
            return 1
        print("ok", flush=True)
        seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
