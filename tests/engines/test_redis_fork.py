"""Forks with connections to a real Redis: the child never speaks on one that it inherited."""

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
def overheard(server: Redis) -> Iterator[list[tuple[str, str]]]:
    """Take down who says what while the body runs: the address, and the command."""
    heard: list[tuple[str, str]] = []
    client = redis.Redis(host=server.host, port=server.port)
    with client.monitor() as monitor:  # type: ignore[no-untyped-call]
        yield heard
        tell(server, "PING", "the end")
        for said in monitor.listen():
            if "the end" in said["command"]:
                break
            # Not what redis-py says of itself, as it does before "the end" too: from Redis 7.2 on that is heard.
            if said["client_type"] != "lua" and not said["command"].startswith("CLIENT SETINFO"):
                heard.append((f"{said['client_address']}:{said['client_port']}", said["command"]))
    client.close()


@pytest.fixture(params=["plain", "tls"])
def at(request: pytest.FixtureRequest, server: Redis, redis_tls: RedisTls) -> tuple[Redis, str]:
    """A server, and a URL of it."""
    return (server, server.url) if request.param == "plain" else (redis_tls, redis_tls.tls_url)


@pytest.mark.parametrize("source", [CHILD, CHILD_THAT_ENDS])
async def test_child_is_silent_on_inherited_connections(at: tuple[Redis, str], clients: Clients, source: str) -> None:
    """What a child asks goes over connections of its own; the parent's stay, and serve the parent as before."""
    server, url = at
    worker = await clients.on(url).worker()
    token = await worker.acquire("x", ttl=60)
    before = {client["addr"]: client["id"] for client in connections(server)}
    assert before
    with overheard(server) as heard:
        answer = await worker.do(source)
    if source is CHILD:
        assert answer == [True, True, True, False]
        assert heard, "the child spoke on its own"
    assert not [said for said in heard if said[0] in before]
    assert {client["addr"]: client["id"] for client in connections(server)} == before
    with overheard(server) as heard:
        assert await worker.do("lease.check(); await lease.renew(); result = lease.token") == token
        assert await worker.do("result = await lease.release()") is True
    assert {said[0] for said in heard} <= set(before)
