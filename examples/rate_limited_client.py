"""Four workers call a service that allows 20 calls in any second, and use almost all of that without one rejected call."""

import tempfile
import threading
import time
from pathlib import Path

import fencelock

URL = f"sqlite:///{Path(tempfile.mkdtemp())}/locks.db"
HARD_LIMIT, BURST, CALLS = 20, 4, 40
calls: list[float] = []


def call_service() -> None:
    """Stand for the request to the service."""
    calls.append(time.monotonic())


def worker() -> None:
    with fencelock.connect(URL) as locks:  # each worker has its own client, as if in its own process
        limit = locks.rate_limit("service", HARD_LIMIT - BURST, per=1.0, burst=BURST)
        for _ in range(CALLS // 4):
            limit.acquire(timeout=10)  # reserves a time and sleeps until then; RateLimited if 10 s are too short
            call_service()


def main() -> None:
    started = time.monotonic()
    workers = [threading.Thread(target=worker) for _ in range(4)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    most = max(sum(start <= call < start + 1.0 for call in calls) for start in calls)
    print(f"{len(calls)} calls in {max(calls) - started:.1f} s; at most {most} in any second")
    assert max(calls) - started > (CALLS - BURST) / (HARD_LIMIT - BURST) - 0.1  # nobody called early

    with fencelock.connect(URL) as locks:
        limit = locks.rate_limit("service", HARD_LIMIT - BURST, per=1.0, burst=BURST)
        try:
            limit.acquire(cost=BURST, timeout=0.01)
        except fencelock.RateLimited as limited:
            print(f"refused without a charge; retry in {limited.retry_after:.2f} s")
        print(limit.state())


if __name__ == "__main__":
    main()
