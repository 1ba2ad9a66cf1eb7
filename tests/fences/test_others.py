"""The fences of etcd, ZooKeeper and objects: what is peculiar to each, on the real thing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
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
        fence.enter(bearer(token), "a")
    for stale in (bearer(9), bearer(10, "somebody else")):
        with pytest.raises(StaleToken) as caught:
            fence.enter(stale, "a")
        assert (caught.value.token, caught.value.seen) == (stale.token, 10)
    fence.enter(bearer(20), "b/../ö. 7")
    fence.enter(bearer(30), "c")
    fence.rebase("c", 5, reason="another engine")
    assert "moved from token 30 to token 5: another engine" in caplog.text
    fence.enter(bearer(5), "c")
    fence.enter(bearer(40), "c")
    assert fence.collect(25) == 2
    with caplog.at_level("INFO", "fencelock.fences"):
        assert fence.collect(15) == 0
    assert "tokens below 25 are refused" in caplog.text  # not 15
    for resource in ("a", "b/../ö. 7", "never seen"):
        with pytest.raises(StaleToken):
            fence.enter(bearer(24), resource)
        assert fence.token(resource) == 25
        fence.enter(bearer(25), resource)
    assert fence.token("c") == 40


@pytest.mark.parametrize("kind", kinds("etcd", "zookeeper"))
def test_a_collection_leaves_fences_below_it_alone(fence: Any, kind: str) -> None:
    """A fence whose marks are below those of another shares neither marks nor the floor with it."""
    if kind == "etcd":
        below: Any = EtcdFence(fence._client, prefix="test-marks/b/")
    else:
        below = ZooKeeperFence(fence._client, root="/test-marks/b")
    below.enter(bearer(5), "x")
    assert fence.token("b/x") is fence.token("b") is None
    assert below.collect(10) == 1
    below.enter(bearer(20), "y")
    fence.enter(bearer(30), "b")
    assert fence.collect(100) == 1
    assert [below.token(resource) for resource in ("x", "y")] == [10, 20]
    with pytest.raises(StaleToken):
        below.enter(bearer(5), "x")


def test_etcd_prefix_without_a_slash_is_refused() -> None:
    """The slash keeps the keys of one fence apart from those of another."""
    with pytest.raises(ValueError, match="must end with a slash"):
        EtcdFence(SimpleNamespace(transaction=None), prefix="marks")


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
        fence.transaction({"success": [put]}, mine, "stock")  # never entered
    fence.enter(mine, "stock")
    fence.rebase("stock", 3, reason="another engine")
    with pytest.raises(StaleToken, match=r"has not let token 34 in: call enter\(\)"):
        fence.transaction({"success": [put]}, mine, "stock")
    fence.enter(mine, "stock")
    assert fence.transaction({"compare": [absent], "success": [put]}, mine, "stock")["succeeded"]
    second = fence.transaction({"compare": [absent], "success": [put], "failure": [look]}, mine, "stock")
    assert not second.get("succeeded")
    assert len(second["responses"]) == 1
    assert client.transaction({"compare": [fence.compare(mine, "stock")], "success": [look]})["succeeded"]
    fence.collect(100)
    with pytest.raises(StaleToken) as caught:
        fence.transaction({"success": [put]}, mine, "stock")
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
        await awaited.enter(bearer(34), "stock")
        with pytest.raises(StaleToken):
            await awaited.transaction({}, bearer(33), "stock")

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
        return fence.commit(transaction, lease, "stock")

    with pytest.raises(StaleToken, match=r"has not let token 34 in: call enter\(\)"):
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
    fence.collect(100)
    fence.enter(bearer(101), "stock")
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
        assert fence.read(bearer(32), "apples").etag is None
        fence.write(bearer(32, "ö 7"), "apples", b"100")
        seen = [fence.read(bearer(33), "apples"), fence.read(bearer(34), "apples")]
        assert fence.write(bearer(33), "apples", b"90", seen[0])
        assert not fence.write(bearer(34), "apples", b"95", seen[1])  # the older one's write must not be lost
        assert fence.update(bearer(34), "apples", lambda body: str(int(body or 0) - 5).encode()) == b"85"
        for stale in (bearer(33), bearer(34, "somebody else")):
            with pytest.raises(StaleToken) as caught:
                fence.update(stale, "apples", lambda body: b"0")
            assert (caught.value.token, caught.value.seen) == (stale.token, 34)
        with pytest.raises(StaleToken):
            fence.write(bearer(33), "apples", b"0", seen[0])
        fence.rebase("apples", 5, reason="another engine")
        assert "moved from token 34 to token 5: another engine" in caplog.text
        client.put_object(Bucket="shop", Key="page", Body=b"<p>", ContentType="text/html", Metadata={"by": "me"})
        fence.write(bearer(5), "page", b"<p>new")
        page = client.get_object(Bucket="shop", Key="page")
        assert (page["ContentType"], page["Metadata"]["by"], page["Body"].read()) == ("text/html", "me", b"<p>new")
        stamped = ObjectFence(client, "shop", stamp=lambda body, mark: body + f" {mark}".encode())
        stamped.write(bearer(33), "stamped", b"a")
        first = stamped.read(bearer(33), "stamped")
        stamped.write(bearer(34), "stamped", b"b")
        stamped.write(bearer(34), "stamped", b"a")  # the same content again, but another ETag
        with pytest.raises(StaleToken):
            stamped.write(bearer(33), "stamped", b"c", first)
        client.close()
