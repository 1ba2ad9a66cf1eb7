"""Pushes that are not notifications of fencelock: the client ignores them, whatever their form, and stays connected."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import redis

from fencelock.engines.redis.connection import RedisConnection
from tests.contract.steps import background, waiting
from tests.engines.conftest import Clients
from tests.engines.forwarder import forwarding
from tests.engines.redis_server import connections, tell
from tests.servers.redis import Redis

CHANNEL = "fencelock/call/here"


@pytest.mark.parametrize(
    "push",
    [
        [],
        [b"invalidate", None],
        [b"MIGRATING", 1, 5],
        [b"MOVING", 7, 30, b"10.0.0.1:6379"],
        [b"SMIGRATED", 9, [[b"10.0.0.1:6379", b"0-100"]]],
        [b"pmessage", b"*", CHANNEL.encode(), b"id:1:1"],
        [b"message", CHANNEL.encode()],
        [b"message", CHANNEL.encode(), None],
        [b"message", CHANNEL.encode(), b"\xff\xfe"],
        [7, [b"message"]],
    ],
)
def test_foreign_push_is_ignored(push: list[Any]) -> None:
    """A foreign push raises no error, which would close the connection, is no reply, and notifies no claim."""
    connection = RedisConnection(CHANNEL)
    connection.notifications["id"] = "1:1"
    assert not connection.on_push(push)
    assert connection.notifications["id"] == "1:1"


async def test_connections_survive_unknown_pushes(server: Redis, clients: Clients) -> None:
    """A waiter gets the lock over a connection on which the server has pushed an unknown message before."""
    holder, other = clients.connect(server.url), clients.connect(server.url)
    lease = await holder.lock("x").acquire()
    async with background(other.lock("x").acquire()) as (second,):
        await waiting(holder, "x")
        ids = {connection["id"] for connection in connections(server)}
        with ExitStack() as trackers:
            for id in ids:  # now the server pushes key changes to each connection
                tracker = trackers.enter_context(
                    redis.Redis(host=server.host, port=server.port, single_connection_client=True)
                )
                tracker.client_tracking(clientid=int(id), bcast=True)
            tell(server, "SET", "something", "else")
            assert await lease.release()
            assert await (await second).release()
    assert ids == {connection["id"] for connection in connections(server)}


async def test_maintenance_notifications_are_not_requested(server: Redis, clients: Clients) -> None:
    """fencelock does not request maintenance notifications, as redis-py does: it could not act on them."""
    sent: list[bytes] = []

    def note(data: bytes) -> bool:
        sent.append(data)
        return False

    async with forwarding(server) as forwarder:
        forwarder.swallows_reply_to = note
        async with clients.connect(forwarder.url) as locks, locks.lock("x"):
            pass
    assert b"EVALSHA" in b"".join(sent)
    assert b"MAINT_NOTIFICATIONS" not in b"".join(sent).upper()
