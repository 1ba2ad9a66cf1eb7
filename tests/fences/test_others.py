"""The fences of etcd, ZooKeeper and objects: what is peculiar to each, on the real thing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from fencelock import FencelockError, StaleToken
from fencelock.fences import Fenced
from fencelock.fences.etcd import EtcdFence, coded
from fencelock.fences.objects import ObjectFence
from fencelock.fences.zookeeper import ZooKeeperFence
from tests.fences.bearers import bearer
from tests.fences.places import kinds, object_store

# ---------------------------------------------------------------------- the same for all that enter


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


@pytest.mark.parametrize("kind", kinds("etcd", "zookeeper"))
def test_entered_moved_collected(fence: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Only the newest enters; a fence can be moved, and collected behind a floor."""
    assert fence.token("a") is None
    for token in (9, 10, 10):
        fence.enter("a", bearer(token))
    for stale in (bearer(9), bearer(10, "somebody else")):
        with pytest.raises(StaleToken) as caught:
            fence.enter("a", stale)
        assert (caught.value.token, caught.value.seen) == (stale.token, 10)
    fence.enter("b/../ö. 7", bearer(20))
    fence.enter("c", bearer(30))
    fence.rebase("c", 5, reason="another engine")
    assert "moved from token 30 to token 5: another engine" in caplog.text
    fence.enter("c", bearer(5))
    fence.enter("c", bearer(40))
    assert fence.collect(25) == 2
    with caplog.at_level("INFO", "fencelock.fences"):
        assert fence.collect(15) == 0
    assert "tokens below 25 are refused" in caplog.text  # not 15
    for resource in ("a", "b/../ö. 7", "never seen"):
        with pytest.raises(StaleToken):
            fence.enter(resource, bearer(24))
        assert fence.token(resource) == 25
        fence.enter(resource, bearer(25))
    assert fence.token("c") == 40


@pytest.mark.parametrize("kind", kinds("etcd"))
def test_etcd_transaction(fence: EtcdFence) -> None:
    """The caller's own compares and operations go with ours; a refusal writes nothing; a mark that was collected refuses."""
    client = fence._client
    client.delete("apples")
    put = {"request_put": {"key": coded("apples"), "value": coded("95")}}
    absent = {"key": coded("apples"), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
    look = {"request_range": {"key": coded("apples")}}
    mine = bearer(34)
    with pytest.raises(StaleToken, match=r"has not let token 34 in: call enter\(\)"):
        fence.transaction("stock", mine, {"success": [put]})  # never entered
    fence.enter("stock", mine)
    fence.rebase("stock", 3, reason="another engine")
    with pytest.raises(StaleToken, match=r"has not let token 34 in: call enter\(\)"):
        fence.transaction("stock", mine, {"success": [put]})
    fence.enter("stock", mine)
    assert fence.transaction("stock", mine, {"compare": [absent], "success": [put]})["succeeded"]
    second = fence.transaction("stock", mine, {"compare": [absent], "success": [put], "failure": [look]})
    assert not second.get("succeeded")
    assert len(second["responses"]) == 1
    assert client.transaction({"compare": [fence.compare("stock", mine)], "success": [look]})["succeeded"]
    fence.collect(100)
    with pytest.raises(StaleToken) as caught:
        fence.transaction("stock", mine, {"success": [put]})
    assert caught.value.seen == 100


@pytest.mark.parametrize("kind", kinds("etcd"))
def test_etcd_awaited(fence: EtcdFence) -> None:
    """With a client whose transactions are awaited, so is the fence."""

    class Client:
        async def transaction(self, request: dict[str, Any]) -> Any:
            await asyncio.sleep(0)
            return fence._client.transaction(request)

    async def use() -> None:
        awaited = EtcdFence(Client(), prefix="test-marks/")
        await awaited.enter("stock", bearer(34))
        with pytest.raises(StaleToken):
            await awaited.transaction("stock", bearer(33), {})

    asyncio.run(use())


@pytest.mark.parametrize("kind", kinds("zookeeper"))
def test_zookeeper_transaction(fence: ZooKeeperFence) -> None:
    """A refusal writes nothing; another operation's error comes out; a permit never comes back, not even when collected."""
    from kazoo.exceptions import NodeExistsError

    client = fence._client
    client.delete("/test-apples", recursive=True)
    mine, newer = bearer(34), bearer(35)

    def create(lease: Fenced) -> list[Any]:
        transaction = client.transaction()
        transaction.create("/test-apples", b"95")
        return fence.commit(transaction, "stock", lease)

    with pytest.raises(StaleToken, match=r"has not let token 34 in: call enter\(\)"):
        create(mine)
    fence.enter("stock", mine)
    assert create(mine) == ["/test-apples"]
    with pytest.raises(NodeExistsError):
        create(mine)
    fence.enter("stock", newer)
    with pytest.raises(StaleToken):
        create(mine)
    client.delete("/test-apples")
    with pytest.raises(StaleToken) as caught:
        create(mine)
    assert caught.value.seen == 35
    fence.collect(100)
    fence.enter("stock", bearer(101))
    for stale in (mine, newer):
        with pytest.raises(StaleToken):
            create(stale)
    assert client.exists("/test-apples") is None


# ---------------------------------------------------------------------- objects


def test_objects(caplog: pytest.LogCaptureFixture) -> None:
    """Puts are bound to what was read: older ones that were overtaken are refused, newer ones do their change anew."""
    import boto3

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    with object_store() as address:
        client = boto3.client("s3", endpoint_url=address, **keys)
        fence = ObjectFence(client, "shop")
        assert fence.token("apples") is None
        with pytest.raises(FencelockError, match="no object 'apples' in 'shop'"):
            fence.rebase("apples", 5, reason="another engine")
        assert fence.read("apples", bearer(32)).etag is None
        fence.write("apples", bearer(32, "ö 7"), b"100")
        seen = [fence.read("apples", bearer(33)), fence.read("apples", bearer(34))]
        assert fence.write("apples", bearer(33), b"90", seen[0])
        assert not fence.write("apples", bearer(34), b"95", seen[1])  # the older one's write must not be lost
        assert fence.update("apples", bearer(34), lambda body: str(int(body or 0) - 5).encode()) == b"85"
        for stale in (bearer(33), bearer(34, "somebody else")):
            with pytest.raises(StaleToken) as caught:
                fence.update("apples", stale, lambda body: b"0")
            assert (caught.value.token, caught.value.seen) == (stale.token, 34)
        with pytest.raises(StaleToken):
            fence.write("apples", bearer(33), b"0", seen[0])
        fence.rebase("apples", 5, reason="another engine")
        assert "moved from token 34 to token 5: another engine" in caplog.text
        client.put_object(Bucket="shop", Key="page", Body=b"<p>", ContentType="text/html", Metadata={"by": "me"})
        fence.write("page", bearer(5), b"<p>new")
        page = client.get_object(Bucket="shop", Key="page")
        assert (page["ContentType"], page["Metadata"]["by"], page["Body"].read()) == ("text/html", "me", b"<p>new")
        stamped = ObjectFence(client, "shop", stamp=lambda body, mark: body + f" {mark}".encode())
        stamped.write("stamped", bearer(33), b"a")
        first = stamped.read("stamped", bearer(33))
        stamped.write("stamped", bearer(34), b"b")
        stamped.write("stamped", bearer(34), b"a")  # the same content again, but another ETag
        with pytest.raises(StaleToken):
            stamped.write("stamped", bearer(33), b"c", first)
        client.close()
