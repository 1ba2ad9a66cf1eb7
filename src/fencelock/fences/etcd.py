"""The etcd fence: one more compare in the caller's own transaction, so a fenced write needs no extra round trip.

`enter` sets the mark before the first read; from then on each transaction compares that the mark is still the caller's own.
Requests and replies have the form of etcd's JSON gateway, as etcd3gw uses it.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from inspect import iscoroutinefunction
from typing import Any

from fencelock.errors import InvalidArgument
from fencelock.fences import Fenced, core
from fencelock.fences.core import HighWaterMark, TokenPair
from fencelock.runtime.both_apis import Api, BlockingApi, both_apis
from fencelock.sqlio import wrong_api

Json = dict[str, Any]


class BaseEtcdFence(Api):
    """What both APIs share."""

    def __init__(self, client: Any, *, prefix: str = "fencelock-fence/") -> None:
        if not prefix.endswith("/"):
            raise InvalidArgument(
                f"the prefix of the marks must end with a slash, as in 'fencelock-fence/', not {prefix!r:.60}"
            )
        if iscoroutinefunction(client.transaction) is not self._awaited:
            raise wrong_api(client, "fences", awaited=self._awaited)
        self._client = client
        self._prefix = prefix

    def compare(self, lease: Fenced, resource: str | None = None) -> Json:
        """Return the compare for a transaction of your own: no newer holder has entered since you did.

        >>> from types import SimpleNamespace
        >>> compare = EtcdFence(SimpleNamespace(transaction=None)).compare(SimpleNamespace(token=34, id="b"), "stock")
        >>> compare["target"], compare["result"]
        ('VALUE', 'EQUAL')
        """
        pair, name = core.named_credentials(lease, resource)
        return _compare_mark(self.key(name), pair)

    def key(self, resource: str) -> str:
        """Return the key of a resource's mark.

        >>> from types import SimpleNamespace
        >>> EtcdFence(SimpleNamespace(transaction=None)).key("stock/apples")
        'fencelock-fence/stock%2Fapples'
        """
        # No slash after the prefix: a key with one belongs to a fence whose prefix begins with this one.
        return self._prefix + core.check_resource(resource).replace("%", "%25").replace("/", "%2F")

    def value(self, lease: Fenced) -> str:
        """Return the value that the mark must have for this lease to be accepted.

        >>> from types import SimpleNamespace
        >>> EtcdFence(SimpleNamespace(transaction=None)).value(SimpleNamespace(token=34, id="b"))
        '34 b'
        """
        return HighWaterMark.of(core.credentials_of(lease)).text

    @both_apis
    async def enter(self, lease: Fenced, resource: str | None = None) -> None:
        """Refuse older tokens from now on; raise StaleToken or LeaseLost. Call it before the first read."""
        pair, name = core.named_credentials(lease, resource)
        key = self.key(name)
        while True:
            (mark, revision), (minimum, min_revision) = await self._get(key, self._prefix)
            core.admit(name, pair, mark or minimum)
            if mark is not None and mark.is_of(pair):
                return
            unchanged = [_compare_revision(key, revision), _compare_revision(self._prefix, min_revision)]
            if await self._put(unchanged, key, HighWaterMark.of(pair)):
                return

    @both_apis
    async def transaction(self, lease: Fenced, request: Mapping[str, Any], resource: str | None = None) -> Json:
        """Send a transaction with the compare added; return its reply, or raise StaleToken.

        If `succeeded` is missing or False in the reply, one of your own compares failed.
        """
        pair, name = core.named_credentials(lease, resource)
        key = self.key(name)
        fenced = {
            "compare": [*request.get("compare", ()), _compare_mark(key, pair)],
            "success": list(request.get("success", ())),
            "failure": [*request.get("failure", ()), _range(key), _range(self._prefix)],
        }
        reply = await self._send(fenced)
        if reply.get("succeeded"):
            return reply
        (mark, _), (minimum, _) = (_mark_in(response) for response in reply["responses"][-2:])
        if mark is None or not mark.is_of(pair):
            core.admit(name, pair, mark or minimum)
            raise core.not_entered(name, pair)
        return {**reply, "responses": reply["responses"][:-2]}

    @both_apis
    async def token(self, resource: str) -> int | None:
        """Return the lowest token that the resource accepts: the highest one so far, or `min_token`, or None."""
        (mark, _), (minimum, _) = await self._get(self.key(resource), self._prefix)
        return core.token_of(mark or minimum)

    @both_apis
    async def rebase(self, resource: str, token: int, *, reason: str) -> None:
        """Move the fence of a resource on purpose, down or up: it accepts every token from this one on. Logs the reason."""
        to, why, key = core.check_token(token), core.check_reason(reason), self.key(resource)
        ((before, _),) = await self._get(key)
        await self._put([], key, HighWaterMark(to, ""))
        core.log_rebase(resource, core.token_of(before), to, why)

    @both_apis
    async def rebase_all(self, token: int, *, reason: str) -> int:
        """Move the fences of all resources, and `min_token`, to one token; return their number. Logs the reason."""
        to, why = core.check_token(token), core.check_reason(reason)
        ((minimum, _),) = await self._get(self._prefix)
        if minimum is not None:
            await self._put([], self._prefix, HighWaterMark(to, ""))
        marks = await self._marks()
        for key, _, _ in marks:
            await self._put([], key, HighWaterMark(to, ""))
        core.log_rebase_all(len(marks), to, why)
        return len(marks)

    @both_apis
    async def prune(self, min_token: int) -> int:
        """Remove the marks below `min_token`; return their number.

        From then on, a resource without a mark refuses tokens below `min_token`.
        """
        in_force = core.check_token(min_token)
        while True:
            ((before, revision),) = await self._get(self._prefix)
            if before is not None and before.token >= min_token:
                in_force = before.token
                break
            if await self._put([_compare_revision(self._prefix, revision)], self._prefix, HighWaterMark(min_token, "")):
                break
        count = 0
        for key, mark, revision in await self._marks():
            if mark.token < min_token:
                delete = {"request_delete_range": {"key": coded(key)}}
                request = {"compare": [_compare_revision(key, revision)], "success": [delete]}
                count += bool((await self._send(request)).get("succeeded"))
        core.log_prune(count, in_force)
        return count

    async def _marks(self) -> list[tuple[str, HighWaterMark, int]]:
        """Return the keys, marks and revisions of all resources."""
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        request = {"request_range": {"key": coded(self._prefix), "range_end": coded(end)}}
        reply = await self._send({"success": [request]})
        pairs = reply["responses"][0]["response_range"].get("kvs", ())
        found = [(b64decode(it["key"]).decode(), _parse(it["value"]), int(it["mod_revision"])) for it in pairs]
        return [it for it in found if it[0] != self._prefix and "/" not in it[0].removeprefix(self._prefix)]

    async def _get(self, *keys: str) -> list[tuple[HighWaterMark | None, int]]:
        """Return the marks at these keys with their revisions, all from one moment."""
        reply = await self._send({"success": [_range(key) for key in keys]})
        return [_mark_in(response) for response in reply["responses"]]

    async def _put(self, compares: list[Json], key: str, mark: HighWaterMark) -> bool:
        put = {"request_put": {"key": coded(key), "value": coded(mark.text)}}
        return bool((await self._send({"compare": compares, "success": [put]})).get("succeeded"))

    async def _send(self, request: Json) -> Json:
        return dict(await self._call(self._client.transaction, request))


class EtcdFence(BaseEtcdFence, BlockingApi):
    """Adds a compare to transactions that fails once a newer holder has entered.

    `client` has `transaction(request)`, as etcd3gw's client has; `fencelock.aio.fences.etcd` has the same class for a client
    whose `transaction` is a coroutine function. With another driver, compare that the value of `key(resource)` equals
    `value(lease)`.

    >>> def sell(client: Etcd3Client, lease: fencelock.Lease) -> None:
    ...     fence = EtcdFence(client)
    ...     fence.enter(lease)                                               # before the first read
    ...     left = int(client.get("apples")[0]) - 5
    ...     put = {"request_put": {"key": coded("apples"), "value": coded(str(left))}}
    ...     fence.transaction(lease, {"success": [put]})                     # StaleToken if a newer holder has entered
    """


def coded(text: str | bytes) -> str:
    """Return a key or a value in the base64 that the JSON gateway expects.

    >>> coded("apples")
    'YXBwbGVz'
    """
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


def _compare(key: str, target: str, **what: Any) -> Json:
    return {"key": coded(key), "target": target, "result": "EQUAL", **what}


def _compare_mark(key: str, pair: TokenPair) -> Json:
    return _compare(key, "VALUE", value=coded(HighWaterMark.of(pair).text))


def _compare_revision(key: str, revision: int) -> Json:
    """Compare that a key has not changed since this revision; the revision of a missing key is 0."""
    return _compare(key, "MOD", mod_revision=str(revision))


def _range(key: str) -> Json:
    return {"request_range": {"key": coded(key)}}


def _mark_in(response: Json) -> tuple[HighWaterMark | None, int]:
    pairs = response["response_range"].get("kvs", ())
    return (_parse(pairs[0]["value"]), int(pairs[0]["mod_revision"])) if pairs else (None, 0)


def _parse(value: str) -> HighWaterMark:
    return HighWaterMark.parse(b64decode(value).decode())
