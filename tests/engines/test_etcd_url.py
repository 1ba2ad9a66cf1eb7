"""How to get to etcd: URLs, users, passwords that nobody sees, TLS."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

import fencelock
from fencelock import EngineUnavailable, InvalidURL
from fencelock.core.clock import NO_DEADLINE
from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.engines.etcd.url import parse
from fencelock.model import Claim, Grant
from tests.contract.factory import MakeClient
from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.etcd_server import add_users, change_role, own_prefix
from tests.servers.etcd import Etcd, EtcdTls
from tests.support.waiting import SOON

PASSWORD = "s3cr3t/pass@w,rd"
QUOTED = "s3cr3t%2Fpass%40w%2Crd"


def test_parts_of_a_url() -> None:
    """A URL names members, a prefix, and a user."""
    url = parse(f"etcd://app:{QUOTED}@h1,h2:1234,[::1]:99/some/pre%20fix/")
    assert url.endpoints == (("h1", 2379), ("h2", 1234), ("::1", 99))
    assert (url.prefix, url.user, url.password, url.tls) == ("/some/pre fix", "app", PASSWORD, None)
    assert "s3cr3t" not in repr(url)
    assert parse("etcd://h").prefix == ""


@pytest.mark.parametrize(
    "url",
    [
        "etcd://",
        "etcd:///prefix",
        "etcd://h:port",
        "etcd://h1,,h2",
        "etcd://h1,h2:99999",
        "etcd://user@h",
        "etcd://h?ca=x",
        "etcds://h?nosuch=x",
        "etcds://h?ca=/no/such/file",
        "etcds://h?key=/no/such/file",
        "etcd://h/x#fragment",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    """What is no URL of etcd's is refused when the client is made, with an example of one that is."""
    with pytest.raises(InvalidURL, match=r"an etcd URL is|cannot be used"):
        fencelock.connect(url)


@pytest.mark.parametrize("scheme", ["etcd", "etcds"])
def test_half_a_password_is_not_quoted(scheme: str) -> None:
    """A password with a question mark that was not escaped is no option whose name may be shown."""
    with pytest.raises(InvalidURL) as caught:
        fencelock.connect(f"{scheme}://h:1234?S3cr3tWord=@h")
    assert "S3cr3t" not in str(caught.value)
    with pytest.raises(InvalidURL) as caught:
        fencelock.connect(f"{scheme}://user:1234?S3cr3tWord=@h")
    assert "S3cr3t" not in str(caught.value)


@pytest.fixture
def guarded(own_etcd: Callable[..., Etcd]) -> Etcd:
    """An etcd with users, whose tokens run out after two seconds."""
    server = own_etcd(settings={"auth-token": "simple", "auth-token-ttl": "2"})
    add_users(server, PASSWORD, prefix="/mine/")
    return server


def with_user(server: Etcd, user: str = "app", password: str = QUOTED, prefix: str = "/mine") -> str:
    """Return the URL for a user."""
    return server.url_at(f"{user}:{password}@{server.address}") + prefix


async def test_user_and_password(guarded: Etcd, clients: Clients) -> None:
    """A user with the right password works, over all that a lock does, as long as the keys are theirs."""
    locks = clients.connect(with_user(guarded))
    lease = await locks.lock("x", ttl=20).acquire()
    async with background(take(locks, "x")) as (task,):
        await waiting(locks, "x")
        await lease.renew()
        await lease.release()
        assert await task > lease.token
    lease = await locks.lock("x", ttl=20).acquire()
    await asyncio.sleep(0.3)
    assert await clients.connect(with_user(guarded)).force_release("x", reason="test") == 1
    assert await lease.lost.wait(timeout=SOON), "what is held can be watched"
    assert [name async for name in locks.names()] == []


async def test_token_that_runs_out(guarded: Etcd, clients: Clients) -> None:
    """A client that was idle for longer than its token is good for logs in again, without a word."""
    locks = clients.connect(with_user(guarded))
    first = await take(locks, "x")
    lease = await locks.lock("held", ttl=30).acquire()
    await asyncio.sleep(5)
    assert await take(locks, "x") > first
    await lease.renew()
    assert await lease.release() is True


async def test_role_change(own_etcd: Callable[..., Etcd], clients: Clients, tmp_path: Path) -> None:
    """Tokens that name a revision of the users are refused after each change of a role: the client logs in again."""
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    server = own_etcd(settings={"auth-token": f"jwt,sign-method=HS256,priv-key={secret},ttl=10m"})
    add_users(server, PASSWORD, prefix="/mine/")
    locks = clients.connect(with_user(server))
    for _ in range(3):
        token = await take(locks, "x")
        lease = await locks.lock("held", ttl=20).acquire()
        async with background(take(locks, "held")) as (task,):
            await waiting(locks, "held")
            change_role(server, PASSWORD)
            await lease.renew()
            change_role(server, PASSWORD)
            assert await lease.release() is True
            await task
        assert await take(locks, "x") > token


async def test_expired_login_with_several_connections(guarded: Etcd, clients: Clients) -> None:
    """When a login is over, the next call logs in again, however many connections were made under the old one."""
    engine = clients.on(with_user(guarded)).engine()
    assert isinstance(engine, EtcdEngine)
    client = engine._client
    for connection in [await client._connect_to(0, 5) for _ in range(4)]:
        client.give_back(connection)
    for number in range(3):
        before = client._auth_token
        client._auth_token = f"{before}x"  # the server knows it no more
        grant = await engine.attempt(Claim(f"n{number}", 20), enqueue=True, deadline=NO_DEADLINE)
        assert isinstance(grant, Grant)
        assert client._auth_token not in (before, f"{before}x")
        assert await engine.release(grant) is True


@pytest.mark.parametrize(
    ("user", "password", "prefix", "words"),
    [
        ("app", "wrong-s3cr3t", "/mine", "user or password is wrong"),
        ("nobody", QUOTED, "/mine", "user or password is wrong"),
        ("app", QUOTED, "/theirs", "permission denied"),
    ],
)
async def test_refused_users(
    guarded: Etcd, clients: Clients, user: str, password: str, prefix: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused login raises an error with the reason; the password is in no error, no cause, no repr and no log."""
    locks = clients.connect(with_user(guarded, user, password, prefix))
    with caplog.at_level(logging.DEBUG), pytest.raises(EngineUnavailable, match=words) as caught:
        await locks.lock("x", ttl=20).acquire()
    shown = "".join(traceback.format_exception(caught.value)) + repr(locks.raw) + caplog.text
    assert "s3cr3t" not in shown


async def test_no_user_where_one_is_needed(guarded: Etcd, clients: Clients) -> None:
    """Without a user, an etcd that has users says what to do."""
    with pytest.raises(EngineUnavailable, match="give user and password in the URL"):
        await clients.connect(guarded.url + "/mine").lock("x").acquire()


async def test_user_where_there_are_none(etcd1: Etcd, clients: Clients) -> None:
    """With a user, an etcd that has none says what to do."""
    with pytest.raises(EngineUnavailable, match="leave them out of the URL"):
        await clients.connect(own_prefix(etcd1.url_at(f"app:x@{etcd1.address}"))).lock("x").acquire()


@pytest.mark.engine("etcd", own=True)
@pytest.mark.parametrize("mutual", [False, True])
async def test_tls(own_etcd: object, runtime_name: str, mutual: bool) -> None:
    """Over TLS all is the same, with a certificate of one's own where the server wants one; without the authority, no."""
    with EtcdTls(mutual=mutual) as server:
        options = f"?ca={server.certificate}" + (f"&cert={server.certificate}&key={server.key}" if mutual else "")
        factory, stranger = MakeClient(server.url + options, runtime_name), MakeClient(server.url, runtime_name)
        locks = factory.connect()
        try:
            lease = await locks.lock("x", ttl=20).acquire()
            async with background(*(take(locks, "x") for _ in range(20))) as tasks:
                await waiting(locks, "x", 20)
                await lease.renew()
                await asyncio.sleep(0.2)
                await lease.release()
                tokens = [await task for task in tasks]
            assert len(set(tokens)) == 20
            with pytest.raises(EngineUnavailable, match="certificate"):
                await stranger.connect().lock("x").acquire()
        finally:
            await factory.finish()
            await stranger.finish()


@pytest.mark.engine("etcd", own=True)
async def test_tls_and_many_at_once(own_etcd: object) -> None:
    """More questions at once than a server over TLS takes streams (250) wait for their turn, and all are answered."""
    with EtcdTls() as server:
        factory = MakeClient(f"{server.url}?ca={server.certificate}", "aio")
        locks = factory.connect()
        tokens = await asyncio.gather(*(take(locks, f"n{number}", 60) for number in range(400)))
        assert len(set(tokens)) == 400
        await factory.finish()


async def test_not_an_etcd(redis_node: object, clients: Clients) -> None:
    """What answers in another protocol, or not at all, is no etcd, and that is said in time."""
    address = redis_node.address  # type: ignore[attr-defined]
    with pytest.raises(EngineUnavailable, match="etcd at"):
        await clients.connect(f"etcd://{address}").lock("x", ttl=2).acquire(timeout=1)
