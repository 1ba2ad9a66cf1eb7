"""Many threads that take turns on a real server: whatever goes wrong, everybody has a turn, and one at a time."""

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


class Crowd:
    """Threads, each with a client of its own, that take turns."""

    def __init__(self, url: str, body: float = 0.0) -> None:
        self._url = url
        self._body = body
        self._inside = 0
        self.tokens: list[int] = []
        self.errors: list[BaseException] = []

    def run(self, turns: int) -> None:
        """Let everybody have so many turns."""
        threads = [threading.Thread(target=self._take, args=(turns,)) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self.errors
        assert len(self.tokens) == THREADS * turns
        assert self.tokens == sorted(set(self.tokens)), "in the order of the turns, and none twice"
        assert 0 < self.tokens[0] <= self.tokens[-1] <= TOKEN_MAX

    def _take(self, turns: int) -> None:
        try:
            with fencelock.connect(self._url) as locks:
                lock = locks.lock("x", timeout=SOON)
                for _ in range(turns):
                    with lock as lease:
                        self._inside += 1
                        self.tokens.append(lease.token)
                        time.sleep(self._body)
                        assert self._inside == 1
                        self._inside -= 1
        except BaseException as error:
            self.errors.append(error)


@contextmanager
def meanwhile(harass: Callable[[], object], every: float) -> Iterator[None]:
    """Do that again and again."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(every):
            harass()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_two_scripts_for_each_turn(server: Redis) -> None:
    """A thread asks once for the lock and gives it back once; its wake-up brings the token, so nothing else is sent."""
    tell(server, "CONFIG", "RESETSTAT")
    Crowd(server.url).run(100)
    assert commands(server)["evalsha"] < 2 * 400 + 40
    assert only_counters(server)


def test_turns_on_the_oldest_server(own_redis62: Callable[..., Redis62]) -> None:
    """The same works on Redis 6.2."""
    server = own_redis62()
    Crowd(server.url, body=0.001).run(30)
    assert only_counters(server)


def test_server_that_forgets_scripts(server: Redis) -> None:
    """A script that the server has forgotten is sent again, and nobody loses its turn."""
    with meanwhile(lambda: tell(server, "SCRIPT", "FLUSH"), 0.01):
        Crowd(server.url).run(60)
    assert only_counters(server)


def test_server_that_pauses(own_redis: Own) -> None:
    """Turns go on after each pause of the server."""
    server = own_redis()
    with meanwhile(lambda: tell(server, "CLIENT", "PAUSE", 150, "ALL"), 0.3):
        Crowd(server.url, body=0.002).run(60)
    assert only_counters(server)


def test_connections_that_break(server: Redis) -> None:
    """A waiter whose connection is cut connects again and gets its turn."""
    with meanwhile(lambda: tell(server, "CLIENT", "KILL", "TYPE", "pubsub"), 0.05):
        Crowd(server.url, body=0.001).run(60)
