"""The engines themselves: real servers that can be started, broken and brought back."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers import (
    Cluster,
    Etcd,
    EtcdCluster,
    MariaDB,
    Postgres,
    Redis,
    RedisNodes,
    Server,
    StartFailed,
    ZooKeeper,
    ZooKeeperCluster,
    places,
)
from tests.servers.lifeline import descendants
from tests.servers.waiting import eventually, state

pytestmark = pytest.mark.long
Own = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Talk:
    """How to leave something on an engine, and how to look whether it is there."""

    make: Callable[[], Server]
    put: Callable[[Any], object]
    get: Callable[[Any], str | None]


def _zk_put(server: ZooKeeper) -> None:
    with server.session() as session:
        session.create("/kept", "yes")


def _zk_get(server: ZooKeeper) -> str | None:
    with server.session() as session:
        return session.get("/kept")


def _redis_get(server: Redis) -> str | None:
    reply = server.command("GET", "kept")
    return None if reply == b"$-1" else reply.decode()


def _sql_put(server: Postgres | MariaDB) -> None:
    server.query("CREATE TABLE kept (word VARCHAR(9))")
    server.query("INSERT INTO kept VALUES ('yes')")


def _sql_get(server: Postgres | MariaDB) -> str | None:
    there = server.query("SELECT count(*) FROM information_schema.tables WHERE table_name = 'kept'")
    return server.query("SELECT word FROM kept") if there == "1" else None


TALK = {
    "redis": Talk(Redis, lambda server: server.command("SET", "kept", "yes"), _redis_get),
    "etcd": Talk(Etcd, lambda server: server.put("kept", "yes"), lambda server: server.get("kept")),
    "zookeeper": Talk(ZooKeeper, _zk_put, _zk_get),
    "postgres": Talk(Postgres, _sql_put, _sql_get),
    "mariadb": Talk(MariaDB, _sql_put, _sql_get),
}
EVERY_ENGINE = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.engine(name, own=True)) for name in TALK]
)


@EVERY_ENGINE
def test_killed_server_comes_back_with_its_data(name: str) -> None:
    """After kill -9 and a restart on the same port, what was acknowledged is still there."""
    talk = TALK[name]
    with talk.make() as server:
        port = server.port
        talk.put(server)
        server.kill()
        assert not server.is_alive
        assert not server.answers(timeout=0.3)
        server.start()
        assert server.port == port
        assert talk.get(server) == "yes"
        server.restart()
        assert talk.get(server) == "yes"


@EVERY_ENGINE
def test_wiped_server_comes_back_empty(name: str) -> None:
    """A restart with wipe gives an empty server on the same port."""
    talk = TALK[name]
    with talk.make() as server:
        port = server.port
        talk.put(server)
        with pytest.raises(RuntimeError, match="running"):
            server.wipe()
        server.restart(wipe=True)
        assert server.port == port
        assert talk.get(server) is None
        talk.put(server)
        assert talk.get(server) == "yes"


@EVERY_ENGINE
def test_paused_server_is_silent_until_it_is_resumed(name: str) -> None:
    """While it is paused no process of it moves and nobody gets an answer; resumed, it answers again."""
    talk = TALK[name]
    with talk.make() as server:
        talk.put(server)
        server.pause()
        assert server.is_alive
        assert server.is_paused
        assert state(server.pid) == "T"
        assert {state(pid) for pid in descendants(server.pid)} <= {"T", "Z"}
        assert not server.answers(timeout=0.3)
        server.resume()
        assert server.answers(timeout=5.0)
        assert talk.get(server) == "yes"


def test_data_folder_of_postgres_belongs_to_its_user(postgres: Postgres) -> None:
    """As root, PostgreSQL runs as somebody else; the tests' own user runs it otherwise."""
    owner = Path(f"/proc/{postgres.pid}").stat().st_uid
    assert owner == postgres.data.stat().st_uid
    assert owner != 0


def test_etcd_keeps_its_majority(own_etcd: Own) -> None:
    """Three members serve on without their leader, not without two, and a wiped one joins again with the data."""
    cluster: EtcdCluster = own_etcd(3)
    first = cluster.leader()
    first.kill()
    second = cluster.leader()
    assert second is not first
    second.put("after", "loss")
    first.start()
    assert first.get("after") == "loss"
    first.restart(wipe=True)
    assert first.get("after") == "loss"
    for member in cluster.members:
        if member is not first:
            member.kill()
    assert not first.answers(timeout=3.0)
    cluster.start()
    assert all(member.get("after") == "loss" for member in cluster.members)
    cluster.restart(wipe=True)
    assert cluster.members[0].get("after") is None


def test_zookeeper_keeps_its_majority(own_zookeeper: Own) -> None:
    """Three servers serve on without their leader, not without two, and a wiped one gets the data from the others."""
    ensemble: ZooKeeperCluster = own_zookeeper(3)
    first = ensemble.leader()
    first.kill()
    second = ensemble.leader()
    assert second is not first
    _zk_put(second)
    first.start()
    assert _zk_get(first) == "yes"
    first.restart(wipe=True)
    assert _zk_get(first) == "yes"
    for member in ensemble.members:
        if member is not first:
            member.kill()
    assert eventually(lambda: not first.answers(timeout=0.5))
    ensemble.start()
    assert all(_zk_get(member) == "yes" for member in ensemble.members)


def test_zookeeper_ends_a_session_that_is_silent(zookeeper1: ZooKeeper) -> None:
    """An ephemeral node goes with its session."""
    with zookeeper1.session() as session:
        session.create("/mayfly", "here", ephemeral=True)
    with zookeeper1.session() as session:
        assert session.get("/mayfly") is None


def test_redis_nodes_know_nothing_of_each_other(own_redis_nodes: Own) -> None:
    """What one node is told, another does not know, and each fails alone."""
    nodes: RedisNodes = own_redis_nodes(3)
    nodes.members[0].command("SET", "a", "1")
    assert nodes.members[1].command("GET", "a") == b"$-1"
    nodes.members[2].kill()
    assert [node.answers() for node in nodes.members] == [True, True, False]
    assert nodes.url == "redlock://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes.members)


def test_settings_reach_the_server(own_redis: Own) -> None:
    """A test can have a server that differs, here one with a password and little memory."""
    server: Redis = own_redis(settings={"requirepass": "s3cret", "maxmemory": "3mb"})
    assert server.url == f"redis://:s3cret@127.0.0.1:{server.port}/0"
    assert b"\r\nmaxmemory:3145728\r\n" in server.command("INFO", "memory")


@pytest.mark.engine("redis", own=True)
def test_failed_start_shows_the_log() -> None:
    """A server that cannot start says so at once, with the last lines of its log."""
    server = Redis(settings={"maxmemory-policy": "nonsense"})
    began = time.monotonic()
    try:
        with pytest.raises(StartFailed, match="FATAL CONFIG FILE ERROR"):
            server.start()
    finally:
        server.close()
    assert time.monotonic() - began < 5.0


@EVERY_ENGINE
def test_taken_port_is_replaced_at_the_first_start(name: str) -> None:
    """When somebody listens on the chosen port before the server does, another one is taken."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        server = TALK[name].make()
        server.ports = (taken, *places.free_ports(server.ports_needed - 1))
        with server:
            assert server.port != taken
            assert server.answers()


@pytest.mark.engine("redis", own=True)
def test_stranger_of_the_same_kind_is_not_taken_for_the_server() -> None:
    """A probe that another server answers does not make ours ready."""
    with Redis() as other:
        server = Redis()
        server.ports = other.ports
        with server:
            assert server.port != other.port
            assert server.pid != other.pid


@pytest.mark.parametrize("which", ["clients", "peers"])
@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(EtcdCluster, marks=pytest.mark.engine("etcd", own=True)),
        pytest.param(ZooKeeperCluster, marks=pytest.mark.engine("zookeeper", own=True)),
    ],
)
def test_taken_port_gives_a_cluster_new_ports(cluster: Callable[[], Cluster[Any]], which: str) -> None:
    """A cluster whose member finds one of its ports taken starts afresh on other ports."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        engine = cluster()
        free = places.free_ports(engine.members[1].ports_needed - 1)
        engine.members[1].ports = (taken, *free) if which == "clients" else (*free, taken)
        with engine:
            assert not any(taken in member.ports for member in engine.members)
            assert engine.answers()
