"""The simulated Redis replies as the real one does: both get the same random commands."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import hiredis
import pytest

from fencelock.core.runtime import Command
from fencelock.sim.lua import Refused
from fencelock.sim.redis import Redis
from tests.servers import Redis as RealRedis

KEYS = ("s", "h", "z", "l", "x")
"""Mostly a string, a hash, a sorted set and a list; the last may be any of them."""
WORDS = ("a", "b", "c", "7", "-3", "2.5", "1700000000000001")
SOON, LATER = 600_000, 3_600_000
"""Milliseconds: keys that the test expires after a round, and keys that stay. No key expires during a round, as the
two servers do not get a command at the same moment."""

DATABASE = 9999
"""A database that no other test uses."""


class Real:
    """A bare connection to a real server."""

    def __init__(self, node: RealRedis) -> None:
        self._socket = socket.create_connection((node.host, node.port), 10)
        self._reader = hiredis.Reader()

    def request(self, *command: Any) -> Any:
        self._socket.sendall(hiredis.pack_command(command))
        return self.next()

    def next(self) -> Any:
        while (answer := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        return answer

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def real(redis_node: RealRedis) -> Iterator[Real]:
    real = Real(redis_node)
    real.request("SELECT", DATABASE)
    real.request("FLUSHDB")
    real.request("SCRIPT", "FLUSH")
    yield real
    real.request("FLUSHDB")
    real.close()


def plain(answer: Any) -> Any:
    """Return what must be the same: of an error, its code."""
    if isinstance(answer, Exception):
        return f"error {str(answer).split()[0]}"
    if isinstance(answer, list):
        return [plain(part) for part in answer]
    return answer


def random_command(rng: Random) -> Command:
    """Return a random command, mostly on a key of the right type."""

    def key(usual: str) -> str:
        return usual if rng.random() < 0.85 else rng.choice(KEYS)

    def word() -> str:
        return rng.choice(WORDS)

    def number() -> int:
        return rng.randint(-3, 4)

    def some(make: Callable[[], Any], most: int = 3) -> list[Any]:
        return [make() for _ in range(rng.randint(1, most))]

    def pairs(first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
        return [item for _ in range(rng.randint(1, 3)) for item in (first(), second())]

    def flags(*choices: str) -> list[str]:
        return [choice for choice in choices if rng.random() < 0.25]

    def ms() -> int:
        # Seconds apart: which of two that are the same is greater depends on the millisecond in which each is asked for.
        return rng.choice((SOON, LATER, LATER)) - 1000 * rng.randrange(500)

    def until() -> list[Any]:
        return rng.choice(([], [], ["PX", ms()], ["EX", 3600], ["KEEPTTL"], ["PXAT", 4_000_000_000_000]))

    def condition() -> list[str]:
        return rng.choice(([], [], ["NX"], ["XX"]))

    s, h, z, lst = key("s"), key("h"), key("z"), key("l")
    anything = rng.choice(KEYS)
    makers: tuple[Callable[[], Command], ...] = (
        lambda: ("SET", s, word(), *until(), *condition(), *flags("GET")),
        lambda: ("SET", s, word()),
        lambda: ("GET", s),
        lambda: ("INCRBY", s, number()),
        lambda: ("EXISTS", *some(lambda: rng.choice(KEYS))),
        lambda: (rng.choice(("DEL", "UNLINK")), *some(lambda: rng.choice(KEYS), 2)),
        lambda: ("TYPE", anything),
        lambda: ("RENAME", anything, rng.choice(KEYS)),
        lambda: ("PEXPIRE", anything, ms()),
        lambda: ("PEXPIRE", anything, -1),
        lambda: ("PEXPIREAT", anything, 4_000_000_000_000),
        lambda: ("HSET", h, *pairs(word, word)),
        lambda: ("HGET", h, word()),
        lambda: ("HMGET", h, *some(word)),
        lambda: ("HDEL", h, *some(word)),
        lambda: ("HEXISTS", h, word()),
        lambda: (rng.choice(("HLEN", "HGETALL")), h),
        lambda: ("ZADD", z, *flags("NX"), *pairs(lambda: rng.choice((1, 2, "3.5")), word)),
        lambda: ("ZREM", z, *some(word)),
        lambda: ("ZRANGE", z, number(), number(), *flags("WITHSCORES")),
        lambda: ("RPUSH", lst, *some(word)),
        lambda: ("LRANGE", lst, number(), number()),
        lambda: ("LINDEX", lst, number()),
        lambda: ("LPOS", lst, word()),
        lambda: ("LPOS", lst, word(), "RANK", -1),
        lambda: ("LREM", lst, 1, word()),
        lambda: ("EVAL", rng.choice(SCRIPTS), 2, anything, rng.choice(KEYS), word(), number()),
        lambda: ("PUBLISH", "nobody", word()),
        lambda: rng.choice((("GET",), ("HSET", h, "odd"), ("NOSUCH",), ("ZADD", z, "one", "a"))),
    )
    return rng.choice(makers)()


SCRIPTS = (
    "return redis.call('TYPE', KEYS[1])",
    "return redis.call('TYPE', KEYS[1]).ok",
    "return {redis.call('EXISTS', KEYS[1], KEYS[2]), 3.99, -3.99, true, false, 'x'}",
    "return {1, 2, nil, 4}",
    "return {ARGV[1], {ARGV[2], {KEYS[1]}}, redis.call('GET', 'nothing')}",
    "return redis.call('GET', KEYS[1])",
    "return redis.pcall('GET', KEYS[1])",
    "local got = redis.pcall('GET', KEYS[1]) return type(got) == 'table' and got.err or got",
    "return {err = 'MINE and no other'}",
    "return redis.error_reply('MINE and no other')",
    "return redis.error_reply('-MINE and no other')",
    "return redis.error_reply('MINE')",
    "return redis.status_reply('FINE')",
    "return {ok = 'FINE'}",
    "return tostring(tonumber(ARGV[1]))",
    "return tonumber(ARGV[1])",
    "return string.format('%.0f', tonumber(ARGV[2]) * 1700000000000001)",
    "return {tostring(1e15), tostring(123456789012345), tostring(2^53), 2^53, 1e15 / 3, tostring(0.1)}",
    "return redis.call('HSET', KEYS[1], 'n', tonumber(ARGV[2]) + 1700000000000000, 'm', 0.5)",
    "return redis.call('HGETALL', KEYS[1])",
    "return #redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')",
    "return redis.call('SET', KEYS[1], ARGV[1], 'PX', 3600000, 'NX')",
    "return redis.call('SET', KEYS[1], ARGV[1], 'PX', 3600000, 'NX') and 1 or 0",
    "if redis.call('PTTL', KEYS[1]) > 0 then return redis.call('PTTL', KEYS[1]) > 1000 end return 'none'",
    "made = 1",
    "return nosuch",
    "return 'no end",
    "return redis.call('NOSUCH')",
    "return redis.call('GET')",
    "return redis.sha1hex(ARGV[1])",
    "local t = redis.call('TIME') return {#t, tonumber(t[1]) > 1600000000, #tostring(tonumber(t[2])) <= 6}",
    "error('gone')",
    "error({err = 'MINE all the same'})",
    "return {redis.pcall('GET'), 1}",
    "return {1, {err = 'INNER error'}, 2}",
    "local sum = 0 for _, k in ipairs(KEYS) do sum = sum + #k end return sum",
    "return redis.call('INCRBY', KEYS[1], ARGV[2])",
    "return {redis.call('EXISTS', KEYS[1]) == 1, redis.call('GET', 'nothing') == false}",
)


@pytest.mark.parametrize("seed", range(10))
def test_the_same_replies(real: Real, seed: int) -> None:
    """Both reply the same to every command of a long random sequence, also after some keys have expired."""
    rng = Random(seed)
    model = Redis(lambda: time.time_ns() // 1000)
    for round in range(2):
        for number in range(400):
            command = random_command(rng)
            ours, theirs = (plain(answer) for answer in (model.request(command)[0], real.request(*command)))
            assert ours == theirs, f"round {round}, command {number}: {command}"
        for key in KEYS:
            ours, theirs = model.request(("PTTL", key))[0], real.request("PTTL", key)
            assert abs(ours - theirs) < 10_000, f"round {round}: the ttl of {key}"
            if 0 < theirs <= SOON:
                assert model.request(("PEXPIRE", key, 1))[0] == real.request("PEXPIRE", key, 1) == 1
        time.sleep(0.01)
        for key in KEYS:
            assert model.request(("EXISTS", key))[0] == real.request("EXISTS", key)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts(real: Real, script: str) -> None:
    """Both reply the same to every script, on each type of key and without a key."""
    model = Redis(lambda: time.time_ns() // 1000)
    filled: list[Command] = [("SET", "s", "5"), ("HSET", "h", "a", 1), ("ZADD", "z", 1, "a"), ("RPUSH", "l", "a")]
    for command in filled:
        model.request(command)
        real.request(*command)
    for key in KEYS:
        for argument in ("7", "word", "0x10", " 5 ", ""):
            command = ("EVAL", script, 2, key, "s", argument, 3)
            assert plain(model.request(command)[0]) == plain(real.request(*command)), command


def test_scripts_are_found_by_their_hash(real: Real) -> None:
    """A script is loaded, found, flushed, and then missed."""
    model = Redis(lambda: 0)
    sha = model.request(("SCRIPT", "LOAD", "return 1"))[0].decode()
    commands: list[Command] = [
        ("EVALSHA", sha, 0),
        ("SCRIPT", "LOAD", "return 1"),
        ("EVALSHA", sha, 0),
        ("EVALSHA", sha.upper(), 0),
        ("EVALSHA", sha, 2, "a"),
        ("SCRIPT", "EXISTS", sha, "0" * 40),
        ("SCRIPT", "FLUSH"),
        ("EVALSHA", sha, 0),
        ("EVAL", "return 1", 0),
        ("EVALSHA", sha, 0),
        ("SCRIPT", "LOAD", "return ("),
        ("SCRIPT", "NOSUCH"),
    ]
    model.request(("SCRIPT", "FLUSH"))
    for command in commands:
        assert plain(model.request(command)[0]) == plain(real.request(*command)), command


def test_a_scan_finds_everything_that_stays(real: Real) -> None:
    """A scan in small pages, while other keys come and go, yields each key that was there all the time."""
    model = Redis(lambda: 0)

    def ours(*command: Any) -> Any:
        return model.request(command)[0]

    for ask in (ours, real.request):
        for number in range(100):
            ask("SET", f"stays:{number}", "1")
        found: set[bytes] = set()
        cursor, pages = b"0", 0
        while pages == 0 or cursor != b"0":
            cursor, keys = ask("SCAN", int(cursor), "MATCH", "stays:*", "COUNT", 7)
            found.update(keys)
            ask("SET", f"new:{pages}", "1")
            ask("DEL", f"new:{pages - 3}")
            pages += 1
        assert len(found) == 100
        assert pages > 5


def test_subscriptions(redis_node: RealRedis, real: Real) -> None:
    """A subscriber gets published messages, also from a script, until it unsubscribes."""
    listener = Real(redis_node)
    pushed: list[list[Any]] = []

    class Ours:
        def push(self, message: list[Any]) -> None:
            pushed.append(message)

    model, session = Redis(lambda: 0), Ours()
    try:
        subscribe: Command = ("SUBSCRIBE", "a", "b")
        assert model.request(subscribe, session) == []
        assert pushed == [listener.request(*subscribe), listener.next()]
        pushed.clear()
        script = "return redis.call('PUBLISH', 'a', ARGV[1])"
        for command in (
            ("PUBSUB", "NUMSUB", "a", "c"),
            ("PUBLISH", "a", "one"),
            ("EVAL", script, 0, "two"),
            ("PUBLISH", "c", "none"),
        ):
            assert model.request(command)[0] == real.request(*command)
        assert pushed == [listener.next(), listener.next()]
        pushed.clear()
        for leave in (("UNSUBSCRIBE", "a"), ("UNSUBSCRIBE", "never there"), ("UNSUBSCRIBE",)):
            assert model.request(leave, session) == []
            assert pushed == [listener.request(*leave)]
            pushed.clear()
        assert model.request(("PUBLISH", "a", "three"))[0] == 0
        model.forget(session)
        assert model.request(("PUBLISH", "b", "four"))[0] == 0
    finally:
        listener.close()


def test_info_has_the_lines_that_engines_read(real: Real) -> None:
    """Every line of the simulated INFO exists in that of Redis."""
    model = Redis(lambda: 0, "a" * 40)
    for section in ("server", "memory"):
        ours, theirs = (
            dict(line.split(b":", 1) for line in text.split(b"\r\n") if b":" in line)
            for text in (model.request(("INFO", section))[0], real.request("INFO", section))
        )
        assert ours.keys() <= theirs.keys()
    assert model.request(("INFO", "server"))[0].count(b"run_id:" + b"a" * 40) == 1


def test_keys_expire_by_the_servers_clock() -> None:
    """A key exists up to the millisecond in which it expires, and a restart with the data keeps it."""
    now = 5_000_000
    model = Redis(lambda: now)
    model.request(("SET", "k", "v", "PX", 10))
    model.start("b" * 40)
    now += 10_000
    assert model.request(("PTTL", "k")) == [0]
    now += 1_000
    assert model.request(("GET", "k")) == [None]
    assert model.contents() == {}
    assert isinstance(model.request(("EVALSHA", "0" * 40, 0))[0], Refused)
