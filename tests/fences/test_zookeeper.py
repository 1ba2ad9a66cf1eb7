"""The ZooKeeper fence without write permission, with a root that is deleted, and with marks pruned during an entry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fencelock import StaleToken
from fencelock.fences.zookeeper import ZooKeeperFence
from tests.fences.fake_lease import fake_lease
from tests.servers.zookeeper import ZooKeeper

ROOT = "/test-edges"


@pytest.fixture
def client(zookeeper1: ZooKeeper) -> Iterator[Any]:
    """A client, and nothing below the root."""
    from kazoo.client import KazooClient

    client = KazooClient(zookeeper1.address)
    client.start(timeout=30)
    client.delete(ROOT, recursive=True)
    yield client
    client.delete(ROOT, recursive=True)
    client.stop()
    client.close()


class Interrupted(ZooKeeperFence):
    """A fence that calls `meanwhile` once between the read and the write of an entry."""

    meanwhile: Callable[[], object] | None = None

    def _replace(self, *args: Any, **more: Any) -> bool:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super()._replace(*args, **more)


def outcome(work: Callable[[], object]) -> Any:
    """Return the error that a function raises, or None; fail if it does not return."""
    errors: list[Any] = [None]

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors[0] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return errors[0]


def test_without_write_permission(client: Any) -> None:
    """The fence raises an error of the server other than a concurrent change, and does not retry."""
    from kazoo.exceptions import NoAuthError
    from kazoo.security import OPEN_ACL_UNSAFE, make_acl

    client.create(ROOT, acl=[make_acl("world", "anyone", read=True, admin=True)])
    fence = ZooKeeperFence(client, root=ROOT)
    try:
        for work in (lambda: fence.enter(fake_lease(34), "a"), lambda: fence.rebase("a", 5, reason="a test")):
            assert isinstance(outcome(work), NoAuthError)
    finally:
        client.set_acls(ROOT, OPEN_ACL_UNSAFE)


def test_deleted_root_is_created_again(client: Any) -> None:
    """A root that is removed during an entry is created again."""
    fence = Interrupted(client, root=ROOT)
    fence.meanwhile = lambda: client.delete(ROOT, recursive=True)
    assert outcome(lambda: fence.enter(fake_lease(34), "a")) is None
    assert fence.token("a") == 34


def test_mark_pruned_and_created_again_during_enter(client: Any) -> None:
    """A holder whose mark is pruned after it was read does not replace the mark of a newer holder."""
    fence, other = Interrupted(client, root=ROOT), ZooKeeperFence(client, root=ROOT)
    other.enter(fake_lease(34), "a")
    client.set(ROOT, b"1000 ")  # another process has begun to prune

    def meanwhile() -> None:
        assert other.prune(1000) == 1
        other.enter(fake_lease(1050), "a")

    fence.meanwhile = meanwhile
    with pytest.raises(StaleToken) as caught:
        fence.enter(fake_lease(40), "a")
    assert caught.value.seen == 1050
    assert other.token("a") == 1050
