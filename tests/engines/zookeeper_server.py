"""What the tests of the ZooKeeper engine share: chroots of their own, access to the sessions, and a client of kazoo's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kazoo.client import KazooClient

from fencelock.engines.zookeeper.engine import ZooKeeperEngine
from fencelock.engines.zookeeper.session import ZooKeeperSession
from fencelock.model import new_id
from tests.servers.cluster import Cluster
from tests.servers.zookeeper import ZooKeeper
from tests.support.waiting import eventually_blocking


def chroot(server: Any) -> str:
    """Return a URL of the server, its ensemble or its proxy, with a chroot that no other test uses."""
    return f"{server.url}/{new_id()}"


def engine_of(locks: Any) -> ZooKeeperEngine:
    """Return the engine behind a client, or behind a test's view of it."""
    engine = getattr(locks, "raw", locks)._client.engine
    assert isinstance(engine, ZooKeeperEngine)
    return engine


def session_of(locks: Any) -> ZooKeeperSession:
    """Return the only session of a client."""
    (session,) = engine_of(locks)._sessions._open.values()
    return session


@contextmanager
def bare(server: ZooKeeper | Cluster[ZooKeeper], **options: Any) -> Iterator[KazooClient]:
    """Give a client of kazoo's, beside ours."""
    client = KazooClient(server.address, **options)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


def expire(server: ZooKeeper, locks: Any) -> None:
    """End a client's session on the server, as if it had expired there."""
    session = session_of(locks)

    def ended() -> bool:
        # The client reconnects at once, and may take its session over again before this one ends it.
        with bare(server, client_id=(session.id, session._password)):
            pass
        return session.ended

    eventually_blocking(ended, "the session has ended")
