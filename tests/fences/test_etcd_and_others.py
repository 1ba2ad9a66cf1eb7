"""The fences of etcd, ZooKeeper and objects on real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from fencelock import FencelockError, InvalidType, StaleToken
from fencelock.aio.fences import etcd as aio_etcd
from fencelock.aio.fences import objects as aio_objects
from fencelock.aio.fences import zookeeper as aio_zookeeper
from fencelock.fences import Fenced
from fencelock.fences.etcd import EtcdFence, coded
from fencelock.fences.objects import ObjectFence
from fencelock.fences.zookeeper import ZooKeeperFence
from tests.fences.counter_servers import counter_kinds, object_store
from tests.fences.fake_lease import fake_lease

# ---------------------------------------------------------------------- etcd and ZooKeeper alike


@pytest.fixture
def fence(kind: str, engines: Any) -> Iterator[Any]:
    """A fence of the kind, with marks of its own."""
    with ExitStack() as stack:
        if kind == "etcd":
            import etcd3gw

            engine = engines.get("etcd")
            client = etcd3gw.client(host=engine.host, port=engine.port, api_path="/v3/")
            client.delete_prefix("test-marks/")
            yield EtcdFence(client, prefix="test-marks/")
        else:
            from kazoo.client import KazooClient

            client = KazooClient(engines.get("zookeeper").address)
            client.start(timeout=30)
            stack.callback(client.close)
            stack.callback(client.stop)
            client.delete("/test-marks", recursive=True)
            yield ZooKeeperFence(client, root="/test-marks")


@pytest.mark.parametrize("kind", counter_kinds("etcd", "zookeeper"))
def test_enter_rebase_prune(fence: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Only the newest holder enters; a fence can be moved, and pruned."""
    assert fence.token("a") is None
    for token in (9, 10, 10):
        fence.enter(fake_lease(token), "a")
    for stale in (fake_lease(9), fake_lease(10, "another claim")):
        with pytest.raises(StaleToken) as caught:
            fence.enter(stale, "a")
        assert (caught.value.token, caught.value.seen) == (stale.token, 10)
    fence.enter(fake_lease(20), "b/../ö. 7")
    fence.enter(fake_lease(30), "c")
    fence.rebase("c", 5, reason="another engine")
    assert "moved from token 30 to token 5: another engine" in caplog.text
    fence.enter(fake_lease(5), "c")
    fence.enter(fake_lease(40), "c")
    assert fence.prune(25) == 2
    with caplog.at_level("INFO", "fencelock.fences"):
        assert fence.prune(15) == 0
    assert "tokens below 25 are refused" in caplog.text  # not 15
    for resource in ("a", "b/../ö. 7", "never seen"):
        with pytest.raises(StaleToken):
            fence.enter(fake_lease(24), resource)
        assert fence.token(resource) == 25
        fence.enter(fake_lease(25), resource)
    assert fence.token("c") == 40


@pytest.mark.parametrize("kind", counter_kinds("etcd", "zookeeper"))
def test_prune_spares_fences_below_it(fence: Any, kind: str) -> None:
    """A fence whose marks are below those of another shares neither marks nor min_token with it."""
    if kind == "etcd":
        below: Any = EtcdFence(fence._client, prefix="test-marks/b/")
    else:
        below = ZooKeeperFence(fence._client, root="/test-marks/b")
    below.enter(fake_lease(5), "x")
    assert fence.token("b/x") is fence.token("b") is None
    assert below.prune(10) == 1
    below.enter(fake_lease(20), "y")
    fence.enter(fake_lease(30), "b")
    assert fence.prune(100) == 1
    assert [below.token(resource) for resource in ("x", "y")] == [10, 20]
    with pytest.raises(StaleToken):
        below.enter(fake_lease(5), "x")


def test_etcd_prefix_without_a_slash_is_refused() -> None:
    """The slash keeps the keys of one fence apart from those of another."""
    with pytest.raises(ValueError, match="must end with a slash"):
        EtcdFence(SimpleNamespace(transaction=None), prefix="marks")


@pytest.mark.parametrize("kind", counter_kinds("etcd"))
def test_etcd_transaction(fence: EtcdFence) -> None:
    """The caller's own compares and operations are sent, too; a refusal writes nothing; a pruned mark refuses."""
    client = fence._client
    client.delete("apples")
    put = {"request_put": {"key": coded("apples"), "value": coded("95")}}
    absent = {"key": coded("apples"), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
    look = {"request_range": {"key": coded("apples")}}
    mine = fake_lease(34)
    with pytest.raises(StaleToken, match=r"has no entry of token 34: call enter\(\)"):
        fence.transaction(mine, {"success": [put]}, "stock")  # never entered
    fence.enter(mine, "stock")
    fence.rebase("stock", 3, reason="another engine")
    with pytest.raises(StaleToken, match=r"has no entry of token 34: call enter\(\)"):
        fence.transaction(mine, {"success": [put]}, "stock")
    fence.enter(mine, "stock")
    assert fence.transaction(mine, {"compare": [absent], "success": [put]}, "stock")["succeeded"]
    second = fence.transaction(mine, {"compare": [absent], "success": [put], "failure": [look]}, "stock")
    assert not second.get("succeeded")
    assert len(second["responses"]) == 1
    assert client.transaction({"compare": [fence.compare(mine, "stock")], "success": [look]})["succeeded"]
    fence.prune(100)
    with pytest.raises(StaleToken) as caught:
        fence.transaction(mine, {"success": [put]}, "stock")
    assert caught.value.seen == 100


@pytest.mark.parametrize("kind", counter_kinds("etcd"))
def test_etcd_awaited(fence: EtcdFence) -> None:
    """The asyncio API awaits the client's transactions, and each API refuses the client of the other."""

    class Client:
        async def transaction(self, request: dict[str, Any]) -> Any:
            await asyncio.sleep(0)
            return fence._client.transaction(request)

    async def use() -> None:
        awaited = aio_etcd.EtcdFence(Client(), prefix="test-marks/")
        await awaited.enter(fake_lease(34), "stock")
        with pytest.raises(StaleToken):
            await awaited.transaction(fake_lease(33), {}, "stock")

    asyncio.run(use())
    with pytest.raises(InvalidType, match=r"use fencelock\.aio\.fences"):
        EtcdFence(Client())
    with pytest.raises(InvalidType, match=r"use fencelock\.fences"):
        aio_etcd.EtcdFence(fence._client)


@pytest.mark.parametrize("kind", counter_kinds("zookeeper"))
def test_zookeeper_awaited(fence: ZooKeeperFence) -> None:
    """The asyncio API runs kazoo in threads."""

    async def use() -> None:
        awaited = aio_zookeeper.ZooKeeperFence(fence._client, root="/test-marks")
        await awaited.enter(fake_lease(34), "stock")
        transaction = fence._client.transaction()
        awaited.check(fake_lease(34), transaction, "stock")
        assert transaction.commit() == [True]
        with pytest.raises(StaleToken):
            await awaited.commit(fake_lease(33), fence._client.transaction(), "stock")
        assert await awaited.token("stock") == 34

    asyncio.run(use())


@pytest.mark.parametrize("kind", counter_kinds("etcd", "zookeeper"))
def test_rebase_all(fence: Any, caplog: pytest.LogCaptureFixture) -> None:
    """All marks and min_token move to one token, with one log entry."""
    fence.enter(fake_lease(1000), "a")
    fence.enter(fake_lease(2000), "b")
    fence.prune(500)
    assert fence.rebase_all(50, reason="another engine") == 2
    assert "the fences of 2 resources were moved to token 50: another engine" in caplog.text
    for resource in ("a", "b", "unknown"):
        with pytest.raises(StaleToken):
            fence.enter(fake_lease(49), resource)
        fence.enter(fake_lease(50), resource)


@pytest.mark.parametrize("kind", counter_kinds("zookeeper"))
def test_zookeeper_transaction(fence: ZooKeeperFence) -> None:
    """A refusal writes nothing; another operation's error is raised; an entry never returns, also after prune."""
    from kazoo.exceptions import NodeExistsError

    client = fence._client
    client.delete("/test-apples", recursive=True)
    mine, newer = fake_lease(34), fake_lease(35)

    def create(lease: Fenced) -> list[Any]:
        transaction = client.transaction()
        transaction.create("/test-apples", b"95")
        return fence.commit(lease, transaction, "stock")

    with pytest.raises(StaleToken, match=r"has no entry of token 34: call enter\(\)"):
        create(mine)
    fence.enter(mine, "stock")
    assert create(mine) == ["/test-apples"]
    with pytest.raises(NodeExistsError):
        create(mine)
    fence.enter(newer, "stock")
    with pytest.raises(StaleToken):
        create(mine)
    client.delete("/test-apples")
    with pytest.raises(StaleToken) as caught:
        create(mine)
    assert caught.value.seen == 35
    fence.prune(100)
    fence.enter(fake_lease(101), "stock")
    for stale in (mine, newer):
        with pytest.raises(StaleToken):
            create(stale)
    assert client.exists("/test-apples") is None


# ---------------------------------------------------------------------- objects


def test_objects(caplog: pytest.LogCaptureFixture) -> None:
    """A put names the version that was read: an older holder is refused, a newer one repeats its change."""
    import boto3

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    with object_store() as address:
        client = boto3.client("s3", endpoint_url=address, **keys)
        fence = ObjectFence(client, "shop")
        assert fence.token("apples") is None
        with pytest.raises(FencelockError, match="no object 'apples' in 'shop'"):
            fence.rebase("apples", 5, reason="another engine")
        assert fence.read(fake_lease(32), "apples").etag is None
        fence.write(fake_lease(32, "ö 7"), "apples", b"100")
        seen = [fence.read(fake_lease(33), "apples"), fence.read(fake_lease(34), "apples")]
        assert fence.write(fake_lease(33), "apples", b"90", seen[0])
        assert not fence.write(fake_lease(34), "apples", b"95", seen[1])  # the older one's write must not be lost
        assert fence.update(fake_lease(34), "apples", lambda body: str(int(body or 0) - 5).encode()) == b"85"
        for stale in (fake_lease(33), fake_lease(34, "another claim")):
            with pytest.raises(StaleToken) as caught:
                fence.update(stale, "apples", lambda body: b"0")
            assert (caught.value.token, caught.value.seen) == (stale.token, 34)
        with pytest.raises(StaleToken):
            fence.write(fake_lease(33), "apples", b"0", seen[0])
        awaited = aio_objects.ObjectFence(client, "shop")
        assert asyncio.run(awaited.update(fake_lease(34), "apples", lambda body: body or b"")) == b"85"
        fence.rebase("apples", 5, reason="another engine")
        assert "moved from token 34 to token 5: another engine" in caplog.text
        client.put_object(Bucket="shop", Key="page", Body=b"<p>", ContentType="text/html", Metadata={"by": "me"})
        fence.write(fake_lease(5), "page", b"<p>new")
        page = client.get_object(Bucket="shop", Key="page")
        assert (page["ContentType"], page["Metadata"]["by"], page["Body"].read()) == ("text/html", "me", b"<p>new")
        stamped = ObjectFence(client, "shop", stamp=lambda body, mark: body + f" {mark}".encode())
        stamped.write(fake_lease(33), "stamped", b"a")
        first = stamped.read(fake_lease(33), "stamped")
        stamped.write(fake_lease(34), "stamped", b"b")
        stamped.write(fake_lease(34), "stamped", b"a")  # the same content again, but another ETag
        with pytest.raises(StaleToken):
            stamped.write(fake_lease(33), "stamped", b"c", first)
        client.close()
