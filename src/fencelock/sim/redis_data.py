"""The data of a simulated Redis: its commands on strings, hashes, sorted sets and lists, and the expiry of keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar
from zlib import crc32

from fencelock.sim.lua import Refused, Status

T = TypeVar("T")

OK = Status(b"OK")
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
SYNTAX = "ERR syntax error"

Words = list[bytes]


class Zset(dict[bytes, float]):
    """Members and their scores."""

    def ranked(self) -> list[tuple[bytes, float]]:
        """Return the members in order."""
        return sorted(self.items(), key=lambda item: (item[1], item[0]))


NAMES: dict[type, bytes] = {bytes: b"string", dict: b"hash", Zset: b"zset", set: b"set", list: b"list"}


class Data:
    """All keys. Each command is a method; `_now` is the time of the command, in ms."""

    def __init__(self, wall: Callable[[], int]) -> None:
        self._wall = wall
        self._now = 0
        self.wipe()

    def wipe(self) -> None:
        """Lose all data."""
        self._data: dict[bytes, Any] = {}
        self._expires: dict[bytes, int] = {}

    def contents(self) -> dict[bytes, Any]:
        """Return the keys that have not expired, for the checker."""
        self._now = self._wall() // 1000
        return {key: value for key in list(self._data) if (value := self._peek(key)) is not None}

    # ------------------------------------------------------------------ keys

    def _peek(self, key: bytes) -> Any:
        value = self._data.get(key)
        if value is not None and (until := self._expires.get(key)) is not None and self._now > until:
            self._drop(key)
            return None
        return value

    def _find(self, key: bytes, kind: type[T]) -> T | None:
        value = self._peek(key)
        if value is not None and type(value) is not kind:
            raise Refused(WRONG_TYPE)
        return value

    def _make(self, key: bytes, kind: type[T]) -> T:
        value = self._find(key, kind)
        if value is None:
            value = self._data[key] = kind()
        return value

    def _drop(self, key: bytes) -> None:
        del self._data[key]
        self._expires.pop(key, None)

    def _drop_if_empty(self, key: bytes) -> None:
        if not self._data[key]:
            self._drop(key)

    def _keys(self) -> list[bytes]:
        return [key for key in list(self._data) if self._peek(key) is not None]

    def _do_exists(self, keys: Words) -> int:
        return sum(self._peek(key) is not None for key in keys)

    def _do_del(self, keys: Words) -> int:
        there = [key for key in dict.fromkeys(keys) if self._peek(key) is not None]
        for key in there:
            self._drop(key)
        return len(there)

    _do_unlink = _do_del

    def _do_type(self, words: Words) -> Status:
        (key,) = words
        return Status(NAMES.get(type(self._peek(key)), b"none"))

    def _do_rename(self, words: Words) -> Status:
        old, new = words
        if (value := self._peek(old)) is None:
            raise Refused("ERR no such key")
        until = self._expires.get(old)
        self._drop(old)
        self._data[new] = value
        self._expires.pop(new, None)
        if until is not None:
            self._expires[new] = until
        return OK

    def _do_scan(self, words: Words) -> list[Any]:
        """Scan in the order of a checksum, which other keys do not change."""
        cursor, options = int(words[0]), {name.upper(): value for name, value in _pairs(words[1:])}
        pattern, count = options.get(b"MATCH", b"*"), int(options.get(b"COUNT", b"10"))
        rest = sorted((crc32(key) + 1, key) for key in self._keys() if crc32(key) + 1 > cursor)
        page = rest[:count]
        while len(page) < len(rest) and rest[len(page)][0] == page[-1][0]:
            page.append(rest[len(page)])
        last = page[-1][0] if len(page) < len(rest) else 0
        return [b"%d" % last, [key for _, key in page if _matches(key, pattern)]]

    # ------------------------------------------------------------------ time

    def _do_time(self, _: Words) -> Words:
        return [b"%d" % part for part in divmod(self._wall(), 1_000_000)]

    def _do_pexpireat(self, words: Words) -> int:
        key, until = words
        if self._peek(key) is None:
            return 0
        self._expire(key, int(until))
        return 1

    def _do_pexpire(self, words: Words) -> int:
        key, ms = words
        return self._do_pexpireat([key, b"%d" % (self._now + int(ms))])

    def _expire(self, key: bytes, until: int) -> None:
        if until <= self._now:
            self._drop(key)
        else:
            self._expires[key] = until

    def _do_pttl(self, words: Words) -> int:
        (key,) = words
        if self._peek(key) is None:
            return -2
        until = self._expires.get(key)
        return -1 if until is None else until - self._now

    # ------------------------------------------------------------------ strings

    def _do_get(self, words: Words) -> bytes | None:
        (key,) = words
        return self._find(key, bytes)

    def _do_set(self, words: Words) -> Any:
        key, value, *options = words
        flags, until = set(), None
        while options:
            option = options.pop(0).upper()
            if option in (b"EX", b"PX", b"PXAT"):
                number = int(options.pop(0)) * (1000 if option == b"EX" else 1)
                if number <= 0:
                    raise Refused("ERR invalid expire time in 'set' command")
                until = number if option == b"PXAT" else self._now + number
            elif option in (b"NX", b"XX", b"GET", b"KEEPTTL"):
                flags.add(option)
            else:
                raise Refused(SYNTAX)
        if {b"NX", b"XX"} <= flags or (until is not None and b"KEEPTTL" in flags):
            raise Refused(SYNTAX)
        before = self._find(key, bytes) if b"GET" in flags else None
        there = self._peek(key) is not None
        if (b"NX" in flags and there) or (b"XX" in flags and not there):
            return before
        self._data[key] = value
        if b"KEEPTTL" not in flags:
            self._expires.pop(key, None)
        if until is not None:
            self._expire(key, until)
        return before if b"GET" in flags else OK

    def _do_incrby(self, words: Words) -> int:
        key, by = words
        value = int(self._find(key, bytes) or 0) + int(by)
        self._data[key] = b"%d" % value
        return value

    # ------------------------------------------------------------------ hashes

    def _hash(self, key: bytes) -> dict[bytes, bytes]:
        return self._find(key, dict) or {}

    def _do_hget(self, words: Words) -> bytes | None:
        key, field = words
        return self._hash(key).get(field)

    def _do_hmget(self, words: Words) -> list[bytes | None]:
        key, *fields = words
        there = self._hash(key)
        return [there.get(field) for field in fields]

    def _do_hset(self, words: Words) -> int:
        key, *rest = words
        if not rest or len(rest) % 2:
            raise IndexError
        there: dict[bytes, bytes] = self._make(key, dict)
        before = len(there)
        if len(rest) == 2:
            there[rest[0]] = rest[1]
        else:
            there.update(_pairs(rest))
        return len(there) - before

    def _do_hdel(self, words: Words) -> int:
        key, *fields = words
        there = self._hash(key)
        gone = sum(there.pop(field, None) is not None for field in fields)
        if gone:
            self._drop_if_empty(key)
        return gone

    def _do_hexists(self, words: Words) -> int:
        key, field = words
        return int(field in self._hash(key))

    def _do_hlen(self, words: Words) -> int:
        (key,) = words
        return len(self._hash(key))

    def _do_hgetall(self, words: Words) -> Words:
        (key,) = words
        return [word for pair in self._hash(key).items() for word in pair]

    # ------------------------------------------------------------------ sorted sets

    def _zset(self, key: bytes) -> Zset:
        return self._find(key, Zset) or Zset()

    def _do_zadd(self, words: Words) -> int:
        key, *rest = words
        keep = bool(rest) and rest[0].upper() == b"NX"
        if len(rest) - keep < 2 or (len(rest) - keep) % 2:
            raise Refused(SYNTAX)
        pairs = [(member, _score(score)) for score, member in _pairs(rest[keep:])]
        there = self._make(key, Zset)
        before = len(there)
        for member, score in pairs:
            if not (keep and member in there):
                there[member] = score
        return len(there) - before

    def _do_zrem(self, words: Words) -> int:
        key, *members = words
        there = self._zset(key)
        gone = sum(there.pop(member, None) is not None for member in members)
        if gone:
            self._drop_if_empty(key)
        return gone

    def _do_zrange(self, words: Words) -> Words:
        key, start, stop, *options = words
        if options not in ([], [b"WITHSCORES"]):
            raise Refused(SYNTAX)
        ranked = self._zset(key).ranked()
        found = ranked[_span(len(ranked), start, stop)]
        return [word for member, score in found for word in ((member, b"%.17g" % score) if options else (member,))]

    # ------------------------------------------------------------------ lists

    def _do_rpush(self, words: Words) -> int:
        key, *items = words
        there: Words = self._make(key, list)
        there += items
        return len(there)

    def _do_lrange(self, words: Words) -> Words:
        key, start, stop = words
        there: Words = self._find(key, list) or []
        return there[_span(len(there), start, stop)]

    def _do_lindex(self, words: Words) -> bytes | None:
        key, place = words
        there: Words = self._find(key, list) or []
        at = int(place) + (len(there) if int(place) < 0 else 0)
        return there[at] if 0 <= at < len(there) else None

    def _do_lpos(self, words: Words) -> int | None:
        key, item, *rank = words
        there: Words = self._find(key, list) or []
        if item not in there:
            return None
        if not rank:
            return there.index(item)
        if rank != [b"RANK", b"-1"]:
            raise NotImplementedError("here LPOS finds the first one, or with RANK -1 the last")
        return len(there) - 1 - there[::-1].index(item)

    def _do_lrem(self, words: Words) -> int:
        key, count, item = words
        there: Words | None = self._find(key, list)
        if int(count) != 1:
            raise NotImplementedError("here LREM takes away the first one only")
        if there is None or item not in there:
            return 0
        there.remove(item)
        self._drop_if_empty(key)
        return 1


def _pairs(words: Words) -> Iterable[tuple[bytes, bytes]]:
    return zip(words[::2], words[1::2], strict=True)


def _matches(key: bytes, pattern: bytes) -> bool:
    return _pattern(pattern).fullmatch(key) is not None


@cache
def _pattern(glob: bytes) -> re.Pattern[bytes]:
    def translate(found: re.Match[bytes]) -> bytes:
        part = found[0]
        if part in (b"*", b"?"):
            return b".*" if part == b"*" else b"."
        if part.startswith(b"[") and part.endswith(b"]") and len(part) > 2:
            return part
        return re.escape(part[1:] if part.startswith(b"\\") and len(part) > 1 else part)

    return re.compile(re.sub(rb"\\.|\[(?:\\.|[^\]])+\]|.", translate, glob, flags=re.DOTALL), re.DOTALL)


def _span(length: int, start: bytes, stop: bytes) -> slice:
    first, last = int(start), int(stop)
    if first < 0:
        first = max(0, first + length)
    return slice(first, max(0, last + length + 1) if last < 0 else last + 1)


def _score(text: bytes) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise Refused("ERR value is not a valid float") from error
