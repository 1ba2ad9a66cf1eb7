"""Events of the blocking world: any thread sets them, and Ctrl-C at any moment harms nobody."""

from __future__ import annotations

import subprocess
import sys
import threading

from fencelock.worlds.blocking import BlockingWorld, drive

INTERRUPTED = """
import os, signal, threading, time
from fencelock.worlds.blocking import BlockingWorld, drive

event, sets, interrupts, over = BlockingWorld().event(), 0, 0, False

def keep_setting():
    global sets
    while not over:
        event.set()
        event.clear()
        sets += 1
        time.sleep(0.0001)

def keep_interrupting():
    while not over:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.0003)

end = time.monotonic() + 3
threads = [threading.Thread(target=work, daemon=True) for work in (keep_setting, keep_interrupting)]
while not over:
    try:
        while threads:
            threads.pop().start()
        while time.monotonic() < end:
            drive(event.wait(0.0002))
        over = True
    except (KeyboardInterrupt, RuntimeError):  # a thread may have been started in spite of it
        interrupts += 1
signal.signal(signal.SIGINT, signal.SIG_IGN)
assert interrupts > 100, interrupts
setting = threading.Thread(target=event.set, daemon=True)
setting.start()
setting.join(10)
os._exit(setting.is_alive())
"""


def test_interrupts_while_waiting() -> None:
    """However often a wait is interrupted, whoever sets the event never hangs."""
    assert subprocess.run([sys.executable, "-c", INTERRUPTED], check=False, timeout=60).returncode == 0


def test_wakes_all_who_wait() -> None:
    """Everybody who waits is woken; who comes later need not wait."""
    event = BlockingWorld().event()
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(drive(event.wait(20)))) for _ in range(5)]
    for thread in threads:
        thread.start()
    while len(event._waiters) < 5:
        pass
    event.set()
    for thread in threads:
        thread.join(20)
    assert woken == [True] * 5
    assert drive(event.wait(0)) is True
    event.clear()
    assert drive(event.wait(0)) is False
    assert drive(event.wait(-1)) is False
    assert event._waiters == []
