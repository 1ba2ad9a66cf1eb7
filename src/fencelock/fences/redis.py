"""The Redis fence: every write compares tokens in the same script that writes, in one round trip.

Redis has no transaction that a holder could read in, so `enter` raises the mark before the first read; from then on nothing
older is written. A client of redis-py's is handed in, of either colour, or a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from hashlib import sha1
from pathlib import Path
from typing import Any

from fencelock.errors import StaleToken
from fencelock.fences import Fenced
from fencelock.fences.core import (
    Credentials,
    Mark,
    bearer,
    check_reason,
    check_resource,
    check_token,
    refusal,
    tell_collected,
    tell_moved,
)

REFUSED = "FENCED"
"""How the script's error begins; the mark that it saw follows."""

SCAN_COUNT = 500


class RedisFence:
    """Fenced SET, HSET and DEL, and scripts of your own, run fenced.

    `client` is a `redis.Redis`, or a `redis.asyncio.Redis`, and then every method is to be awaited. The marks are keys that
    begin with `prefix` and never expire; `collect` forgets old ones. With `on=pipeline` a write joins a pipeline instead.

    >>> import redis, types
    >>> fence = RedisFence(redis.Redis())
    >>> def sell(client: redis.Redis, lease: fencelock.Lease) -> None:
    ...     fence = RedisFence(client)
    ...     fence.enter("stock", lease)                               # first, then read
    ...     left = int(client.get("apples") or 0) - 5
    ...     fence.set("stock", lease, "apples", left)                 # StaleToken if somebody newer has entered
    """

    def __init__(self, client: Any, *, prefix: str = "fencelock:fence:") -> None:
        if not prefix:
            raise ValueError("the marks need a prefix of their own among Redis's keys")
        self._client = client
        self._prefix = prefix
        self._awaited = any(kind.__module__.startswith("redis.asyncio") for kind in type(client).__mro__)

    # ------------------------------------------------------------------ what holders do

    def enter(self, resource: str, lease: Fenced, *, on: Any = None) -> Any:
        """Keep older tokens out from now on, or raise StaleToken. Call it before the first read."""
        return self.run(resource, lease, "return 1", on=on)

    def set(
        self, resource: str, lease: Fenced, key: str | bytes, value: Any, *, px: int | None = None, on: Any = None
    ) -> Any:
        """SET a key, fenced; `px` is its time to live in ms."""
        more = () if px is None else ("PX", px)
        return self.run(resource, lease, _script("call").text, [key], ["SET", value, *more], on=on)

    def hset(
        self, resource: str, lease: Fenced, key: str | bytes, mapping: Mapping[Any, Any], *, on: Any = None
    ) -> Any:
        """HSET fields of a hash, fenced; return how many are new."""
        words = [word for pair in mapping.items() for word in pair]
        return self.run(resource, lease, _script("call").text, [key], ["HSET", *words], on=on)

    def delete(self, resource: str, lease: Fenced, *keys: str | bytes, on: Any = None) -> Any:
        """DEL keys, fenced; return how many there were."""
        return self.run(resource, lease, _script("call").text, keys, ["DEL"], on=on)

    def run(
        self,
        resource: str,
        lease: Fenced,
        script: str,
        keys: Iterable[str | bytes] = (),
        args: Iterable[Any] = (),
        *,
        on: Any = None,
    ) -> Any:
        """Run a Lua script of your own unless the token is old; it sees its own KEYS and ARGV and nothing of the fence.

        >>> more = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
        >>> def restock(fence: RedisFence, lease: fencelock.Lease) -> int:
        ...     return fence.run("stock", lease, more, keys=["apples"], args=[10])
        """
        name, mine = check_resource(resource), bearer(lease)
        places = [*keys, self._prefix + name, self._prefix]
        words = [*args, mine.token, mine.id]
        return self._call(on, _fenced(script), places, words, _Refusal(name, mine))

    @contextmanager
    def refusals(self, resource: str, lease: Fenced) -> Iterator[None]:
        """Turn the error of a pipeline whose fenced write was refused into StaleToken.

        A pipeline is no transaction: what is not fenced in it is carried out all the same. Fence every write of it.

        >>> def sell(fence: RedisFence, client: redis.Redis, lease: fencelock.Lease) -> None:
        ...     with client.pipeline() as pipe, fence.refusals("stock", lease):
        ...         fence.set("stock", lease, "apples", 95, on=pipe)
        ...         fence.hset("stock", lease, "sold", {"apples": 5}, on=pipe)
        ...         pipe.execute()
        """
        try:
            yield
        except Exception as error:
            stale = _Refusal(check_resource(resource), bearer(lease)).of(error)
            if stale is None:
                raise
            raise stale from error

    # ------------------------------------------------------------------ what keepers of the fence do

    def token(self, resource: str) -> Any:
        """Return the lowest token that would be let in: the highest that was, or the floor, or None."""
        places = [self._prefix + check_resource(resource), self._prefix]
        return self._call(None, _script("seen"), places, (), None, _token_of)

    def rebase(self, resource: str, token: int, *, reason: str) -> Any:
        """Move the fence on purpose, down or up: every token from this one on is let in. Logged, with the reason."""
        to, why = check_token(token), check_reason(check_resource(resource), reason)

        def moved(before: Any) -> None:
            tell_moved(resource, _token_of(before), to, why)

        return self._call(None, _script("move"), [self._prefix + resource], [to], None, moved)

    def collect(self, floor: int) -> Any:
        """Forget every resource whose token is below the floor; return how many there were.

        A resource that is forgotten, or that was never seen, refuses tokens below the floor from then on.
        """
        check_token(floor)
        return self._collect_awaited(floor) if self._awaited else self._collect(floor)

    def _collect(self, floor: int) -> int:
        self._call(None, _script("raise"), [self._prefix], [floor], None)
        found = self._client.scan_iter(match=_literal(self._prefix) + "?*", count=SCAN_COUNT)
        count: int = sum(self._call(None, _script("forget"), [key], [floor], None) for key in found)
        tell_collected(count, floor)
        return count

    async def _collect_awaited(self, floor: int) -> int:
        await self._call(None, _script("raise"), [self._prefix], [floor], None)
        count = 0
        async for key in self._client.scan_iter(match=_literal(self._prefix) + "?*", count=SCAN_COUNT):
            count += await self._call(None, _script("forget"), [key], [floor], None)
        tell_collected(count, floor)
        return count

    # ------------------------------------------------------------------ one call

    def _call(
        self,
        on: Any,
        script: _Script,
        keys: list[Any],
        args: Iterable[Any],
        refused: _Refusal | None,
        then: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        words = (len(keys), *keys, *args)
        if on is not None:
            # By its text: redis-py would ask the server first which digests it knows, in a round trip of its own.
            return on.eval(script.text, *words)
        return (self._ask_awaited if self._awaited else self._ask)(script, words, refused, then)

    def _ask(
        self, script: _Script, words: tuple[Any, ...], refused: _Refusal | None, then: Callable[[Any], Any]
    ) -> Any:
        try:
            try:
                return then(self._client.evalsha(script.digest, *words))
            except Exception as error:
                if not _unknown_script(error):
                    raise
            return then(self._client.eval(script.text, *words))
        except Exception as error:
            stale = None if refused is None else refused.of(error)
            if stale is None:
                raise
            raise stale from error

    async def _ask_awaited(
        self, script: _Script, words: tuple[Any, ...], refused: _Refusal | None, then: Callable[[Any], Any]
    ) -> Any:
        try:
            try:
                return then(await self._client.evalsha(script.digest, *words))
            except Exception as error:
                if not _unknown_script(error):
                    raise
            return then(await self._client.eval(script.text, *words))
        except Exception as error:
            stale = None if refused is None else refused.of(error)
            if stale is None:
                raise
            raise stale from error


class _Script:
    __slots__ = ("digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = sha1(text.encode(), usedforsecurity=False).hexdigest()


class _Refusal:
    """Whom a refusal would be about."""

    __slots__ = ("_mine", "_resource")

    def __init__(self, resource: str, mine: Credentials) -> None:
        self._resource = resource
        self._mine = mine

    def of(self, error: Exception) -> StaleToken | None:
        """Return the refusal that an error of redis-py's is, or None; a pipeline puts words of its own before it."""
        if type(error).__module__.partition(".")[0] != "redis":
            return None
        _, found, rest = str(error).partition(f"{REFUSED} ")
        token, _, id_ = rest.partition(" ")
        return refusal(self._resource, self._mine, Mark(int(token), id_)) if found and token.isdigit() else None


@cache
def _script(name: str) -> _Script:
    return _Script((Path(__file__).parent / "lua" / f"{name}.lua").read_text("utf-8"))


@lru_cache(maxsize=256)
def _fenced(script: str) -> _Script:
    # Redis 7 takes flags in a first line that must stay the first.
    flags, rest = script.split("\n", 1) if script.startswith("#!") and "\n" in script else ("", script)
    return _Script((f"{flags}\n" if flags else "") + _script("check").text + rest)


def _unknown_script(error: Exception) -> bool:
    return type(error).__name__ == "NoScriptError"


def _token_of(mark: Any) -> int | None:
    return None if mark is None else int(mark.split()[0])


def _literal(text: str) -> str:
    """Return a prefix as a pattern that matches only itself."""
    return "".join(f"\\{letter}" if letter in "*?[]\\^-" else letter for letter in text)
