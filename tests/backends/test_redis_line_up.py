"""Lining up without an answer, on a real server: whatever becomes of it, everybody has a turn, and one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle

import pytest
from redis import ResponseError

import fencelock
from fencelock.backends.redis.silence import HUSH
from fencelock.errors import Unanswered
from fencelock.model import TOKEN_MAX
from fencelock.worlds.blocking import have
from tests.backends.redis_contended import assert_in_step, contended, meet_others
from tests.backends.redis_server import commands, only_counters, tell
from tests.contract.subject import SOON
from tests.engines.proxy import Proxy
from tests.engines.redis import Redis, Redis62

Own = Callable[..., Redis]
THREADS = 4
SILENT = "client|reply"


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


def test_turns(server: Redis) -> None:
    """Where others are, one is asked for each turn, and one is given back: nothing else is said."""
    tell(server, "CONFIG", "RESETSTAT")
    Crowd(server.url).run(100)
    seen = commands(server)
    assert seen[SILENT] > 300
    assert seen["evalsha"] < 2 * 400 + 40
    assert abs(seen["subscribe"] - seen[SILENT]) < 40, "a word before the release of whoever was not alone"
    assert only_counters(server)


def free_at_once(server: Redis) -> None:
    """Who lines up without an answer and finds the lock free has it at once."""
    with fencelock.connect(server.url) as locks:
        with locks.lock("x"):
            pass
        for _ in range(20):
            meet_others(locks)
            begun = time.monotonic()
            with locks.lock("x") as lease:
                assert lease.token
                waited = time.monotonic() - begun
            if waited < HUSH:
                break  # a busy machine may be slow, but not every time
        else:
            pytest.fail("it was never told within the time that it does without an answer")


def test_nobody_there_after_all(server: Redis) -> None:
    """Who lines up without an answer is called at once where the lock is free."""
    free_at_once(server)
    assert commands(server)[SILENT] > 1


def test_nobody_there_on_an_old_server(own_redis62: Callable[..., Redis62]) -> None:
    """A server that calls nobody whom it does not answer, as Redis before 6.2.12 and 7.0.10, is asked for answers."""
    server = own_redis62()
    free_at_once(server)
    Crowd(server.url, body=0.001).run(30)
    assert only_counters(server)


def test_server_that_forgets_scripts(server: Redis) -> None:
    """What is not understood is not told either, and asked again with an answer."""
    with meanwhile(lambda: tell(server, "SCRIPT", "FLUSH"), 0.01):
        Crowd(server.url).run(60)
    assert only_counters(server)


def test_server_that_pauses(own_redis: Own) -> None:
    """A server that does not come to it in time is asked again, and takes both for one."""
    server = own_redis()
    with meanwhile(lambda: tell(server, "CLIENT", "PAUSE", 3 * int(HUSH * 1000), "ALL"), 0.3):
        Crowd(server.url, body=0.002).run(60)
    assert commands(server)[SILENT] > 0
    assert only_counters(server)


def test_longer_than_without_an_answer(server: Redis) -> None:
    """Who is not called in time learns where it stands, and is called later."""
    Crowd(server.url, body=HUSH).run(5)
    assert only_counters(server)


def refused_while_silent(server: Redis, pause: Callable[[], object], timeout: float) -> float:
    """Have somebody ask without an answer, and the server meet with something meanwhile; return how long it asked."""
    with fencelock.connect(server.url) as holder, fencelock.connect(server.url) as other:
        held = holder.lock("x").acquire()
        with other.lock("warm"):
            pass
        meet_others(other)
        begun = time.monotonic()
        timer = threading.Timer(HUSH / 3, pause)
        timer.start()
        with pytest.raises(fencelock.EngineUnavailable):
            other.lock("x", timeout=timeout).acquire()
        took = time.monotonic() - begun
        timer.join()
        assert not other._client.under_way
        server.resume()
        tell(server, "CONFIG", "SET", "maxmemory", 0)
        other.lock("warm").acquire().release()  # what could not be undone is undone now
        assert not holder.inspect("x").waiters
        assert held.release()
        again = holder.lock("x").try_acquire()
        assert again is not None
        assert again.release()
    return took


def test_refused_after_all(own_redis: Own) -> None:
    """Who is refused at the second attempt has left the line that it joined by the first."""
    server = own_redis()
    refused_while_silent(server, lambda: tell(server, "CONFIG", "SET", "maxmemory", 1), 10)


@pytest.mark.parametrize("timeout", [0.1, 2.0])
def test_server_that_hangs(own_redis: Own, timeout: float) -> None:
    """A short time-out is kept also where nothing is said, and what was asked is undone when the server goes on."""
    server = own_redis()
    assert refused_while_silent(server, server.pause, timeout) < timeout + 3.5


def test_slow_network(server: Redis, proxy: Callable[..., Proxy]) -> None:
    """A call that comes late, but before it is known whether we wait at all, is the lock."""
    between = proxy(server)
    with fencelock.connect(between.url) as locks:
        with locks.lock("x"):
            pass
        between.delay(HUSH * 1.5, "to_client")
        tell(server, "CONFIG", "RESETSTAT")
        meet_others(locks)
        lease = locks.lock("x").acquire()
        assert commands(server)["evalsha"] == 1
        assert lease.release()


def test_connections_that_break(server: Redis) -> None:
    """Whose connection is cut while nothing is said lines up anew."""
    with meanwhile(lambda: tell(server, "CLIENT", "KILL", "TYPE", "pubsub"), 0.05):
        Crowd(server.url, body=0.001).run(60)


def test_user_who_may_not_ask_for_silence(own_redis: Own) -> None:
    """Who is refused at the beginning does not ask for it again."""
    server = own_redis()
    tell(server, "ACL", "SETUSER", "loud", "on", ">secret", "~*", "&*", "+@all", "-client|reply")
    Crowd(server.url.replace("://", "://loud:secret@")).run(60)
    stats = tell(server, "INFO", "commandstats")[f"cmdstat_{SILENT}"]
    assert 0 < stats["rejected_calls"] <= 2 * THREADS
    assert stats["calls"] == 0
    assert only_counters(server)


@pytest.mark.parametrize("pause", [0, 4 * int(HUSH * 1000)])
def test_silence_that_is_refused_later(own_redis: Own, pause: int) -> None:
    """Where a server answers all the same, at once or late, no answer is taken for another's."""
    server = own_redis()
    tell(server, "ACL", "SETUSER", "some", "on", ">secret", "~*", "&*", "+@all")

    def change() -> None:
        tell(server, "ACL", "SETUSER", "some", next(changes))
        if pause:
            tell(server, "CLIENT", "PAUSE", pause, "ALL")

    changes = cycle(["-client|reply", "+client|reply"])
    with meanwhile(change, 0.4 if pause else 0.1):
        Crowd(server.url.replace("://", "://some:secret@"), body=0.002).run(100)
    stats = tell(server, "INFO", "commandstats")[f"cmdstat_{SILENT}"]
    assert stats["rejected_calls"] > 0 < stats["calls"]
    assert only_counters(server)


@contextmanager
def forbidden(server: Redis) -> Iterator[None]:
    """Have the server refuse what is said before a release, and carry out the release."""
    tell(server, "ACL", "SETUSER", "some", "-subscribe")
    yield
    tell(server, "ACL", "SETUSER", "some", "+subscribe")


@contextmanager
def busy(server: Redis) -> Iterator[None]:
    """Have the server refuse both."""
    tell(server, "CONFIG", "SET", "lua-time-limit", 1)
    script = threading.Thread(target=pytest.raises, args=(ResponseError, tell, server, "EVAL", "while true do end", 0))
    script.start()
    while True:
        try:
            tell(server, "PING")
        except ResponseError:
            break
    yield
    tell(server, "SCRIPT", "KILL")
    script.join()


@pytest.mark.parametrize("refusing", [forbidden, busy])
def test_word_before_a_release_is_refused(
    own_redis: Own, monkeypatch: pytest.MonkeyPatch, refusing: Callable[[Redis], AbstractContextManager[None]]
) -> None:
    """Where a server refuses the word that we say before a release, no answer is taken for another's."""
    for size in ("BRIEF", "CHUNK"):
        monkeypatch.setattr(f"fencelock.worlds.sockets.{size}", 8)  # so that answers are read one by one
    server = own_redis()
    tell(server, "ACL", "SETUSER", "some", "on", ">secret", "~*", "&*", "+@all")
    with fencelock.connect(server.url.replace("://", "://some:secret@")) as locks:
        lease = contended(locks, "x")
        tell(server, "CONFIG", "RESETSTAT")
        with refusing(server), pytest.raises(fencelock.EngineUnavailable, match=r"NOPERM|BUSY"):
            lease.release()
        assert tell(server, "INFO", "commandstats")["cmdstat_subscribe"]["rejected_calls"] == 1
        assert_in_step(locks)


def test_word_before_a_release_is_said_once(own_redis: Own) -> None:
    """Where the server has forgotten the script, it is taught without another word: that could be refused by then."""
    server = own_redis()
    with fencelock.connect(server.url) as locks:
        lease = contended(locks, "x")
        tell(server, "CONFIG", "RESETSTAT")
        tell(server, "SCRIPT", "FLUSH")
        assert lease.release()
        seen = commands(server)
        assert (seen["evalsha"], seen["eval"], seen["subscribe"]) == (1, 1, 1)


def test_word_before_a_release_is_refused_late(own_redis: Own) -> None:
    """Where a server hangs and refuses the word when it goes on, no answer is taken for another's."""
    server = own_redis()
    tell(server, "ACL", "SETUSER", "some", "on", ">secret", "~*", "&*", "+@all")
    with fencelock.connect(server.url.replace("://", "://some:secret@")) as locks:
        lease = contended(locks, "x", ttl=1)
        tell(server, "ACL", "SETUSER", "some", "-subscribe")
        server.pause()
        try:
            with pytest.raises(Unanswered):
                have(locks._client.backend.release(lease._grant))
        finally:
            server.resume()
        tell(server, "ACL", "SETUSER", "some", "+subscribe")
        assert_in_step(locks)
