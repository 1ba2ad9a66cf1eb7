"""The etcd fence: one more compare in the caller's own transaction, and so no extra round trip for a write.

`enter` raises the mark before the first read; from then on each transaction compares that the mark is still one's own.
Requests and answers have the shape of etcd's JSON gateway, as etcd3gw takes it.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Coroutine, Mapping
from inspect import iscoroutinefunction
from typing import Any, Generic, Never, Protocol, overload

from fencelock.errors import InvalidArgument
from fencelock.fences import Fenced
from fencelock.fences.client import ClientT
from fencelock.fences.core import (
    Credentials,
    Mark,
    admit,
    bearer,
    check_reason,
    check_resource,
    check_token,
    not_entered,
    resource_of,
    tell_collected,
    tell_moved,
    token_of,
)
from fencelock.sqlio import finish, settled

Json = dict[str, Any]


class Blocking(Protocol):
    """A client that blocks, for type checkers."""

    def transaction(self, request: Any, /) -> Mapping[str, Any]: ...


class Awaited(Protocol):
    """A client of asyncio's, for type checkers."""

    def transaction(self, request: Any, /) -> Coroutine[Any, Any, Mapping[str, Any]]: ...


class EtcdFence(Generic[ClientT]):
    """Puts a compare into transactions that fails once somebody newer has entered.

    `client` has `transaction(request)`, as etcd3gw's has; if that is a coroutine function, every method that asks the server
    is to be awaited. With another driver, compare that the value of `key(resource)` equals `value(lease)`.

    >>> def sell(client: Etcd3Client, lease: fencelock.Lease) -> None:
    ...     fence = EtcdFence(client)
    ...     fence.enter(lease)                                               # first, then read
    ...     left = int(client.get("apples")[0]) - 5
    ...     put = {"request_put": {"key": coded("apples"), "value": coded(str(left))}}
    ...     fence.transaction({"success": [put]}, lease)                     # StaleToken if somebody newer has entered
    """

    def __init__(self, client: ClientT, *, prefix: str = "fencelock-fence/") -> None:
        if not prefix.endswith("/"):
            raise InvalidArgument(
                f"the prefix of the marks must end with a slash, as in 'fencelock-fence/', not {prefix!r:.60}"
            )
        self._client: Any = client
        self._prefix = prefix
        self._awaited = _is_awaited(client)

    # ------------------------------------------------------------------ what holders do

    @overload
    def enter(self: EtcdFence[Never], lease: Fenced, resource: str | None = None) -> Any: ...
    @overload
    def enter(self: EtcdFence[Blocking], lease: Fenced, resource: str | None = None) -> None: ...
    @overload
    def enter(self: EtcdFence[Awaited], lease: Fenced, resource: str | None = None) -> Coroutine[Any, Any, None]: ...

    def enter(self, lease: Fenced, resource: str | None = None) -> Any:
        """Keep older tokens out from now on, or raise StaleToken. Call it before the first read."""
        mine = bearer(lease)
        return self._run(self._enter(resource_of(mine, resource), mine))

    def compare(self, lease: Fenced, resource: str | None = None) -> Json:
        """Return the compare for a transaction of your own: that nobody newer has entered since you did.

        >>> from types import SimpleNamespace
        >>> compare = EtcdFence(SimpleNamespace(transaction=None)).compare(SimpleNamespace(token=34, id="b"), "stock")
        >>> compare["target"], compare["result"]
        ('VALUE', 'EQUAL')
        """
        return _is(self.key(resource_of(bearer(lease), resource)), "VALUE", value=coded(self.value(lease)))

    @overload
    def transaction(
        self: EtcdFence[Never], request: Mapping[str, Any], lease: Fenced, resource: str | None = None
    ) -> Any: ...
    @overload
    def transaction(
        self: EtcdFence[Blocking], request: Mapping[str, Any], lease: Fenced, resource: str | None = None
    ) -> Json: ...
    @overload
    def transaction(
        self: EtcdFence[Awaited], request: Mapping[str, Any], lease: Fenced, resource: str | None = None
    ) -> Coroutine[Any, Any, Json]: ...

    def transaction(self, request: Mapping[str, Any], lease: Fenced, resource: str | None = None) -> Any:
        """Send a transaction with the compare in it; return its answer, or raise StaleToken.

        An answer with `succeeded` missing or False is about compares of your own.
        """
        mine = bearer(lease)
        return self._run(self._transaction(request, mine, resource_of(mine, resource)))

    def key(self, resource: str) -> str:
        """Return the key of a resource's mark.

        >>> from types import SimpleNamespace
        >>> EtcdFence(SimpleNamespace(transaction=None)).key("stock/apples")
        'fencelock-fence/stock%2Fapples'
        """
        # No slash after the prefix: a key with one belongs to a fence whose prefix begins with ours.
        return self._prefix + check_resource(resource).replace("%", "%25").replace("/", "%2F")

    def value(self, lease: Fenced) -> str:
        """Return what the mark must be for this lease to pass.

        >>> from types import SimpleNamespace
        >>> EtcdFence(SimpleNamespace(transaction=None)).value(SimpleNamespace(token=34, id="b"))
        '34 b'
        """
        return Mark.of(bearer(lease)).text

    # ------------------------------------------------------------------ what keepers of the fence do

    @overload
    def token(self: EtcdFence[Never], resource: str) -> Any: ...
    @overload
    def token(self: EtcdFence[Blocking], resource: str) -> int | None: ...
    @overload
    def token(self: EtcdFence[Awaited], resource: str) -> Coroutine[Any, Any, int | None]: ...

    def token(self, resource: str) -> Any:
        """Return the lowest token that would be let in: the highest that was, or the floor, or None."""
        return self._run(self._token(check_resource(resource)))

    @overload
    def rebase(self: EtcdFence[Never], resource: str, token: int, *, reason: str) -> Any: ...
    @overload
    def rebase(self: EtcdFence[Blocking], resource: str, token: int, *, reason: str) -> None: ...
    @overload
    def rebase(self: EtcdFence[Awaited], resource: str, token: int, *, reason: str) -> Coroutine[Any, Any, None]: ...

    def rebase(self, resource: str, token: int, *, reason: str) -> Any:
        """Move the fence on purpose, down or up: every token from this one on is let in. Logged, with the reason."""
        check_reason(check_resource(resource), reason)
        return self._run(self._rebase(resource, check_token(token), reason))

    @overload
    def collect(self: EtcdFence[Never], floor: int) -> Any: ...
    @overload
    def collect(self: EtcdFence[Blocking], floor: int) -> int: ...
    @overload
    def collect(self: EtcdFence[Awaited], floor: int) -> Coroutine[Any, Any, int]: ...

    def collect(self, floor: int) -> Any:
        """Forget every resource whose token is below the floor; return how many there were.

        A resource that is forgotten, or that was never seen, refuses tokens below the floor from then on.
        """
        return self._run(self._collect(check_token(floor)))

    # ------------------------------------------------------------------ how

    async def _enter(self, resource: str, mine: Credentials) -> None:
        key = self.key(resource)
        while True:
            (mark, revision), (floor, floor_revision) = await self._look(key, self._prefix)
            admit(resource, mine, mark or floor)
            if mark is not None and mark.is_of(mine):
                return
            unchanged = [_at(key, revision), _at(self._prefix, floor_revision)]
            if await self._put(unchanged, key, Mark.of(mine)):
                return

    async def _transaction(self, request: Mapping[str, Any], mine: Credentials, resource: str) -> Json:
        key, looks = self.key(resource), [_range(self.key(resource)), _range(self._prefix)]
        fenced = {
            "compare": [*request.get("compare", ()), _is(key, "VALUE", value=coded(Mark.of(mine).text))],
            "success": list(request.get("success", ())),
            "failure": [*request.get("failure", ()), *looks],
        }
        answer = await self._ask(fenced)
        if answer.get("succeeded"):
            return answer
        (mark, _), (floor, _) = (_mark(one) for one in answer["responses"][-2:])
        if mark is None or not mark.is_of(mine):
            admit(resource, mine, mark or floor)
            raise not_entered(resource, mine)
        return {**answer, "responses": answer["responses"][:-2]}

    async def _token(self, resource: str) -> int | None:
        (mark, _), (floor, _) = await self._look(self.key(resource), self._prefix)
        return token_of(mark or floor)

    async def _rebase(self, resource: str, token: int, reason: str) -> None:
        ((before, _),) = await self._look(self.key(resource))
        await self._put([], self.key(resource), Mark(token, ""))
        tell_moved(resource, token_of(before), token, reason)

    async def _collect(self, floor: int) -> int:
        in_force = floor
        while True:
            ((before, revision),) = await self._look(self._prefix)
            if before is not None and before.token >= floor:
                in_force = before.token
                break
            if await self._put([_at(self._prefix, revision)], self._prefix, Mark(floor, "")):
                break
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        everything = {"request_range": {"key": coded(self._prefix), "range_end": coded(end)}}
        answer = await self._ask({"success": [everything]})
        count = 0
        for pair in answer["responses"][0]["response_range"].get("kvs", ()):
            name = b64decode(pair["key"]).decode()
            is_mark = name != self._prefix and "/" not in name.removeprefix(self._prefix)
            if is_mark and _parse(pair["value"]).token < floor:
                gone = {"request_delete_range": {"key": pair["key"]}}
                request = {"compare": [_at(name, int(pair["mod_revision"]))], "success": [gone]}
                count += bool((await self._ask(request)).get("succeeded"))
        tell_collected(count, in_force)
        return count

    async def _look(self, *keys: str) -> list[tuple[Mark | None, int]]:
        """Return the marks at these keys, at one moment, with their revisions."""
        answer = await self._ask({"success": [_range(key) for key in keys]})
        return [_mark(one) for one in answer["responses"]]

    async def _put(self, unchanged: list[Json], key: str, mark: Mark) -> bool:
        put = {"request_put": {"key": coded(key), "value": coded(mark.text)}}
        return bool((await self._ask({"compare": unchanged, "success": [put]})).get("succeeded"))

    async def _ask(self, request: Json) -> Json:
        return dict(await settled(self._client.transaction(request)))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._awaited:
            return work
        return finish(work, "the client's transaction() is to be awaited, but is no coroutine function")


def coded(text: str | bytes) -> str:
    """Return a key or a value as the JSON gateway wants it.

    >>> coded("apples")
    'YXBwbGVz'
    """
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


def _is_awaited(client: Any) -> bool:
    return iscoroutinefunction(client.transaction)


def _is(key: str, target: str, **what: Any) -> Json:
    return {"key": coded(key), "target": target, "result": "EQUAL", **what}


def _at(key: str, revision: int) -> Json:
    """Compare that a key has not changed since this revision; 0 is that of a key that is not there."""
    return _is(key, "MOD", mod_revision=str(revision))


def _range(key: str) -> Json:
    return {"request_range": {"key": coded(key)}}


def _mark(response: Json) -> tuple[Mark | None, int]:
    pairs = response["response_range"].get("kvs", ())
    return (_parse(pairs[0]["value"]), int(pairs[0]["mod_revision"])) if pairs else (None, 0)


def _parse(value: str) -> Mark:
    return Mark.parse(b64decode(value).decode())
