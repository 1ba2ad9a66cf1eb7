"""The ZooKeeper fence: one more check in the caller's own transaction, and so no extra round trip for a write.

Below the root each resource has a node that holds its mark, and that has one child: the permit of whoever entered last.
Entering replaces the permit, in one transaction. A permit's name is its bearer's token and id, so that it never comes back
once it is gone: a version number would, with a node that was collected and made anew.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fencelock.fences import Fenced
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

RESOURCE = "="
"""What a resource's node begins with: a child of the root without it is not ours, such as the root of another fence."""


class ZooKeeperFence:
    """Puts a check into kazoo's transactions that fails once somebody newer has entered.

    `client` is a started `KazooClient`.

    >>> def sell(client: KazooClient, lease: fencelock.Lease) -> None:
    ...     fence = ZooKeeperFence(client)
    ...     fence.enter(lease)                                     # first, then read
    ...     left = int(client.get("/apples")[0]) - 5
    ...     transaction = client.transaction()
    ...     transaction.set_data("/apples", str(left).encode())
    ...     fence.commit(transaction, lease)                       # StaleToken if somebody newer has entered
    """

    def __init__(self, client: Any, *, root: str = "/fencelock-fence") -> None:
        self._client = client
        self._root = root

    # ------------------------------------------------------------------ what holders do

    def enter(self, lease: Fenced, resource: str | None = None) -> None:
        """Keep older tokens out from now on, or raise StaleToken. Call it before the first read."""
        mine = bearer(lease)
        name = resource_of(mine, resource)
        while True:
            self._client.ensure_path(self._root)
            floor, floor_version = self._mark(self._root)
            mark, version = self._mark(self._place(name))
            admit(name, mine, mark or floor)
            if mark is not None and mark.is_of(mine) and self._client.exists(self._permit(name, mine)) is not None:
                return
            if self._replace(name, Mark.of(mine), version, floor_version, permit=self._permit(name, mine)):
                return

    def check(self, transaction: Any, lease: Fenced, resource: str | None = None) -> None:
        """Add the check to a transaction of your own: that nobody newer has entered since you did."""
        mine = bearer(lease)
        transaction.check(self._permit(resource_of(mine, resource), mine), -1)

    def commit(self, transaction: Any, lease: Fenced, resource: str | None = None) -> list[Any]:
        """Add the check, commit, and return the results; raise StaleToken, or the first error of another operation."""
        from kazoo.exceptions import NoNodeError

        mine = bearer(lease)
        name = resource_of(mine, resource)
        self.check(transaction, mine, name)
        # First, so that a stale holder is told so, and not that something else is not as it expects.
        transaction.operations.insert(0, transaction.operations.pop())
        checked, *results = transaction.commit()
        if isinstance(checked, NoNodeError):
            admit(name, mine, self._seen(name))
            raise not_entered(name, mine)
        for result in (checked, *results):
            if isinstance(result, Exception) and not _is_consequence(result):
                raise result
        return list(results)

    # ------------------------------------------------------------------ what keepers of the fence do

    def token(self, resource: str) -> int | None:
        """Return the lowest token that would be let in: the highest that was, or the floor, or None."""
        return token_of(self._seen(check_resource(resource)))

    def rebase(self, resource: str, token: int, *, reason: str) -> None:
        """Move the fence on purpose, down or up: every token from this one on is let in. Logged, with the reason."""
        to = check_token(token)
        check_reason(check_resource(resource), reason)
        while True:
            self._client.ensure_path(self._root)
            before, version = self._mark(self._place(resource))
            if self._replace(resource, Mark(to, ""), version, None, permit=None):
                break
        tell_moved(resource, token_of(before), to, reason)

    def collect(self, floor: int) -> int:
        """Forget every resource whose token is below the floor; return how many there were.

        A resource that is forgotten, or that was never seen, refuses tokens below the floor from then on.
        """
        from kazoo.exceptions import BadVersionError

        in_force = check_token(floor)
        self._client.ensure_path(self._root)
        while True:
            before, version = self._mark(self._root)
            if before is not None and before.token >= floor:
                in_force = before.token
                break
            try:
                self._client.set(self._root, Mark(floor, "").text.encode(), version)
                break
            except BadVersionError:
                continue
        count = 0
        for child in self._client.get_children(self._root):
            if not child.startswith(RESOURCE):
                continue
            place = f"{self._root}/{child}"
            mark, version = self._mark(place)
            if mark is not None and version is not None and mark.token < floor:
                top, top_version = self._mark(self._root)
                transaction = self._client.transaction()
                # Who has looked at this mark has to look again: its version would come back with a node that is made anew.
                transaction.set_data(self._root, (top or Mark(floor, "")).text.encode(), top_version)
                for permit in self._children(place):
                    transaction.delete(f"{place}/{permit}")
                transaction.delete(place, version)
                count += _unchanged(transaction.commit())
        tell_collected(count, in_force)
        return count

    # ------------------------------------------------------------------ how

    def _place(self, resource: str) -> str:
        return f"{self._root}/{RESOURCE}{_escape(resource)}"

    def _permit(self, resource: str, mine: Credentials) -> str:
        return f"{self._place(resource)}/{mine.token}-{_escape(mine.id)}"

    def _mark(self, path: str) -> tuple[Mark | None, int | None]:
        """Return the mark in a node and the node's version; no version if there is no node."""
        from kazoo.exceptions import NoNodeError

        try:
            data, stat = self._client.get(path)
        except NoNodeError:
            return None, None
        return (Mark.parse(data.decode()) if data else None), stat.version

    def _seen(self, resource: str) -> Mark | None:
        return self._mark(self._place(resource))[0] or self._mark(self._root)[0]

    def _children(self, place: str) -> list[str]:
        from kazoo.exceptions import NoNodeError

        try:
            return list(self._client.get_children(place))
        except NoNodeError:
            return []

    def _replace(
        self, resource: str, mark: Mark, version: int | None, floor_version: int | None, permit: str | None
    ) -> bool:
        """Set the mark and put the permit in place of the others, if nothing has changed since it was looked at."""
        place, data = self._place(resource), mark.text.encode()
        transaction = self._client.transaction()
        if floor_version is not None:
            transaction.check(self._root, floor_version)
        if version is None:
            transaction.create(place, data)
        else:
            transaction.set_data(place, data, version)
            for other in self._children(place):
                transaction.delete(f"{place}/{other}")
        if permit is not None:
            transaction.create(permit)
        return _unchanged(transaction.commit())


def _unchanged(results: list[Any]) -> bool:
    """Return whether a transaction went through; raise what was wrong, unless it is that something has changed meanwhile."""
    from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError

    causes = [result for result in results if isinstance(result, Exception) and not _is_consequence(result)]
    for cause in causes:
        if not isinstance(cause, BadVersionError | NodeExistsError | NoNodeError | NotEmptyError):
            raise cause
    return not any(isinstance(result, Exception) for result in results)


def _is_consequence(result: Exception) -> bool:
    """Return whether an operation was only rolled back, or never tried, because of another one."""
    return type(result).__name__ in ("RolledBackError", "RuntimeInconsistency")


def _escape(name: str) -> str:
    """Return a name as a node's: no slash, and neither `.` nor `..`."""
    return quote(name, safe="").replace(".", "%2E")
