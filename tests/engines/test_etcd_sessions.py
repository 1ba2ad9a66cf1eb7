"""Sessions on a real etcd: one keep-alive for all, an end of its own for each claim, and what happens when they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from fencelock import InvalidTTL, LeaseLost
from fencelock.core.clock import NO_DEADLINE, Deadline, boottime
from fencelock.core.runtime import Event
from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.engines.etcd.grpc import Call, EtcdConnection
from fencelock.engines.etcd.messages import KEEP_ALIVE, RANGE, TXN, count_key, read_range
from fencelock.engines.etcd.own_claims import OwnClaim, OwnClaims
from fencelock.engines.etcd.release import Releaser
from fencelock.engines.etcd.rpc_errors import RpcError
from fencelock.errors import OutcomeUnknown
from fencelock.model import Claim, Grant, LossReason, Renewal
from tests.contract.factory import MakeClient
from tests.contract.runtimes import client_of, core_of
from tests.contract.steps import background, is_free, take, waiting
from tests.engines.conftest import Clients
from tests.engines.etcd_server import counted, delete, keys, leases, messages, own_prefix, revoke
from tests.servers.etcd import Etcd
from tests.servers.proxy import Proxy
from tests.support.waiting import SOON, eventually


@pytest.fixture
def url(etcd1: Etcd) -> str:
    """A prefix of the test's own on the shared server."""
    return own_prefix(etcd1.url)


def prefix_of(url: str) -> str:
    """Return the keys' prefix that a URL names."""
    return "/" + url.rpartition("/")[2] + "/"


@pytest.mark.timeout(300)
async def test_ten_thousand_held_locks_need_one_keep_alive(own_etcd: Callable[..., Etcd]) -> None:
    """However many locks are held, all of one ttl are kept by one session and one keep-alive."""
    server = own_etcd()
    factory = MakeClient(server.url, "aio")  # one connection carries them all; ten thousand threads would take long
    locks = factory.connect()
    held = []
    for start in range(0, 10_000, 100):
        held += await asyncio.gather(*(locks.lock(f"n{start + i}", ttl=60).acquire() for i in range(100)))
    assert len(leases(server)) == 1
    assert len(keys(server, "/fencelock/claims/")) == 10_000
    before = messages(server, "LeaseKeepAlive")
    answers = await client_of(locks).engine.renew([core_of(lease)._grant for lease in held])
    assert answers == [Renewal.RENEWED] * 10_000
    assert messages(server, "LeaseKeepAlive") - before <= 2  # the renewer may run meanwhile
    await client_of(locks).engine.close()  # at once: closing the client would give back one after the other first
    assert leases(server) == []
    assert keys(server, "/fencelock/claims/") == []
    await locks.close()


async def test_uncontended_pair_is_two_requests(own_etcd: Callable[..., Etcd], clients: Clients) -> None:
    """Once there is a session, an acquire is one transaction, a release another, and nothing else is sent."""
    server = own_etcd()
    locks = clients.connect(server.url)
    await take(locks, "x")

    def sent() -> list[float]:
        return [messages(server, method) for method in ("Txn", "DeleteRange", "Range", "LeaseKeepAlive", "Watch")]

    async def only_two_requests() -> bool:  # not at once: the loss watcher of the first lock may still begin
        before = sent()
        for _ in range(10):
            await take(locks, "x")
        return [after - earlier for after, earlier in zip(sent(), before, strict=True)] == [20, 0, 0, 0, 0]

    await eventually(only_two_requests, "ten pairs are twenty requests")


async def test_revoked_while_held(etcd1: Etcd, url: str, clients: Clients) -> None:
    """A lease whose session an operator revokes is lost at once, as gone, and the next acquire has a new session."""
    locks = clients.connect(url)
    before = set(leases(etcd1))
    lease = await locks.lock("x", ttl=30).acquire()
    await asyncio.sleep(0.3)  # it is watched
    (ours,) = set(leases(etcd1)) - before
    revoke(etcd1, ours)
    assert await lease.lost.wait(timeout=SOON)
    assert lease.reason is LossReason.GONE
    assert await take(locks, "x") > lease.token
    assert await lease.release() is False


async def test_revoked_while_waiting(etcd1: Etcd, url: str, clients: Clients) -> None:
    """A waiter whose session is revoked enqueues again and gets the lock; it never takes its lost queue entry for a grant."""
    holder, waiter, other = clients.connect(url), clients.connect(url), clients.connect(url)
    lease = await holder.lock("x", ttl=30).acquire()
    before = set(leases(etcd1))
    async with background(waiter.lock("x", ttl=9).acquire(SOON)) as (task,):
        await waiting(other, "x")
        (session,) = set(leases(etcd1)) - before
        revoke(etcd1, session)
        await waiting(other, "x", 0)
        await lease.release()
        got = await task
        assert got.token > lease.token
        got.check()
        assert [seen.token for seen in (await other.inspect("x")).holders] == [got.token]
        await got.release()


async def test_deleted_key_is_reported_to_its_holder(etcd1: Etcd, url: str, clients: Clients) -> None:
    """A claim whose key somebody deletes is told to its holder at once, although its session lives on."""
    locks = clients.connect(url)
    kept = await locks.lock("kept", ttl=30).acquire()
    lease = await locks.lock("x", ttl=30).acquire()
    (key,) = keys(etcd1, prefix_of(url) + "fencelock/claims/x/")
    delete(etcd1, key)
    assert await lease.lost.wait(timeout=SOON)
    assert lease.reason is LossReason.GONE
    kept.check()
    await kept.renew()
    with pytest.raises(LeaseLost):
        await lease.renew()
    await kept.release()


async def test_claim_that_is_not_renewed_is_removed_though_its_session_lives(url: str, clients: Clients) -> None:
    """A claim ends with its own ttl although others keep its session alive, also for waiters of the same client."""
    locks, other = clients.connect(url), clients.connect(url)
    kept = await locks.lock("kept", ttl=4).acquire()
    for waiter in (locks, other):
        lease = await locks.lock("x", ttl=4, renew=False).acquire()
        async with waiter.lock("x", ttl=4, timeout=SOON) as next:
            assert next.token > lease.token
            assert lease.lost.is_set()
    kept.check()
    assert not await is_free(other, "kept")
    await kept.release()


async def test_released_keys_leave_nothing(etcd1: Etcd, url: str, clients: Clients) -> None:
    """All that stays of a namespace is what is true of it as a whole; a closed client takes its sessions along."""
    locks = clients.connect(url)
    for name in ("a", "b/c", "ü"):
        await take(locks, name)
    lease = await locks.lock("held", ttl=30).acquire()
    await locks.close()
    assert lease.reason is LossReason.CLOSED
    assert keys(etcd1, prefix_of(url)) == [prefix_of(url) + "fencelock/about"]


async def test_ttl_that_the_server_would_stretch_is_refused(own_etcd: Callable[..., Etcd], clients: Clients) -> None:
    """A ttl that the server would stretch is refused with the numbers, and nothing stays behind."""
    server = own_etcd(settings={"heartbeat-interval": "300", "election-timeout": "3000"})
    locks = clients.connect(server.url)
    with pytest.raises(InvalidTTL, match=r"leases for 5 seconds at least, so 2 cannot"):
        await locks.lock("x", ttl=2).acquire()
    assert leases(server) == []
    await take(locks, "x")
    async with locks.lock("y", ttl=5) as lease:
        assert lease.ttl == 5


async def test_ttl_is_rounded_down_to_a_step(url: str, clients: Clients) -> None:
    """A lease's ttl is rounded down to a step, and ttls between the same two steps share a session."""
    locks = clients.connect(url)
    a = await locks.lock("a", ttl=13.5).acquire()
    b = await locks.lock("b", ttl=14).acquire()
    assert a.ttl == b.ttl == 12
    assert core_of(a)._grant.engine_state.session is core_of(b)._grant.engine_state.session
    assert a.remaining <= 12
    await a.release()
    await b.release()


@pytest.mark.parametrize("direction", ["to_server", "to_client", "both"])
async def test_cut_connection_is_lost_before_the_next_holder(
    etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients, direction: str
) -> None:
    """With the way to or from the server cut, the holder has lost its lease by its own clock before others can have it."""
    way = proxy(etcd1)
    near = own_prefix(way.url)
    locks, other = clients.connect(near), clients.connect(etcd1.url + "/" + near.rpartition("/")[2])
    lease = await locks.lock("x", ttl=2).acquire()
    way.cut(direction)  # type: ignore[arg-type]
    async with other.lock("x", ttl=2, timeout=SOON) as successor:
        assert lease.lost.is_set()
        assert lease.reason is LossReason.EXPIRED
        assert successor.token > lease.token
    way.heal()
    assert await take(locks, "x") > successor.token


async def test_attempt_without_a_reply_leaves_only_a_mark(
    etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """An attempt without a reply leaves only a mark that it was abandoned, which goes with its session."""
    way = proxy(etcd1)
    near = own_prefix(way.url)
    prefix = prefix_of(near)
    engine = clients.on(near).engine()
    await engine.attempt(Claim("warm", 3), enqueue=True, deadline=NO_DEADLINE)
    claim = Claim("x", 3)
    way.drop("to_client")
    with pytest.raises(ConnectionError):
        await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    way.heal()
    await engine.abandon(claim)
    assert keys(etcd1, f"{prefix}fencelock/claims/x/") == []
    assert keys(etcd1, f"{prefix}fencelock/abandoned/") == [f"{prefix}fencelock/abandoned/{claim.id}"]
    assert not isinstance(await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE), Grant), (
        "a late attempt finds the mark"
    )

    async def gone() -> bool:
        return not keys(etcd1, f"{prefix}fencelock/abandoned/")

    await eventually(gone, "the mark is gone")


async def test_late_attempt_after_the_release_takes_nothing(
    etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """An attempt that was held up, and arrives after the lock was had over another way and given back, takes nothing."""
    way = proxy(etcd1)
    near = own_prefix(etcd1.url_at(f"{way.address},{etcd1.address}"))
    prefix = prefix_of(near)
    engine = clients.on(near).engine()
    assert isinstance(engine, EtcdEngine)
    engine._client._next = 0  # by the proxy
    warm = await engine.attempt(Claim("warm", 9), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(warm, Grant)
    claim = Claim("x", 9)
    way.cut("to_server")
    with pytest.raises(OutcomeUnknown):
        await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    grant = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    assert grant.attempt_in_flight
    assert await engine.release(grant) is True
    await engine.abandon(claim)
    way.heal()
    for _ in range(10):
        await asyncio.sleep(0.05)
        assert keys(etcd1, f"{prefix}fencelock/claims/x/") == []
    assert await engine.release(warm) is True


@pytest.mark.parametrize("abandoned", [True, False])
async def test_late_attempt_after_more_than_a_ttl_takes_nothing(
    etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients, abandoned: bool
) -> None:
    """An attempt that arrives when its ttl is long over takes nothing, though its session lives on with other claims."""
    way = proxy(etcd1)
    near = own_prefix(etcd1.url_at(f"{way.address},{etcd1.address}"))
    prefix = prefix_of(near)
    engine = clients.on(near).engine()
    assert isinstance(engine, EtcdEngine)
    engine._client._next = 0  # by the proxy
    warm = await engine.attempt(Claim("warm", 4), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(warm, Grant)
    claim = Claim("x", 4)
    way.cut("to_server")
    with pytest.raises(OutcomeUnknown):
        await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    if abandoned:
        await engine.abandon(claim)
    for _ in range(14):
        await asyncio.sleep(0.5)
        assert await engine.renew([warm]) == [Renewal.RENEWED]
    way.heal()
    for _ in range(10):
        await asyncio.sleep(0.05)
        assert keys(etcd1, f"{prefix}fencelock/claims/x/") == []
    other = await engine.attempt(Claim("y", 4), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(other, Grant)
    assert other.engine_state.session is not warm.engine_state.session, "nothing more is to keep that session alive"
    assert await engine.release(warm) is True
    assert await engine.release(other) is True

    async def gone() -> bool:
        return not keys(etcd1, f"{prefix}fencelock/abandoned/")

    await eventually(gone, "the mark goes with its session")


async def test_watches_end_with_their_claims(own_etcd: Callable[..., Etcd], clients: Clients) -> None:
    """Watches end with what they were for, held or waited for."""
    server = own_etcd()
    locks = clients.connect(server.url)
    for _ in range(24):
        lease = await locks.lock("x", ttl=30).acquire()
        async with background(take(locks, "x")) as (task,):
            await waiting(locks, "x")
            await asyncio.sleep(0.15)
            await lease.release()
            await task

    async def few() -> bool:
        return counted(server, "etcd_debugging_mvcc_watcher_total") <= 2

    await eventually(few, "watches have ended")


async def test_keep_alive_of_an_old_leader_does_not_count(url: str, clients: Clients) -> None:
    """A keep-alive counts only if a majority answered in the same term: a leader that was deposed may not know it yet."""
    engine = clients.on(url).engine()
    assert isinstance(engine, EtcdEngine)
    grant = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    sessions, session, since = engine._sessions, grant.engine_state.session, grant.since
    link = await engine._client.take()
    try:
        header, _ = read_range(await link.call(RANGE, count_key(b"x"), 5))
        stream = sessions.send_keep_alive(session, link)
        assert await sessions.finish_keep_alive(session, link, stream, header.term + 1, 5) is Renewal.UNKNOWN
        assert session.since == since
        stream = sessions.send_keep_alive(session, link)
        assert await sessions.finish_keep_alive(session, link, stream, header.term, 5) is Renewal.RENEWED
        assert session.since > since
    finally:
        engine._client.give_back(link)


async def test_deadline_counts_from_before_the_keep_alive_is_sent(
    url: str, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped just after it has sent a keep-alive does not take its session for younger than it is."""
    engine = clients.on(url).engine()
    assert isinstance(engine, EtcdEngine)
    grant = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    now, start = engine._runtime.now, EtcdConnection.start
    sent: list[float] = []

    def stopped(self: EtcdConnection, method: str, body: bytes) -> tuple[Call, Event]:
        call = start(self, method, body)
        if method == KEEP_ALIVE:
            sent.append(now())
            time.sleep(0.05)
        return call

    monkeypatch.setattr(EtcdConnection, "start", stopped)
    assert await engine.renew([grant]) == [Renewal.RENEWED]
    assert grant.since < grant.engine_state.session.since <= sent[0]


@pytest.mark.parametrize("words", ["etcdserver: server stopped", "raft: stopped"])
async def test_member_that_stops_may_have_done_it(
    etcd1: Etcd, url: str, clients: Clients, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """A member that says "stopped" may have proposed the claim before: the outcome is unknown, and abandon removes it."""
    engine = clients.on(url).engine()
    assert isinstance(engine, EtcdEngine)
    warm = await engine.attempt(Claim("warm", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(warm, Grant)
    call = EtcdConnection.call

    async def stops(self: EtcdConnection, method: str, body: bytes, timeout: float) -> bytes:
        answer = await call(self, method, body, timeout)
        if method == TXN:
            raise RpcError(14, words)
        return answer

    claim = Claim("x", 30)
    with monkeypatch.context() as patched:
        patched.setattr(EtcdConnection, "call", stops)
        with pytest.raises(OutcomeUnknown, match="stopped"):
            await engine.attempt(claim, enqueue=True, deadline=Deadline(boottime, 1.0))
    assert len(keys(etcd1, prefix_of(url) + "fencelock/claims/x/")) == 1, "it was done"
    await engine.abandon(claim)
    assert keys(etcd1, prefix_of(url) + "fencelock/claims/x/") == []
    assert await engine.release(warm) is True


async def test_claim_that_is_removed_cannot_be_renewed(
    etcd1: Etcd, url: str, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that is answered while its claim is being deleted, as it was over by our clock, does not bring it back."""
    engine = clients.on(url).engine()
    assert isinstance(engine, EtcdEngine)
    grant = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    session = grant.engine_state.session
    remove = Releaser._remove
    answers: list[Renewal] = []

    async def renewed_meanwhile(self: Releaser, *args: Any) -> None:
        await remove(self, *args)
        with monkeypatch.context() as patched:
            patched.setattr(Releaser, "_remove", remove)
            answers.extend(await engine.renew([grant]))

    session._ends[grant.claim.id] = session._first_end = 0.0  # as if nobody had renewed it for its ttl
    monkeypatch.setattr(Releaser, "_remove", renewed_meanwhile)
    await engine._releaser.remove_expired()
    assert answers == [Renewal.LOST]
    assert keys(etcd1, prefix_of(url) + "fencelock/claims/x/") == []


async def test_session_that_ends_while_a_claim_is_granted(
    etcd1: Etcd, url: str, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that ends between the reply and the grant removes the claim; the client repeats it on another session."""
    engine = clients.on(url).engine()
    assert isinstance(engine, EtcdEngine)
    hold = OwnClaims.hold
    ended: list[int] = []

    def ends(self: OwnClaims, own: OwnClaim) -> bool:
        if not ended:
            assert own.session is not None
            ended.append(own.session.handle)
            revoke(etcd1, str(own.session.handle))
            engine._sessions.report_gone(own.session)
        return hold(self, own)

    monkeypatch.setattr(OwnClaims, "hold", ends)
    grant = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    assert grant.engine_state.session.handle not in ended
    assert keys(etcd1, prefix_of(url) + "fencelock/claims/x/") == [grant.engine_state.key.decode()]
    assert await engine.renew([grant]) == [Renewal.RENEWED]
    assert await engine.release(grant) is True
