"""Three candidates, one leader: it writes with the number of its term, resigns, and the next one goes on."""

import tempfile
import threading
from pathlib import Path

import fencelock
from fencelock.fences.memory import MemoryFence

URL = f"sqlite:///{Path(tempfile.mkdtemp())}/locks.db"
TERMS = 3
fence = MemoryFence()  # stands for the resource that the leader writes to
written: list[tuple[str, int]] = []
stop = threading.Event()


def candidate(name: str) -> None:
    """Stand for election again and again until `stop` is set."""
    with fencelock.connect(URL, owner=name) as locks:
        election = locks.election("scheduler", value=f"http://{name}:8080", ttl=5)

        def lead(term: fencelock.Lease) -> None:
            """Work while leading: return soon after `term.lost` or `stop` is set."""
            with fence.write(term):  # StaleToken if a later term has written
                written.append((name, term.token))
            print(f"{name} leads in term {term.token}; all clients can see {election.leader()}")
            if len(written) >= TERMS:
                stop.set()
            term.lost.wait(timeout=0.1)  # the work: a leader with more to do loops until `term.lost` or `stop`

        election.run(lead, stop)  # the lock is released only after `lead` has returned


def main() -> None:
    threads = [threading.Thread(target=candidate, args=(f"web-{number}",)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    with fencelock.connect(URL) as locks:
        for leader in locks.election("scheduler").observe(stop):  # the current leader or None, then every change
            print("observed:", leader and leader.owner)
    for thread in threads:
        thread.join()
    terms = [token for _, token in written]
    assert terms == sorted(set(terms)), "term numbers always rise"


if __name__ == "__main__":
    main()
