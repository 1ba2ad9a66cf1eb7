"""What must not break it, on real servers: restarts, lost data, lost members, a lost leader, compaction, dead connections."""

from __future__ import annotations

import asyncio
import base64
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fencelock import EngineUnavailable, GuaranteeUnavailable, LockTimeout
from fencelock.core.clock import NO_DEADLINE
from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.model import Claim, Grant, LossReason
from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.etcd_server import compact, counted, keys, own_prefix
from tests.servers.etcd import Etcd, EtcdCluster
from tests.servers.proxy import Proxy
from tests.support.waiting import SOON, eventually


async def test_restart_with_its_data_keeps_holder_and_waiter(own_etcd: Callable[..., Etcd], clients: Clients) -> None:
    """Killed and started again with its data, etcd still has the holder and the waiter, and tokens go on rising."""
    server = own_etcd()
    locks, other = clients.connect(server.url), clients.connect(server.url)
    lease = await locks.lock("x", ttl=30).acquire()
    async with background(other.lock("x", ttl=30).acquire(60)) as (task,):
        await waiting(locks, "x")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        lease.check()
        await lease.renew()
        assert not task.done()
        assert await lease.release() is True
        successor = await task
        assert successor.token > lease.token
        await successor.release()
    assert await take(locks, "x") > successor.token


async def test_restart_without_its_data_is_a_loss(
    own_etcd: Callable[..., Etcd], clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """Wiped, etcd has no holder any more: that one learns of it at its next renewal, tokens still rise, and it is logged."""
    server = own_etcd()
    locks = clients.connect(server.url)
    first = await take(locks, "y")
    lease = await locks.lock("x", ttl=20).acquire()  # a busy machine takes its time to start a server
    for step in (server.kill, server.wipe, server.start):
        await asyncio.to_thread(step)
    assert await lease.lost.wait(timeout=SOON)
    assert lease.reason is LossReason.GONE
    with caplog.at_level(logging.WARNING, "fencelock"):
        assert await take(locks, "y") > first
        assert await take(locks, "x") > lease.token
    assert any("was replaced or wiped" in record.getMessage() for record in caplog.records)


async def test_cluster_that_goes_back_in_time_is_logged(
    own_etcd: Callable[..., Etcd], clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """A reply with an earlier revision than before is logged, and later tokens lie above all that the client has seen."""
    engine = clients.on(own_etcd().url).engine()
    assert isinstance(engine, EtcdEngine)
    grant = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    engine._client.revision += 600_000_000  # as if it had seen what the backup does not have
    with caplog.at_level(logging.WARNING, "fencelock"):
        await engine.release(grant)
    assert any("went back from revision" in record.getMessage() for record in caplog.records)
    later = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(later, Grant)
    assert later.token > grant.token + 600_000_000
    assert await engine.release(later) is True


async def test_restored_backup_without_the_claim_is_a_loss(
    own_etcd: Callable[..., Etcd], clients: Clients, tmp_path: Path
) -> None:
    """When etcd comes back with the data of a while ago, in which the session is but not the claim, the holder is told."""
    server = own_etcd()
    locks = clients.connect(server.url)
    keep = await locks.lock("keep", ttl=40).acquire()
    await asyncio.to_thread(server.kill)
    shutil.copytree(server.data, tmp_path / "backup")
    await asyncio.to_thread(server.start)
    await keep.renew()
    for _ in range(5):
        await take(locks, "y")
    lease = await locks.lock("x", ttl=40).acquire()
    await asyncio.to_thread(server.kill)
    shutil.rmtree(server.data)
    shutil.copytree(tmp_path / "backup", server.data)
    await asyncio.to_thread(server.start)
    assert await lease.lost.wait(timeout=2 * SOON)
    assert lease.reason is LossReason.GONE
    assert await keep.lost.wait(timeout=SOON)
    assert await take(locks, "x") > lease.token
    assert await take(clients.connect(server.url), "x") > lease.token, "what others get begins above it as well"


async def test_compaction_while_watching(
    own_etcd: Callable[..., Etcd], proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """Waiters and holders whose past was compacted while they were cut off look again, and miss nothing."""
    server = own_etcd()
    way = proxy(server)
    near = own_prefix(way.url)
    locks, other = clients.connect(near), clients.connect(server.url + "/" + near.rpartition("/")[2])
    held = await locks.lock("held", ttl=30).acquire()
    stays = await locks.lock("stays", ttl=30).acquire()
    lease = await other.lock("x", ttl=30).acquire()
    async with background(locks.lock("x", ttl=30).acquire(SOON)) as (task,):
        await waiting(other, "x")
        await asyncio.sleep(0.3)
        way.cut("both")
        assert await other.force_release("held", reason="test") == 1
        await lease.release()
        for _ in range(20):
            await take(other, "y")
        compact(server)
        way.disconnect()
        way.heal()
        got = await task
        assert got.token > lease.token
        assert await held.lost.wait(timeout=SOON)
        assert held.reason is LossReason.GONE
        stays.check()
        await got.release()
    await other.force_release("stays", reason="test")
    assert await stays.lost.wait(timeout=SOON), "it is watched again"


async def test_one_of_three_is_killed(own_etcd: Callable[..., EtcdCluster], clients: Clients) -> None:
    """With one member of three gone, leader or not, what is held stays held and new locks are granted."""
    cluster = own_etcd(3)
    locks = clients.connect(cluster.url)
    for pick in ("leader", "other"):
        lease = await locks.lock("x", ttl=40).acquire()
        async with background(locks.lock("x", ttl=40).acquire(60)) as (task,):
            await waiting(locks, "x")
            leader = await asyncio.to_thread(cluster.leader)
            gone = leader if pick == "leader" else next(member for member in cluster.members if member is not leader)
            await asyncio.to_thread(gone.kill)
            await take(locks, f"after-{pick}", 60)
            lease.check()
            await lease.release()
            successor = await task
            assert successor.token > lease.token
            successor.check()
            await successor.release()
        await asyncio.to_thread(gone.start)


async def test_two_of_three_are_killed(own_etcd: Callable[..., EtcdCluster], clients: Clients) -> None:
    """Without a majority there is a clear refusal in time and the holder is lost by its own clock; later all is well."""
    cluster = own_etcd(3)
    locks = clients.connect(cluster.url)
    lease = await locks.lock("x", ttl=4).acquire()
    before = lease.token
    for member in cluster.members[:2]:
        member.kill()
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match="etcd"):
        await locks.lock("y", ttl=4).acquire(timeout=2)
    assert time.monotonic() - began < 40
    assert await lease.lost.wait(timeout=SOON)
    assert lease.reason is LossReason.EXPIRED
    cluster.start()
    assert await take(locks, "x", 60) > before
    await locks.close()

    async def clean() -> bool:
        return keys(cluster.members[2], "/fencelock/claims/") == []

    await eventually(clean, "nothing is left")


async def test_member_without_a_leader_is_not_asked_over_and_over(
    own_etcd: Callable[..., EtcdCluster], clients: Clients
) -> None:
    """A member that has lost the others breaks off every watch at once; it is asked again a few times a second, no more."""
    cluster = own_etcd(3)
    left = cluster.members[2]
    locks = clients.connect(left.url)
    lease = await locks.lock("x", ttl=60).acquire()
    async with background(locks.lock("x", ttl=60).acquire(5)) as (task,):
        await waiting(locks, "x")
        await asyncio.sleep(0.5)
        for member in cluster.members[:2]:
            await asyncio.to_thread(member.kill)
        before = counted(left, "grpc_server_started_total", grpc_method="Watch")
        await asyncio.sleep(3)
        assert counted(left, "grpc_server_started_total", grpc_method="Watch") - before <= 40
        lease.check()
        await asyncio.to_thread(cluster.start)
        with pytest.raises((LockTimeout, EngineUnavailable)):
            await task
    assert await lease.release() is True


async def test_stopped_leader_does_not_revive_a_lost_lease(
    own_etcd: Callable[..., EtcdCluster], clients: Clients
) -> None:
    """A leader that was stopped, and answers for leases when it goes on, does not make a lost lease live."""
    cluster = own_etcd(3)
    old = cluster.leader()
    locks = clients.connect(old.url)  # nowhere else
    other = clients.connect(
        ",".join(member.address for member in cluster.members if member is not old).join(("etcd://", ""))
    )
    lease = await locks.lock("x", ttl=3).acquire()
    old.pause()
    try:
        async with other.lock("x", ttl=9, timeout=30) as successor:
            assert lease.lost.is_set()
            old.resume()
            await asyncio.sleep(0.5)
            successor.check()
            assert [seen.token for seen in (await other.inspect("x")).holders] == [successor.token]
    finally:
        old.resume()
    assert await take(locks, "x", 30) > successor.token


async def test_client_uses_another_member_when_one_does_not_reply(
    own_etcd: Callable[..., EtcdCluster], proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """A client whose member no longer answers goes to another, keeps what it holds, and what it asked for is done once."""
    cluster = own_etcd(3)
    ways = [proxy(member) for member in cluster.members]
    near = cluster.url_at(",".join(way.address for way in ways))
    locks = clients.connect(near)
    lease = await locks.lock("x", ttl=30).acquire()
    for way in ways:
        way.cut("to_client")
        assert await take(locks, "y", 60) > 0
        lease.check()
        way.heal()
    await lease.renew()
    assert await lease.release() is True


async def test_reset_connections_are_replaced(etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients) -> None:
    """The client replaces connections that are reset or closed by the server; no lease is lost or held twice."""
    way = proxy(etcd1)
    locks = clients.connect(own_prefix(way.url))
    lease = await locks.lock("x", ttl=30).acquire()
    async with background(locks.lock("x", ttl=30).acquire(SOON)) as (task,):
        await waiting(locks, "x")
        for _ in range(3):
            way.disconnect()
            await asyncio.sleep(0.05)
            await lease.renew()
        await lease.release()
        successor = await task
        assert successor.token > lease.token
        await successor.release()


async def test_tokens_are_accepted_for_correctness(etcd1: Etcd, clients: Clients) -> None:
    """Tokens of etcd are strong enough for `purpose="correctness"`."""
    locks = clients.connect(own_prefix(etcd1.url))
    try:
        async with locks.lock("x", purpose="correctness") as lease:
            assert lease.token > 0
    except GuaranteeUnavailable:
        pytest.fail("etcd's tokens are made by consensus")


async def test_other_layout_is_refused(etcd1: Etcd, clients: Clients) -> None:
    """A namespace that another release has written is refused, and left as it is."""
    url = own_prefix(etcd1.url)
    key = "/" + url.rpartition("/")[2] + "/fencelock/about"
    etcd1.put(key, "7 whatever")
    with pytest.raises(EngineUnavailable, match=r"another release of fencelock \(layout '7', this one has 2\)"):
        await clients.connect(url).lock("x").acquire()
    assert etcd1.get(key) == "7 whatever"


async def test_foreign_key_among_the_claims_blocks_and_can_be_released(etcd1: Etcd, clients: Clients) -> None:
    """A key that somebody else has put among the claims is in the way, and can be seen and released by force."""
    url = own_prefix(etcd1.url)
    prefix = "/" + url.rpartition("/")[2]
    locks = clients.connect(url)
    await take(locks, "x")
    key = base64.b64encode(prefix.encode() + b"/fencelock/claims/x/\xff\xfe").decode()
    etcd1.call("/v3/kv/put", {"key": key, "value": base64.b64encode(b"\xff").decode()})
    with pytest.raises(LockTimeout):
        await locks.lock("x", ttl=9).acquire(1)
    assert len((await locks.inspect("x")).holders) == 1
    assert [name async for name in locks.names()] == ["x"]
    assert await locks.force_release("x", reason="test") == 1
    await take(locks, "x")
