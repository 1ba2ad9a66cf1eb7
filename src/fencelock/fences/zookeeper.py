"""The ZooKeeper fence: one more check in the caller's own transaction, so a fenced write needs no extra round trip.

Below the root, each resource has a node with its mark, and that node has one child: the entry of the claim that entered last.
Entering replaces the entry, in one transaction. An entry's name is the claim's token and id, so it never returns once it is
deleted. A version number would: a node that was pruned and created again counts from 0.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fencelock.fences import Fenced, core
from fencelock.fences.core import HighWaterMark, TokenPair
from fencelock.runtime.both_apis import Api, BlockingApi, in_thread

RESOURCE = "="
"""The first character of a resource's node. Other children of the root are not marks."""


class BaseZooKeeperFence(Api):
    """What both APIs share."""

    def __init__(self, client: Any, *, root: str = "/fencelock-fence") -> None:
        self._client = client
        self._root = root

    @in_thread
    def enter(self, lease: Fenced, resource: str | None = None) -> None:
        """Refuse older tokens from now on; raise StaleToken or LeaseLost. Call it before the first read."""
        pair, name = core.named_credentials(lease, resource)
        entry = self._entry_path(name, pair)
        while True:
            self._client.ensure_path(self._root)
            minimum, min_version = self._get(self._root)
            mark, version = self._get(self._path(name))
            core.admit(name, pair, mark or minimum)
            if mark is not None and mark.is_of(pair) and self._client.exists(entry) is not None:
                return
            if self._replace(self._path(name), HighWaterMark.of(pair), version, min_version, entry):
                return

    def check(self, lease: Fenced, transaction: Any, resource: str | None = None) -> None:
        """Add the check to a transaction of your own: no newer holder has entered since you did."""
        pair, name = core.named_credentials(lease, resource)
        transaction.check(self._entry_path(name, pair), -1)

    @in_thread
    def commit(self, lease: Fenced, transaction: Any, resource: str | None = None) -> list[Any]:
        """Add the check, commit, and return the results; raise StaleToken, or the first error of another operation."""
        from kazoo.exceptions import NoNodeError

        pair, name = core.named_credentials(lease, resource)
        self.check(pair, transaction, name)
        # As the first operation: a stale holder gets StaleToken, and not the error of another operation.
        transaction.operations.insert(0, transaction.operations.pop())
        checked, *results = transaction.commit()
        if isinstance(checked, NoNodeError):
            core.admit(name, pair, self._mark(name))
            raise core.not_entered(name, pair)
        for result in (checked, *results):
            if isinstance(result, Exception) and not _is_consequence(result):
                raise result
        return list(results)

    @in_thread
    def token(self, resource: str) -> int | None:
        """Return the lowest token that the resource accepts: the highest one so far, or `min_token`, or None."""
        return core.token_of(self._mark(core.check_resource(resource)))

    @in_thread
    def rebase(self, resource: str, token: int, *, reason: str) -> None:
        """Move the fence of a resource on purpose, down or up: it accepts every token from this one on. Logs the reason."""
        to, why, path = core.check_token(token), core.check_reason(reason), self._path(core.check_resource(resource))
        core.log_rebase(resource, core.token_of(self._set_mark(path, to)), to, why)

    @in_thread
    def rebase_all(self, token: int, *, reason: str) -> int:
        """Move the fences of all resources, and `min_token`, to one token; return their number. Logs the reason."""
        to, why = core.check_token(token), core.check_reason(reason)
        self._client.ensure_path(self._root)
        if self._get(self._root)[0] is not None:
            self._client.set(self._root, HighWaterMark(to, "").text.encode())
        paths = self._mark_paths()
        for path in paths:
            self._set_mark(path, to)
        core.log_rebase_all(len(paths), to, why)
        return len(paths)

    @in_thread
    def prune(self, min_token: int) -> int:
        """Remove the marks below `min_token`; return their number.

        From then on, a resource without a mark refuses tokens below `min_token`.
        """
        in_force = self._raise_min_token(core.check_token(min_token))
        count = 0
        for path in self._mark_paths():
            mark, version = self._get(path)
            if mark is not None and version is not None and mark.token < min_token:
                minimum, min_version = self._get(self._root)
                transaction = self._client.transaction()
                # Change the root's version: a client that has read this mark must read it again, as the version of a node
                # that is deleted and created again repeats.
                data = (minimum or HighWaterMark(min_token, "")).text.encode()
                transaction.set_data(self._root, data, min_version)
                for entry in self._children(path):
                    transaction.delete(f"{path}/{entry}")
                transaction.delete(path, version)
                count += _is_committed(transaction.commit())
        core.log_prune(count, in_force)
        return count

    def _raise_min_token(self, min_token: int) -> int:
        from kazoo.exceptions import BadVersionError

        self._client.ensure_path(self._root)
        while True:
            before, version = self._get(self._root)
            if before is not None and before.token >= min_token:
                return before.token
            try:
                self._client.set(self._root, HighWaterMark(min_token, "").text.encode(), version)
                return min_token
            except BadVersionError:
                continue

    def _path(self, resource: str) -> str:
        return f"{self._root}/{RESOURCE}{_escape(resource)}"

    def _entry_path(self, resource: str, pair: TokenPair) -> str:
        return f"{self._path(resource)}/{pair.token}-{_escape(pair.id)}"

    def _mark_paths(self) -> list[str]:
        children = self._client.get_children(self._root)
        return [f"{self._root}/{child}" for child in children if child.startswith(RESOURCE)]

    def _get(self, path: str) -> tuple[HighWaterMark | None, int | None]:
        """Return the mark in a node and the node's version; the version of a missing node is None."""
        from kazoo.exceptions import NoNodeError

        try:
            data, stat = self._client.get(path)
        except NoNodeError:
            return None, None
        return (HighWaterMark.parse(data.decode()) if data else None), stat.version

    def _mark(self, resource: str) -> HighWaterMark | None:
        return self._get(self._path(resource))[0] or self._get(self._root)[0]

    def _children(self, path: str) -> list[str]:
        from kazoo.exceptions import NoNodeError

        try:
            return list(self._client.get_children(path))
        except NoNodeError:
            return []

    def _set_mark(self, path: str, token: int) -> HighWaterMark | None:
        """Set a mark for any claim with this token or a higher one, and return the mark before."""
        while True:
            self._client.ensure_path(self._root)
            before, version = self._get(path)
            if self._replace(path, HighWaterMark(token, ""), version, None, None):
                return before

    def _replace(
        self, path: str, mark: HighWaterMark, version: int | None, min_version: int | None, entry: str | None
    ) -> bool:
        """Set the mark and replace the entry, unless mark or min_token have changed since they were read."""
        data = mark.text.encode()
        transaction = self._client.transaction()
        if min_version is not None:
            transaction.check(self._root, min_version)
        if version is None:
            transaction.create(path, data)
        else:
            transaction.set_data(path, data, version)
            for other in self._children(path):
                transaction.delete(f"{path}/{other}")
        if entry is not None:
            transaction.create(entry)
        return _is_committed(transaction.commit())


class ZooKeeperFence(BaseZooKeeperFence, BlockingApi):
    """Adds a check to kazoo's transactions that fails once a newer holder has entered.

    `client` is a started `KazooClient`.

    >>> def sell(client: KazooClient, lease: fencelock.Lease) -> None:
    ...     fence = ZooKeeperFence(client)
    ...     fence.enter(lease)                                     # before the first read
    ...     left = int(client.get("/apples")[0]) - 5
    ...     transaction = client.transaction()
    ...     transaction.set_data("/apples", str(left).encode())
    ...     fence.commit(lease, transaction)                       # StaleToken if a newer holder has entered
    """


def _is_committed(results: list[Any]) -> bool:
    """Return whether a transaction was committed; raise its error, unless a node has changed since it was read."""
    from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError

    causes = [result for result in results if isinstance(result, Exception) and not _is_consequence(result)]
    for cause in causes:
        if not isinstance(cause, BadVersionError | NodeExistsError | NoNodeError | NotEmptyError):
            raise cause
    return not any(isinstance(result, Exception) for result in results)


def _is_consequence(result: Exception) -> bool:
    """Return whether an operation failed only because of another one of its transaction."""
    return type(result).__name__ in ("RolledBackError", "RuntimeInconsistency")


def _escape(name: str) -> str:
    """Return a name for a node: without a slash, and neither `.` nor `..`."""
    return quote(name, safe="").replace(".", "%2E")
