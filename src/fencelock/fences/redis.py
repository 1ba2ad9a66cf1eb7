"""The Redis fence: every write compares tokens in the same script that writes, in one round trip.

Redis has no transaction that a holder could read in, so `enter` sets the mark before the first read; from then on Redis
refuses every older write. It works with the clients and the pipelines of redis-py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from hashlib import sha1
from pathlib import Path
from typing import Any, NamedTuple

from fencelock.errors import InvalidArgument
from fencelock.fences import Fenced, core
from fencelock.fences.core import HighWaterMark, TokenPair
from fencelock.runtime.both_apis import Api, BlockingApi, both_apis
from fencelock.sqlio import wrong_api

REFUSED = "FENCED"
"""What the script's error has before the mark that refused the token."""

SCAN_COUNT = 500


class BaseRedisFence(Api):
    """What both APIs share."""

    def __init__(self, client: Any, *, key: str = "fencelock:fence") -> None:
        if not key:
            raise InvalidArgument("the marks need a key of their own in Redis, as in key='fencelock:fence'")
        check_redis_client(client, "fences", awaited=self._awaited)
        self._client = client
        self._key = key

    @both_apis
    async def enter(self, lease: Fenced, resource: str | None = None) -> None:
        """Refuse older tokens from now on; raise StaleToken or LeaseLost. Call it before the first read."""
        await self._call(self.run, lease, "return 1", resource=resource)

    @both_apis
    async def set(
        self, lease: Fenced, key: str | bytes, value: Any, *, resource: str | None = None, px: int | None = None
    ) -> Any:
        """SET a key, fenced; `px` is its time to live in ms."""
        return await self._call(self.run, lease, *_set_command(key, value, px), resource=resource)

    @both_apis
    async def hset(
        self, lease: Fenced, key: str | bytes, mapping: Mapping[Any, Any], *, resource: str | None = None
    ) -> Any:
        """HSET fields of a hash, fenced; return the number of new fields."""
        return await self._call(self.run, lease, *_hset_command(key, mapping), resource=resource)

    @both_apis
    async def delete(self, lease: Fenced, *keys: str | bytes, resource: str | None = None) -> Any:
        """DEL keys, fenced; return the number of keys that were there."""
        return await self._call(self.run, lease, *_delete_command(keys), resource=resource)

    @both_apis
    async def run(
        self,
        lease: Fenced,
        script: str,
        keys: Iterable[str | bytes] = (),
        args: Iterable[Any] = (),
        *,
        resource: str | None = None,
    ) -> Any:
        """Run your own Lua script unless the token is old. The script sees only its own KEYS and ARGV."""
        pair, name = core.named_credentials(lease, resource)
        with _refusals(pair, name):
            return await self._eval(_fenced(script), [*keys, self._key], [*args, name, pair.token, pair.id])

    def pipeline(self, lease: Fenced, pipeline: Any, resource: str | None = None) -> FencedPipeline:
        """Return fenced writes that join a pipeline of redis-py instead of being sent at once.

        A pipeline is no transaction: Redis executes its other commands even if it refuses a fenced one. Fence every write.
        Execute it in a block of `refusals`, which turns the error of a refused write into StaleToken.
        """
        return FencedPipeline(pipeline, lease, resource, self._key)

    @both_apis
    async def token(self, resource: str) -> int | None:
        """Return the lowest token that the resource accepts: the highest one so far, or `min_token`, or None."""
        return _token_in(await self._eval(_script("get_mark"), [self._key], [core.check_resource(resource)]))

    @both_apis
    async def rebase(self, resource: str, token: int, *, reason: str) -> None:
        """Move the fence of a resource on purpose, down or up: it accepts every token from this one on. Logs the reason."""
        to, why = core.check_token(token), core.check_reason(reason)
        before = await self._eval(_script("set_mark"), [self._key], [core.check_resource(resource), to])
        core.log_rebase(resource, _token_in(before), to, why)

    @both_apis
    async def rebase_all(self, token: int, *, reason: str) -> int:
        """Move the fences of all resources, and `min_token`, to one token; return their number. Logs the reason.

        Resources that are entered for the first time meanwhile keep their marks.
        """
        to, why = core.check_token(token), core.check_reason(reason)
        fields = [field for field, _ in await self._marks()]
        for field in fields:
            await self._eval(_script("set_mark"), [self._key], [field, to])
        count = sum(1 for field in fields if field)  # the empty field is min_token
        core.log_rebase_all(count, to, why)
        return count

    @both_apis
    async def prune(self, min_token: int) -> int:
        """Remove the marks below `min_token`; return their number.

        From then on, a resource without a mark refuses tokens below `min_token`.
        """
        in_force = _token_in(await self._eval(_script("raise_min_token"), [self._key], [core.check_token(min_token)]))
        count = 0
        for resource, mark in await self._marks():
            if int(mark.split()[0]) < min_token:  # never min_token's own field, which has just been raised
                count += await self._eval(_script("delete_mark"), [self._key], [resource, min_token])
        core.log_prune(count, in_force or min_token)
        return count

    async def _marks(self) -> list[tuple[Any, Any]]:
        marks: dict[Any, Any] = {}
        cursor: Any = None
        while cursor != 0:
            cursor, found = await self._call(self._client.hscan, self._key, cursor or 0, count=SCAN_COUNT)
            marks |= found
        return list(marks.items())

    async def _eval(self, script: _Script, keys: list[Any], args: list[Any]) -> Any:
        words = (len(keys), *keys, *args)
        try:
            return await self._call(self._client.evalsha, script.digest, *words)
        except Exception as error:
            if type(error).__name__ != "NoScriptError":
                raise
        return await self._call(self._client.eval, script.text, *words)


class RedisFence(BaseRedisFence, BlockingApi):
    """Fenced SET, HSET and DEL, and your own scripts, fenced.

    `client` is a `redis.Redis`; `fencelock.aio.fences.redis` has the same class for `redis.asyncio`. The marks are fields
    of one hash, at `key`, which never expires; `prune` removes old ones.

    >>> import redis
    >>> def sell(client: redis.Redis, lease: fencelock.Lease) -> None:
    ...     fence = RedisFence(client)
    ...     fence.enter(lease)                                        # before the first read
    ...     left = int(client.get("apples") or 0) - 5
    ...     fence.set(lease, "apples", left)                          # StaleToken if a newer holder has entered
    >>> more = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
    >>> def restock(fence: RedisFence, lease: fencelock.Lease) -> int:
    ...     return fence.run(lease, more, keys=["apples"], args=[10])
    """


class FencedPipeline:
    """Fenced writes of one lease that join a pipeline; `RedisFence.pipeline` makes it. Nothing is sent, so nothing is
    awaited.

    >>> import redis
    >>> def sell(fence: RedisFence, client: redis.Redis, lease: fencelock.Lease) -> None:
    ...     with client.pipeline() as pipe:
    ...         fenced = fence.pipeline(lease, pipe)
    ...         fenced.set("apples", 95)
    ...         fenced.hset("sold", {"apples": 5})
    ...         with fenced.refusals():
    ...             pipe.execute()
    """

    def __init__(self, pipeline: Any, lease: Fenced, resource: str | None, key: str) -> None:
        self._pipeline = pipeline
        self._lease = lease
        self._pair, self._resource = core.named_credentials(lease, resource)
        self._key = key

    def enter(self) -> None:
        """Refuse older tokens from now on."""
        self.run("return 1")

    def set(self, key: str | bytes, value: Any, *, px: int | None = None) -> None:
        """SET a key; `px` is its time to live in ms."""
        self.run(*_set_command(key, value, px))

    def hset(self, key: str | bytes, mapping: Mapping[Any, Any]) -> None:
        """HSET fields of a hash."""
        self.run(*_hset_command(key, mapping))

    def delete(self, *keys: str | bytes) -> None:
        """DEL keys."""
        self.run(*_delete_command(keys))

    def run(self, script: str, keys: Iterable[str | bytes] = (), args: Iterable[Any] = ()) -> None:
        """Run your own Lua script."""
        all_keys = [*keys, self._key]
        words = [*args, self._resource, self._pair.token, self._pair.id]
        # With the whole text: for a digest redis-py would first ask the server, in an extra round trip.
        self._pipeline.eval(_fenced(script).text, len(all_keys), *all_keys, *words)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn the error of a refused write into StaleToken; raise LeaseLost before the block if the lease has ended.

        `execute(raise_on_error=False)` raises no StaleToken.
        """
        core.credentials_of(self._lease)
        with _refusals(self._pair, self._resource):
            yield


def check_redis_client(client: object, package: str, *, awaited: bool) -> None:
    """Raise InvalidType for a client of redis-py that belongs to the other API."""
    if any(kind.__module__.startswith("redis.asyncio") for kind in type(client).__mro__) is not awaited:
        raise wrong_api(client, package, awaited=awaited)


class _Script(NamedTuple):
    text: str
    digest: str


def _new_script(text: str) -> _Script:
    return _Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


@cache
def _script(name: str) -> _Script:
    return _new_script((Path(__file__).parent / "lua" / f"{name}.lua").read_text("utf-8"))


@lru_cache(maxsize=256)
def _fenced(script: str) -> _Script:
    # The line of flags of a Redis 7 script must stay the first one.
    flags, rest = script.split("\n", 1) if script.startswith("#!") and "\n" in script else ("", script)
    return _new_script((f"{flags}\n" if flags else "") + _script("check").text + rest)


def _set_command(key: str | bytes, value: Any, px: int | None) -> tuple[str, list[Any], list[Any]]:
    return _script("call").text, [key], ["SET", value, *(() if px is None else ("PX", px))]


def _hset_command(key: str | bytes, mapping: Mapping[Any, Any]) -> tuple[str, list[Any], list[Any]]:
    return _script("call").text, [key], ["HSET", *(word for pair in mapping.items() for word in pair)]


def _delete_command(keys: Iterable[str | bytes]) -> tuple[str, list[Any], list[Any]]:
    return _script("call").text, list(keys), ["DEL"]


@contextmanager
def _refusals(pair: TokenPair, resource: str) -> Iterator[None]:
    """Turn the script's error into StaleToken. A pipeline adds its own words before the script's."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "redis":
            _, found, rest = str(error).partition(f"{REFUSED} ")
            token, _, id_ = rest.partition(" ")
            if found and token.isdigit():
                raise core.refusal(resource, pair, HighWaterMark(int(token), id_)) from error
        raise


def _token_in(mark: Any) -> int | None:
    return None if mark is None else int(mark.split()[0])
