"""The object fence with replies that are lost, and with stores that ignore conditions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from fencelock import GuaranteeUnavailable, StaleToken, VersionConflict
from fencelock.fences.objects import ObjectFence
from tests.fences.counter_servers import object_store
from tests.fences.fake_lease import fake_lease

CONDITIONS = ("if-match", "if-none-match")


def less(body: bytes | None) -> bytes:
    return str(int(body or b"0") - 5).encode()


class Between(ThreadingHTTPServer):
    """Forwards requests to a store; can drop replies to puts, or conditions."""

    daemon_threads = True

    def __init__(self, store: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store
        self.drop_replies = 0
        self.drop_headers: tuple[str, ...] = ()
        self.refuse_puts = False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Between

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in self.server.drop_headers}
        put = self.command == "PUT"
        if put and self.server.refuse_puts:
            headers["If-Match"] = '"never"'
        store = HTTPConnection(urlsplit(self.server.store).netloc)
        store.request(self.command, self.path, body, headers)
        answer = store.getresponse()
        content = answer.read()
        store.close()
        if put and self.server.drop_replies and answer.status == 200:
            self.server.drop_replies -= 1
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_DELETE = _pass  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def between() -> Iterator[tuple[Between, Any, Any]]:
    """Start a store behind a proxy that injects faults; yield the proxy, a client through it, and a direct client."""
    import boto3

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    with object_store() as store, Between(store) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        through = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.server_port}", **keys)
        direct = boto3.client("s3", endpoint_url=store, **keys)
        yield server, through, direct
        through.close()
        direct.close()
        server.shutdown()
        thread.join()


def test_lost_reply() -> None:
    """If the driver repeats a put whose reply was lost, the fence recognises it, and makes the change once."""
    with between() as (server, client, _):
        fence = ObjectFence(client, "shop")
        fence.write(fake_lease(33), "apples", b"100")
        server.drop_replies = 1
        assert fence.update(fake_lease(34), "apples", less) == b"95"
        assert server.drop_replies == 0
        assert fence.read(fake_lease(34), "apples").body == b"95"
        seen = fence.read(fake_lease(34), "apples")
        server.drop_replies = 1
        assert fence.write(fake_lease(34), "apples", b"90", seen)
        server.drop_replies = 1
        assert (
            fence.update(fake_lease(34), "pears", lambda body: b"new" if body is None else body + b" twice") == b"new"
        )
        assert fence.read(fake_lease(34), "pears").body == b"new"
        with pytest.raises(StaleToken):
            fence.update(fake_lease(33), "apples", less)


@pytest.mark.parametrize("ignored", [CONDITIONS, CONDITIONS[:1], CONDITIONS[1:]], ids="+".join)
def test_store_that_ignores_conditions(ignored: tuple[str, ...]) -> None:
    """The fence refuses a store that ignores a condition, and leaves nothing behind."""
    with between() as (server, client, direct):
        server.drop_headers = ignored
        direct.put_object(Bucket="shop", Key="apples", Body=b"100")
        fence = ObjectFence(client, "shop")
        if "if-match" in ignored:
            with pytest.raises(GuaranteeUnavailable, match="ignores If-Match"):
                fence.update(fake_lease(34), "apples", less)
            assert direct.get_object(Bucket="shop", Key="apples")["Body"].read() == b"100"
        with pytest.raises(GuaranteeUnavailable, match="ignores If-"):
            fence.update(fake_lease(34), "pears", lambda body: b"1")
        names = {found["Key"] for found in direct.list_objects_v2(Bucket="shop")["Contents"]}
        assert names <= {"apples", "pears"}
        trusting = ObjectFence(client, "shop", probe=False)
        assert trusting.update(fake_lease(34), "apples", less) == b"95"


def test_store_that_always_reports_a_conflict() -> None:
    """After a limited number of refused puts the fence raises VersionConflict."""
    with between() as (server, client, _):
        fence = ObjectFence(client, "shop")
        fence.write(fake_lease(33), "apples", b"100")
        server.refuse_puts = True
        with pytest.raises(VersionConflict, match="apples"):
            fence.update(fake_lease(34), "apples", less)
        with pytest.raises(VersionConflict, match="apples"):
            fence.rebase("apples", 5, reason="another engine")
