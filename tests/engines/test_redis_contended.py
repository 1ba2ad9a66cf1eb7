"""Many threads contend for one lock on a real server: through every fault, each gets the lock, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fencelock
from fencelock.model import TOKEN_MAX
from tests.engines.redis_server import commands, only_counters, tell
from tests.servers.redis import Redis, Redis62
from tests.support.waiting import SOON

Own = Callable[..., Redis]
THREADS = 4


class Contenders:
    """Threads, each with its own client, that contend for one lock."""

    def __init__(self, url: str, body: float = 0.0) -> None:
        self._url = url
        self._body = body
        self._inside = 0
        self.tokens: list[int] = []
        self.errors: list[BaseException] = []

    def run(self, times: int) -> None:
        """Let each thread acquire the lock this many times, and check the tokens."""
        threads = [threading.Thread(target=self._take, args=(times,)) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self.errors
        assert len(self.tokens) == THREADS * times
        assert self.tokens == sorted(set(self.tokens)), "tokens rise in the order of the grants"
        assert 0 < self.tokens[0] <= self.tokens[-1] <= TOKEN_MAX

    def _take(self, times: int) -> None:
        try:
            with fencelock.connect(self._url) as locks:
                lock = locks.lock("x", timeout=SOON)
                for _ in range(times):
                    with lock as lease:
                        self._inside += 1
                        self.tokens.append(lease.token)
                        time.sleep(self._body)
                        assert self._inside == 1
                        self._inside -= 1
        except BaseException as error:
            self.errors.append(error)


@contextmanager
def meanwhile(disturb: Callable[[], object], every: float) -> Iterator[None]:
    """Repeat a call in a thread while the body runs."""
    stopped = threading.Event()

    def repeat() -> None:
        while not stopped.wait(every):
            disturb()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def test_two_scripts_per_acquire_and_release(server: Redis) -> None:
    """An attempt and a release are enough for each grant: the wake-up has the token, so a waiter sends nothing else."""
    tell(server, "CONFIG", "RESETSTAT")
    Contenders(server.url).run(100)
    assert commands(server)["evalsha"] < 2 * 400 + 40
    assert only_counters(server)


def test_contention_on_the_oldest_supported_server(own_redis62: Callable[..., Redis62]) -> None:
    """Threads that contend on Redis 6.2 get the lock one at a time."""
    server = own_redis62()
    Contenders(server.url, body=0.001).run(30)
    assert only_counters(server)


def test_server_that_forgets_scripts(server: Redis) -> None:
    """The client sends a script again that the server has forgotten, and every thread gets the lock."""
    with meanwhile(lambda: tell(server, "SCRIPT", "FLUSH"), 0.01):
        Contenders(server.url).run(60)
    assert only_counters(server)


def test_server_that_pauses(own_redis: Own) -> None:
    """Threads go on to get the lock after each pause of the server."""
    server = own_redis()
    with meanwhile(lambda: tell(server, "CLIENT", "PAUSE", 150, "ALL"), 0.3):
        Contenders(server.url, body=0.002).run(60)
    assert only_counters(server)


def test_connections_that_break(server: Redis) -> None:
    """A waiter whose connection is cut connects again and gets the lock."""
    with meanwhile(lambda: tell(server, "CLIENT", "KILL", "TYPE", "pubsub"), 0.05):
        Contenders(server.url, body=0.001).run(60)
