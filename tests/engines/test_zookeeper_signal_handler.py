"""A signal handler that releases a lease, at every line of the code that two callers must not run at the same time."""

from __future__ import annotations

import subprocess
import sys

from tests.engines.zookeeper_server import chroot
from tests.servers.zookeeper import ZooKeeper

HANDLER = """
import faulthandler, signal, sys
import fencelock

faulthandler.dump_traceback_later(80, exit=True)
GUARDED = {
    "session_clock.py": ("answered",), "session.py": ("request", "send", "_send_all"),
    "watches.py": ("watch", "_listen", "unwatch"),
    "session_pool.py": ("_get_or_open", "_forget"), "connection.py": ("send",),
}
held, seen = None, set()

def handler(*_):
    global held
    lease, held = held, None
    assert lease.release()

def line(frame, event, arg):
    place = frame.f_code.co_filename, frame.f_lineno
    if event == "line" and held is not None and place not in seen:
        seen.add(place)
        signal.raise_signal(signal.SIGUSR1)
    return line

def trace(frame, event, arg):
    folder, _, file = frame.f_code.co_filename.rpartition("/")
    return line if folder.endswith("zookeeper") and frame.f_code.co_name in GUARDED.get(file, ()) else None

signal.signal(signal.SIGUSR1, handler)
with fencelock.connect(sys.argv[1], ttl=10) as locks:
    with locks.lock("a"):
        pass
    before = -1
    while len(seen) > before:
        before = len(seen)
        for name in ("a", "b"):
            held = locks.lock("b").acquire()
            sys.settrace(trace)
            lease = None
            try:
                lease = locks.lock(name).acquire(timeout=0.5)
            except TimeoutError:
                pass
            if lease is not None:
                assert lease.release()
            sys.settrace(None)
            if held is not None:
                handler()
files = {file.rpartition("/")[2] for file, _ in seen}
assert files == set(GUARDED), files
"""


def test_release_in_a_signal_handler(zookeeper1: ZooKeeper) -> None:
    """Nothing hangs, and every release succeeds."""
    subprocess.run([sys.executable, "-c", HANDLER, chroot(zookeeper1)], check=True, timeout=90)
