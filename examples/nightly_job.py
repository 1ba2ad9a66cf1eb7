"""A nightly job that several processes watch: each slot runs in one of them. Start it twice, and kill one of the two.

    python examples/nightly_job.py --seconds 60

It uses $FENCELOCK_URL, else SQLite in the user's state folder. A "night" is two seconds long here; a real job would use
cron="0 2 * * *" and a time zone.
"""

from __future__ import annotations

import argparse
import os
import threading
import time

import fencelock


def bill_customers(slot: fencelock.Slot) -> None:
    """Work in small steps, and stop if the lease is lost."""
    print(f"{os.getpid()}: bill the customers for {slot.slot}, attempt {slot.attempt}", flush=True)
    for _ in range(5):
        slot.check()
        time.sleep(0.05)


def main() -> None:
    """Watch the schedule for a while, then print what ran."""
    parser = argparse.ArgumentParser(description="A job that runs once per slot in all processes that watch it.")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    stop = threading.Event()
    threading.Timer(options.seconds, stop.set).start()
    with fencelock.connect(ttl=5) as locks:
        nightly = locks.schedule("nightly-example", every=2, attempts=2)
        nightly.run(bill_customers, stop)
        for run in reversed(nightly.history()):
            took = "" if run.duration is None else f", {run.duration:.1f} s"
            print(f"{run.slot}: {run.outcome} on {run.owner}{took}", flush=True)


if __name__ == "__main__":
    main()
