"""The Redis fence: every write compares tokens in the same script that writes, in one round trip.

Redis has no transaction that a holder could read in, so `enter` raises the mark before the first read; from then on nothing
older is written. A client of redis-py's is handed in, of either colour, or a pipeline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from hashlib import sha1
from pathlib import Path
from typing import Any, Generic, Never, Protocol, TypeVar, overload

from fencelock.errors import InvalidArgument, StaleToken
from fencelock.fences import Fenced
from fencelock.fences.client import ClientT
from fencelock.fences.core import (
    Credentials,
    Mark,
    bearer,
    check_reason,
    check_resource,
    check_token,
    refusal,
    resource_of,
    tell_collected,
    tell_moved,
)
from fencelock.sqlio import finish, settled

REFUSED = "FENCED"
"""What comes in the script's error before the mark that it saw."""

SCAN_COUNT = 500


class Blocking(Protocol):
    """A client that blocks, for type checkers."""

    def close(self) -> None: ...


class Awaited(Protocol):
    """A client of asyncio's, for type checkers."""

    def aclose(self) -> Coroutine[Any, Any, None]: ...


class Pipeline(Protocol):
    """A pipeline of either colour, for type checkers."""

    def execute(self, raise_on_error: bool = ...) -> Any: ...


PipelineT = TypeVar("PipelineT", bound=Pipeline)


class RedisFence(Generic[ClientT]):
    """Fenced SET, HSET and DEL, and scripts of your own, run fenced.

    `client` is a `redis.Redis`, or a `redis.asyncio.Redis`, and then every method is to be awaited. The marks are fields of
    one hash, at `key`, which never expires; `collect` forgets old ones. With `on=pipeline` a write joins a pipeline instead.

    >>> import redis, types
    >>> fence = RedisFence(redis.Redis())
    >>> def sell(client: redis.Redis, lease: fencelock.Lease) -> None:
    ...     fence = RedisFence(client)
    ...     fence.enter(lease)                                        # first, then read
    ...     left = int(client.get("apples") or 0) - 5
    ...     fence.set(lease, "apples", left)                          # StaleToken if somebody newer has entered
    """

    def __init__(self, client: ClientT, *, key: str = "fencelock:fence") -> None:
        if not key:
            raise InvalidArgument("the marks need a key of their own in Redis, as in key='fencelock:fence'")
        self._client: Any = client
        self._key = key
        self._awaited = is_awaited(client)

    # ------------------------------------------------------------------ what holders do

    @overload
    def enter(self: RedisFence[Never], lease: Fenced, resource: str | None = None, *, on: Any = None) -> Any: ...
    @overload
    def enter(
        self: RedisFence[Awaited], lease: Fenced, resource: str | None = None, *, on: None = None
    ) -> Coroutine[Any, Any, None]: ...
    @overload
    def enter(self: RedisFence[Blocking], lease: Fenced, resource: str | None = None, *, on: None = None) -> None: ...
    @overload
    def enter(self, lease: Fenced, resource: str | None = None, *, on: PipelineT) -> PipelineT: ...

    def enter(self, lease: Fenced, resource: str | None = None, *, on: Any = None) -> Any:
        """Keep older tokens out from now on, or raise StaleToken. Call it before the first read."""
        return self.run(lease, "return 1", resource=resource, on=on)  # a 1 that tells nothing: the types say None

    # What is written has the server's own answer, which may be anything, in a pipeline, too: not told by types.

    def set(
        self,
        lease: Fenced,
        key: str | bytes,
        value: Any,
        *,
        resource: str | None = None,
        px: int | None = None,
        on: Any = None,
    ) -> Any:
        """SET a key, fenced; `px` is its time to live in ms."""
        more = () if px is None else ("PX", px)
        return self.run(lease, _script("call").text, [key], ["SET", value, *more], resource=resource, on=on)

    def hset(
        self,
        lease: Fenced,
        key: str | bytes,
        mapping: Mapping[Any, Any],
        *,
        resource: str | None = None,
        on: Any = None,
    ) -> Any:
        """HSET fields of a hash, fenced; return how many are new."""
        words = [word for pair in mapping.items() for word in pair]
        return self.run(lease, _script("call").text, [key], ["HSET", *words], resource=resource, on=on)

    def delete(self, lease: Fenced, *keys: str | bytes, resource: str | None = None, on: Any = None) -> Any:
        """DEL keys, fenced; return how many there were."""
        return self.run(lease, _script("call").text, keys, ["DEL"], resource=resource, on=on)

    def run(
        self,
        lease: Fenced,
        script: str,
        keys: Iterable[str | bytes] = (),
        args: Iterable[Any] = (),
        *,
        resource: str | None = None,
        on: Any = None,
    ) -> Any:
        """Run a Lua script of your own unless the token is old; it sees its own KEYS and ARGV and nothing of the fence.

        >>> more = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
        >>> def restock(fence: RedisFence, lease: fencelock.Lease) -> int:
        ...     return fence.run(lease, more, keys=["apples"], args=[10])
        """
        mine = bearer(lease)
        name = resource_of(mine, resource)
        places = [*keys, self._key]
        words = [*args, name, mine.token, mine.id]
        if on is not None:
            # By its text: redis-py would ask the server first which digests it knows, in a round trip of its own.
            return on.eval(_fenced(script).text, len(places), *places, *words)
        return self._run(self._write(_fenced(script), places, words, _Refusal(name, mine)))

    @contextmanager
    def refusals(self, lease: Fenced, resource: str | None = None) -> Iterator[None]:
        """Turn the error of a pipeline whose fenced write was refused into StaleToken.

        A pipeline is no transaction: what is not fenced in it is carried out all the same. Fence every write of it. With
        `execute(raise_on_error=False)` nothing is raised that could be turned: a refusal is then one of the results.

        >>> def sell(fence: RedisFence, client: redis.Redis, lease: fencelock.Lease) -> None:
        ...     with client.pipeline() as pipe, fence.refusals(lease):
        ...         fence.set(lease, "apples", 95, on=pipe)
        ...         fence.hset(lease, "sold", {"apples": 5}, on=pipe)
        ...         pipe.execute()
        """
        mine = bearer(lease)
        refused = _Refusal(resource_of(mine, resource), mine)
        try:
            yield
        except Exception as error:
            refused.raise_for(error)
            raise

    # ------------------------------------------------------------------ what keepers of the fence do

    @overload
    def token(self: RedisFence[Never], resource: str) -> Any: ...
    @overload
    def token(self: RedisFence[Awaited], resource: str) -> Coroutine[Any, Any, int | None]: ...
    @overload
    def token(self: RedisFence[Blocking], resource: str) -> int | None: ...

    def token(self, resource: str) -> Any:
        """Return the lowest token that would be let in: the highest that was, or the floor, or None."""
        return self._run(self._token(check_resource(resource)))

    @overload
    def rebase(self: RedisFence[Never], resource: str, token: int, *, reason: str) -> Any: ...
    @overload
    def rebase(self: RedisFence[Awaited], resource: str, token: int, *, reason: str) -> Coroutine[Any, Any, None]: ...
    @overload
    def rebase(self: RedisFence[Blocking], resource: str, token: int, *, reason: str) -> None: ...

    def rebase(self, resource: str, token: int, *, reason: str) -> Any:
        """Move the fence on purpose, down or up: every token from this one on is let in. Logged, with the reason."""
        to, why = check_token(token), check_reason(check_resource(resource), reason)
        return self._run(self._rebase(resource, to, why))

    @overload
    def collect(self: RedisFence[Never], floor: int) -> Any: ...
    @overload
    def collect(self: RedisFence[Awaited], floor: int) -> Coroutine[Any, Any, int]: ...
    @overload
    def collect(self: RedisFence[Blocking], floor: int) -> int: ...

    def collect(self, floor: int) -> Any:
        """Forget every resource whose token is below the floor; return how many there were.

        A resource that is forgotten, or that was never seen, refuses tokens below the floor from then on.
        """
        return self._run(self._collect(check_token(floor)))

    # ------------------------------------------------------------------ how

    async def _token(self, resource: str) -> int | None:
        return _token_of(await self._ask(_script("seen"), [self._key], [resource]))

    async def _rebase(self, resource: str, to: int, why: str) -> None:
        before = await self._ask(_script("move"), [self._key], [resource, to])
        tell_moved(resource, _token_of(before), to, why)

    async def _collect(self, floor: int) -> int:
        in_force = _token_of(await self._ask(_script("raise"), [self._key], [floor]))
        count = 0
        async for resource, mark in _each(self._client.hscan_iter(self._key, count=SCAN_COUNT)):
            if int(mark.split()[0]) < floor:  # never the floor's own field: it has been raised
                count += await self._ask(_script("forget"), [self._key], [resource, floor])
        tell_collected(count, floor if in_force is None else in_force)
        return count

    async def _write(self, script: _Script, keys: list[Any], args: list[Any], refused: _Refusal) -> Any:
        try:
            return await self._ask(script, keys, args)
        except Exception as error:
            refused.raise_for(error)
            raise

    async def _ask(self, script: _Script, keys: list[Any], args: Iterable[Any] = ()) -> Any:
        words = (len(keys), *keys, *args)
        try:
            return await settled(self._client.evalsha(script.digest, *words))
        except Exception as error:
            if type(error).__name__ != "NoScriptError":
                raise
        return await settled(self._client.eval(script.text, *words))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return work if self._awaited else finish(work, "the client is to be awaited, but is none of redis.asyncio's")


def is_awaited(client: object) -> bool:
    """Return whether a client of redis-py's is one of asyncio's."""
    return any(kind.__module__.startswith("redis.asyncio") for kind in type(client).__mro__)


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

    def raise_for(self, error: Exception) -> None:
        """Raise StaleToken if that is what an error of redis-py's says."""
        stale = self._of(error)
        if stale is not None:
            raise stale from error

    def _of(self, error: Exception) -> StaleToken | None:
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


async def _each(found: Any) -> AsyncIterator[Any]:
    """Yield what an iterator of either colour gives."""
    if hasattr(found, "__aiter__"):
        async for one in found:
            yield one
    else:
        for one in found:
            yield one


def _token_of(mark: Any) -> int | None:
    return None if mark is None else int(mark.split()[0])
