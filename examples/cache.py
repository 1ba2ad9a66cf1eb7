"""Twelve callers in three clients want a slow report: it is built once, then served stale while one of them rebuilds it."""

import tempfile
import threading
import time
from pathlib import Path

import fencelock

URL = f"sqlite:///{Path(tempfile.mkdtemp())}/locks.db"
builds: list[int] = []


def main() -> None:
    clients = [fencelock.connect(URL) for _ in range(3)]  # stand for three processes
    reports = []
    for locks in clients:

        @locks.cached("report:{day}", ttl=1, stale=60, timeout=10)
        def report(day: str) -> dict[str, object]:
            time.sleep(0.3)  # a slow query
            builds.append(1)
            return {"day": day, "version": len(builds)}

        reports.append(report)

    results: list[dict[str, object]] = []
    callers = [threading.Thread(target=lambda get=get: results.append(get("monday"))) for get in reports * 4]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    print(f"{len(results)} callers, {len(builds)} build: {results[0]}")
    assert len(builds) == 1

    time.sleep(1.1)  # now the value is stale
    started = time.monotonic()
    old = reports[0]("monday")
    print(f"stale value {old} after {(time.monotonic() - started) * 1000:.0f} ms; one caller rebuilds it")
    assert old == results[0]
    while (new := reports[1]("monday")) == old:
        time.sleep(0.05)
    print(f"rebuilt: {new}")

    reports[2].invalidate("monday")
    print(f"after invalidate: {reports[0]('monday')}")
    assert len(builds) == 3
    for locks in clients:
        locks.close()


if __name__ == "__main__":
    main()
