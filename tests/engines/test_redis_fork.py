"""Forks with connections to a real Redis: the child never sends anything on a connection that it inherited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from tests.engines.conftest import Clients
from tests.engines.redis_server import connections, tell
from tests.servers.redis import Redis, RedisTls

CHILD = """
import gc

async def child():
    one = await locks.lock('other', ttl=5).acquire()
    busy = await locks.lock('x').try_acquire()
    answer = [lease.lost.is_set(), busy is None, await one.release(), await lease.release()]
    await locks.close()
    return answer
result = forked(child)
gc.collect()
"""

CHILD_THAT_ENDS = """
def child():
    import gc
    gc.collect()
    return None

result = forked(child)
"""


@contextmanager
def monitored(server: Redis) -> Iterator[list[tuple[str, str]]]:
    """Record the client address and the command of everything that clients send while the body runs."""
    sent: list[tuple[str, str]] = []
    client = redis.Redis(host=server.host, port=server.port)
    with client.monitor() as monitor:  # type: ignore[no-untyped-call]
        yield sent
        tell(server, "PING", "the end")
        for command in monitor.listen():
            if "the end" in command["command"]:
                break
            # Skip CLIENT SETINFO: redis-py sends it on each new connection to Redis 7.2 or later, also before "the end".
            if command["client_type"] != "lua" and not command["command"].startswith("CLIENT SETINFO"):
                sent.append((f"{command['client_address']}:{command['client_port']}", command["command"]))
    client.close()


@pytest.fixture(params=["plain", "tls"])
def at(request: pytest.FixtureRequest, server: Redis, redis_tls: RedisTls) -> tuple[Redis, str]:
    """A server and its URL, with and without TLS."""
    return (server, server.url) if request.param == "plain" else (redis_tls, redis_tls.tls_url)


@pytest.mark.parametrize("source", [CHILD, CHILD_THAT_ENDS])
async def test_child_is_silent_on_inherited_connections(at: tuple[Redis, str], clients: Clients, source: str) -> None:
    """A child sends its requests over its own connections; the parent's stay open and work as before."""
    server, url = at
    worker = await clients.on(url).worker()
    token = await worker.acquire("x", ttl=60)
    before = {client["addr"]: client["id"] for client in connections(server)}
    assert before
    with monitored(server) as sent:
        answer = await worker.do(source)
    if source is CHILD:
        assert answer == [True, True, True, False]
        assert sent, "the child sent nothing"
    assert not [command for command in sent if command[0] in before]
    assert {client["addr"]: client["id"] for client in connections(server)} == before
    with monitored(server) as sent:
        assert await worker.do("lease.check(); await lease.renew(); result = lease.token") == token
        assert await worker.do("result = await lease.release()") is True
    assert {command[0] for command in sent} <= set(before)
