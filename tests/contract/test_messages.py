"""Messages that are lost, late or refused, with a fault injector around the real engine."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from fencelock import EngineUnavailable, LeaseLost, LockTimeout, LossReason, ReleaseFailed
from fencelock.core.clock import NO_DEADLINE
from fencelock.errors import OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Waiting
from tests.contract.factory import MakeClient
from tests.contract.faults import Faulty
from tests.contract.runtimes import LocksView
from tests.contract.steps import assert_notified_once, background, is_free, renewed, take, wait_until_unclaimed, waiting
from tests.contract.ttl_scale import TtlScale
from tests.support.waiting import SOON, eventually


async def test_grant_without_a_reply_is_found_again(locks: LocksView) -> None:
    """A repeated attempt finds the grant whose reply was lost: one grant, one token."""
    faulty = Faulty.around(locks)
    faulty.lose("attempt", 2)
    lease = await locks.lock("x").acquire()
    granted = faulty.answers["attempt"]
    assert [type(answer) for answer in granted] == [Grant] * 3
    assert {answer.token for answer in granted} == {lease.token}
    assert len({answer.claim.id for answer in granted}) == 1
    seen = await locks.inspect("x")
    assert [holder.token for holder in seen.holders] == [lease.token]
    await lease.release()


async def test_grant_without_a_reply_counts_from_the_first_request(locks: LocksView) -> None:
    """The deadline of a lease whose first reply was lost counts from the first request."""
    faulty = Faulty.around(locks)
    faulty.lose("attempt", 3)
    begun = time.monotonic()
    lease = await locks.lock("x", ttl=10).acquire()
    assert lease.remaining <= 10 - (time.monotonic() - begun) + 0.001
    await lease.release()


async def test_try_acquire_without_a_reply_raises_and_is_undone(factory: MakeClient, locks: LocksView) -> None:
    """A try_acquire that gets no reply, also to its repetition, raises, and the client removes its claim."""
    faulty = Faulty.around(locks)
    faulty.lose("attempt", 2)
    with pytest.raises(EngineUnavailable) as caught:
        await locks.lock("x").try_acquire()
    assert caught.value.name == "x"
    assert await is_free(factory.connect(), "x")


async def test_request_that_never_arrives_is_repeated(locks: LocksView) -> None:
    """The acquire loop repeats requests that are lost on their way."""
    faulty = Faulty.around(locks)
    faulty.drop("attempt", 2)
    async with locks.lock("x"):
        assert faulty.calls["attempt"] == 3


@pytest.mark.client_side
async def test_engine_that_refuses_the_first_request_is_reported_at_once(locks: LocksView) -> None:
    """An engine that refuses the first request raises at once, and the client sends no clean-up."""
    faulty = Faulty.around(locks)
    faulty.refuse("attempt", 100)
    with pytest.raises(EngineUnavailable) as caught:
        await locks.lock("x").acquire()
    assert caught.value.name == "x"
    assert faulty.calls == {"attempt": 1}


async def test_waiter_keeps_its_place_through_an_outage(factory: MakeClient, locks: LocksView) -> None:
    """A waiter keeps waiting through a short outage and keeps its place in the queue."""
    other = factory.connect()
    holder = await other.lock("x").acquire()
    faulty = Faulty.around(locks)
    async with background(locks.lock("x", ttl=3).acquire()) as (task,):
        await waiting(other, "x")
        faulty.refuse("wait", 3)
        await asyncio.sleep(1.4)
        assert not task.done()
        await holder.release()
        lease = await task
        assert lease.remaining > lease.ttl * 0.6
        await lease.release()


async def test_waiter_raises_when_its_queue_entry_must_have_expired(factory: MakeClient, locks: LocksView) -> None:
    """In a long outage a waiter raises EngineUnavailable once its queue entry must have expired."""
    async with factory.connect().lock("x"):
        faulty = Faulty.around(locks)
        async with background(locks.lock("x", ttl=0.5).acquire()) as (task,):
            await waiting(locks, "x")
            faulty.refuse("wait", 1000)
            faulty.refuse("attempt", 1000)
            with pytest.raises(EngineUnavailable):
                await asyncio.wait_for(task, SOON)


async def test_grant_to_a_waiter_without_a_reply_is_found_again(factory: MakeClient, locks: LocksView) -> None:
    """A waiter whose wake-up was lost finds its grant with the next attempt, under the same token."""
    other = factory.connect()
    holder = await other.lock("x").acquire()
    faulty = Faulty.around(locks)
    faulty.lose("wait", 1)

    async def waits() -> bool:  # a queue entry is not enough: the grant may come with the reply to the attempt
        return bool(faulty.calls["wait"])

    async with background(locks.lock("x", ttl=10).acquire()) as (task,):
        await eventually(waits, "it waits")
        await holder.release()
        lease = await task
    assert [holder.token for holder in (await other.inspect("x")).holders] == [lease.token]
    answers = faulty.answers["wait"] + faulty.answers["attempt"]
    assert {answer.token for answer in answers if isinstance(answer, Grant)} == {lease.token}
    await lease.release()


async def test_release_without_a_reply_never_frees_a_successor(factory: MakeClient, locks: LocksView) -> None:
    """A release without a reply is repeated, and the repetition does not free the next holder's lock."""
    other = factory.connect()
    faulty = Faulty.around(locks)
    lease = await locks.lock("x").acquire()
    async with background(other.lock("x").acquire()) as (task,):
        await waiting(other, "x")
        faulty.lose("release")
        assert await lease.release() in (True, False)
        assert faulty.calls["release"] == 2
        successor = await task
    assert await lease.release() is False
    successor.check()
    assert not await is_free(other, "x")
    assert await successor.release() is True


async def test_release_that_never_arrives_raises_and_the_lease_expires(factory: MakeClient, locks: LocksView) -> None:
    """A release that never arrives is repeated, then raises; the lease is not renewed and expires."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=0.8).acquire()
    faulty.drop("release", 100)
    with pytest.raises(EngineUnavailable) as caught:
        await lease.release()
    assert caught.value.name == "x"
    assert faulty.calls["release"] > 1
    assert await lease.release() is False
    assert await take(factory.connect(), "x") > lease.token


@pytest.mark.client_side
async def test_release_that_the_engine_refuses_raises_at_once(factory: MakeClient, locks: LocksView) -> None:
    """A release that the engine refuses raises at once, with the name of the lock."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=0.8).acquire()
    faulty.refuse("release")
    with pytest.raises(EngineUnavailable) as caught:
        await lease.release()
    assert caught.value.name == "x"
    assert faulty.calls["release"] == 1
    assert await take(factory.connect(), "x") > lease.token


@pytest.mark.client_side
async def test_failed_release_does_not_mask_the_error_of_the_body(locks: LocksView) -> None:
    """The error of the body comes out although the release failed, too."""
    faulty = Faulty.around(locks)
    faulty.refuse("release", 1)
    with pytest.raises(ZeroDivisionError):
        async with locks.lock("x"):
            raise ZeroDivisionError


@pytest.mark.client_side
@pytest.mark.parametrize("fault", ["refuse", "drop"])
async def test_leaving_a_block_only_logs_a_failed_release(
    factory: MakeClient, locks: LocksView, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaving a block only logs a failed release, as the work is done; the client releases the lock later."""
    faulty = Faulty.around(locks)
    async with locks.lock("x", ttl=60) as lease:
        getattr(faulty, fault)("release", 100)
    (record,) = [each for each in caplog.records if "could not be released" in each.message]
    assert (record.levelname, record.name) == ("WARNING", "fencelock.lease")
    assert (record.lock, record.token) == ("x", lease.token)  # type: ignore[attr-defined]
    await wait_until_unclaimed(factory.connect(), "x")


@pytest.mark.client_side
async def test_release_that_fails_raises_release_failed(factory: MakeClient, locks: LocksView) -> None:
    """An explicit release without a reply raises ReleaseFailed, and the client goes on trying."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=60).acquire()
    faulty.refuse("release", 100)
    with pytest.raises(ReleaseFailed, match="'x' could not be released"):
        await lease.release()
    assert not await lease.release()
    await wait_until_unclaimed(factory.connect(), "x")


async def test_expired_lease_is_abandoned(factory: MakeClient, locks: LocksView) -> None:
    """The client abandons a lease that expired after a renewal without a reply, so the next holder need not wait for it."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=1.5).acquire()
    faulty.lose("renew", 1000)
    faulty.refuse("abandon", 2)
    assert await lease.lost.wait(SOON)

    async def abandoned() -> bool:
        return bool(faulty.answers["abandon"])

    await eventually(abandoned, "the claim is abandoned")
    assert await is_free(factory.connect(), "x")


@pytest.mark.parametrize("timeout", [0, 0.2])
async def test_grant_after_the_timeout_is_given_back(factory: MakeClient, locks: LocksView, timeout: float) -> None:
    """An acquire whose process was stopped until after its timeout gives the late grant back."""
    await take(locks, "x")
    faulty = Faulty.around(locks)
    faulty.slow("attempt", 1, timeout + 1)
    with pytest.raises(LockTimeout):
        await locks.lock("x", ttl=60).acquire(timeout)
    assert [type(answer) for answer in faulty.answers["attempt"]] == [Grant]
    await wait_until_unclaimed(factory.connect(), "x")


@pytest.mark.client_side
async def test_close_releases_the_others_if_one_release_fails(factory: MakeClient) -> None:
    """If one lock cannot be released, close() still releases the others."""
    locks = factory.connect()
    faulty = Faulty.around(locks)
    leases = [await locks.lock(name, ttl=60).acquire() for name in ("a", "bad", "c")]
    real = faulty.release

    async def release(grant: Grant) -> bool:
        if grant.claim.name == "bad":
            raise KeyError("a bug")
        return await real(grant)

    faulty.release = release  # type: ignore[method-assign]
    await locks.close()
    assert all(lease.reason is LossReason.CLOSED for lease in leases)
    others = factory.connect()
    assert await is_free(others, "a")
    assert await is_free(others, "c")


@pytest.mark.client_side
async def test_begin_and_end_of_an_outage_are_logged(locks: LocksView, caplog: pytest.LogCaptureFixture) -> None:
    """The first failed renewal is logged as a warning with the remaining time, and the end of the outage as info."""
    caplog.set_level("INFO", "fencelock")
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=1.5).acquire()
    faulty.refuse("renew", 3)
    await renewed(lease)

    async def logged() -> bool:
        return len([each for each in caplog.records if each.name == "fencelock.renewer"]) == 2

    await eventually(logged, "both were logged")
    began, ended = (each for each in caplog.records if each.name == "fencelock.renewer")
    assert (began.levelname, ended.levelname) == ("WARNING", "INFO")
    assert began.lock == "x"  # type: ignore[attr-defined]
    assert 0 < began.remaining < lease.ttl  # type: ignore[attr-defined]
    await lease.release()


@pytest.mark.client_side
async def test_second_outage_is_logged_after_a_loss(locks: LocksView, caplog: pytest.LogCaptureFixture) -> None:
    """An outage that cost a lease does not hide the next outage, and is not named as the reason of a later loss."""
    faulty = Faulty.around(locks)

    async def lose_one() -> None:
        lease = await locks.lock("x", ttl=0.9).acquire()
        faulty.refuse("renew", 100)
        assert await lease.lost.wait(SOON)
        faulty.heal()

    await lose_one()
    await lose_one()
    quiet = await locks.lock("y", ttl=0.4, renew=False).acquire()
    assert await quiet.lost.wait(SOON)
    with pytest.raises(LeaseLost, match="could be renewed; others"):
        quiet.check()
    failed = [each for each in caplog.records if each.name == "fencelock.renewer" and each.levelname == "WARNING"]
    assert len(failed) == 2


@pytest.mark.client_side
async def test_log_handler_that_fails_does_not_stop_the_renewer(factory: MakeClient) -> None:
    """If a log handler fails, the loss is still reported and the other lease is still renewed."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the log server is down")

    losses: list[str] = []
    locks = factory.connect(on_lost=lambda lease, _: losses.append(lease.name))
    handler = Broken()
    logging.getLogger("fencelock").addHandler(handler)
    try:
        short = await locks.lock("short", ttl=0.4, renew=False).acquire()
        kept = await locks.lock("kept", ttl=0.9).acquire()
        assert await short.lost.wait(SOON)
        await assert_notified_once(losses)
        await renewed(kept, 2)
        await kept.release()
    finally:
        logging.getLogger("fencelock").removeHandler(handler)


@pytest.mark.client_side
async def test_each_loss_is_logged_with_its_reason(locks: LocksView, caplog: pytest.LogCaptureFixture) -> None:
    """Each lost lease is logged as a warning with its reason."""
    lease = await locks.lock("x", ttl=0.4, renew=False).acquire()
    assert await lease.lost.wait(SOON)

    async def logged() -> bool:
        return bool(caplog.records)

    await eventually(logged, "the loss is logged")
    (record,) = [each for each in caplog.records if each.name == "fencelock.lease"]
    assert (record.levelname, record.lock, record.reason) == ("WARNING", "x", "expired")  # type: ignore[attr-defined]


async def test_grant_after_its_deadline_is_undone_and_repeated(
    factory: MakeClient, locks: LocksView, ttl_scale: TtlScale
) -> None:
    """A grant whose reply comes after its own deadline is undone, and the loop acquires again."""
    faulty = Faulty.around(locks)
    faulty.slow("attempt", 1, ttl_scale(0.8))
    lease = await locks.lock("x", ttl=0.6).acquire()
    late, good = faulty.answers["attempt"]
    assert lease.token == good.token > late.token
    assert good.claim.id != late.claim.id
    assert lease.remaining > lease.ttl / 3
    assert len((await factory.connect().inspect("x")).holders) == 1
    await lease.release()


async def test_grant_late_in_its_ttl_is_renewed_first(locks: LocksView) -> None:
    """A grant whose reply comes late in its ttl is renewed once before acquire returns it."""
    faulty = Faulty.around(locks)
    faulty.slow("attempt", 1, 2)
    lease = await locks.lock("x", ttl=5).acquire()
    assert faulty.calls["renew"] == 1
    assert lease.remaining > lease.ttl * 0.75
    await lease.release()


@pytest.mark.parametrize("fault", ["lose", "refuse", "drop"])
async def test_late_grant_that_cannot_be_renewed_is_undone(locks: LocksView, fault: str) -> None:
    """If the renewal of a late grant gets no RENEWED, the grant is undone, and the loop acquires again."""
    faulty = Faulty.around(locks)
    faulty.slow("attempt", 1, 0.8)
    getattr(faulty, fault)("renew")
    lease = await locks.lock("x", ttl=2).acquire()
    assert lease.token == faulty.answers["attempt"][-1].token > faulty.answers["attempt"][0].token
    assert len((await locks.inspect("x")).holders) == 1
    await lease.release()


@pytest.mark.client_side
async def test_failed_renewal_is_retried_soon(locks: LocksView) -> None:
    """A renewal that fails is tried again soon, and the lease is kept."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=3).acquire()
    faulty.refuse("renew")
    faulty.lose("renew", 2)
    await renewed(lease)
    assert faulty.calls["renew"] >= 4
    await lease.release()


async def test_lease_is_lost_at_its_deadline_if_no_renewal_succeeds(factory: MakeClient) -> None:
    """If no renewal succeeds, the lease is lost at its deadline, before another client can get the lock."""
    losses: list[tuple[int, LossReason]] = []
    locks = factory.connect(on_lost=lambda lease, reason: losses.append((lease.token, reason)))
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=0.9).acquire()
    faulty.refuse("renew", 1000)
    successor = await factory.connect().lock("x").acquire(SOON)
    assert lease.lost.is_set()
    assert lease.reason is LossReason.EXPIRED
    await assert_notified_once(losses)
    assert losses == [(lease.token, LossReason.EXPIRED)]
    assert faulty.calls["renew"] >= 2
    with pytest.raises(LeaseLost):
        lease.check()
    await successor.release()


@pytest.mark.client_side
async def test_renewal_that_hangs_delays_nothing_else(factory: MakeClient, ttl_scale: TtlScale) -> None:
    """A renewal that hangs delays neither the report of the loss nor the renewal of another lease."""
    losses: list[tuple[str, LossReason]] = []
    locks = factory.connect(on_lost=lambda lease, reason: losses.append((lease.name, reason)))
    faulty = Faulty.around(locks)
    hung = await locks.lock("hung", ttl=0.8).acquire()
    faulty.slow("renew", 1, ttl_scale(1.8))

    async def hangs() -> bool:
        return faulty.calls["renew"] == 1

    await eventually(hangs, "the renewal is under way")
    other = await locks.lock("other", ttl=0.8).acquire()
    await renewed(other)
    assert await hung.lost.wait(SOON)
    await assert_notified_once(losses)
    assert losses == [("hung", LossReason.EXPIRED)]
    await renewed(other)
    await other.release()


async def test_renewal_answered_after_the_deadline_does_not_revive_the_lease(
    locks: LocksView, ttl_scale: TtlScale
) -> None:
    """A renewal that is answered after the deadline does not bring the lease back."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=0.5).acquire()
    faulty.slow("renew", 1, ttl_scale(0.6))
    assert await lease.lost.wait(SOON)
    await ttl_scale.sleep(0.5)
    assert lease.reason is LossReason.EXPIRED
    assert lease.remaining == 0


@pytest.mark.client_side
async def test_renew_without_a_reply_does_not_move_the_deadline(locks: LocksView) -> None:
    """`renew()` without a reply raises, the deadline does not move, and a lease with renew=False is not renewed later."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=0.6, renew=False).acquire()
    so_far = faulty.calls["renew"]  # one, if the answer took so long that the loop renewed the grant
    faulty.drop("renew")
    before = lease.remaining
    with pytest.raises(EngineUnavailable) as caught:
        await lease.renew()
    assert caught.value.name == "x"
    assert lease.remaining < before
    assert await lease.lost.wait(SOON)
    assert faulty.calls["renew"] == so_far + 1


@pytest.mark.client_side
async def test_unknown_renewal_by_hand_does_not_start_the_renewer(locks: LocksView) -> None:
    """An UNKNOWN reply to `renew()` of a lease with renew=False does not make the renewer renew it."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=0.6, renew=False).acquire()
    real, calls = faulty.inner.renew, []

    async def unknown(grants: Any) -> list[Renewal]:
        calls.append(len(grants))
        return [Renewal.UNKNOWN] * len(grants)

    faulty.renew = unknown  # type: ignore[method-assign]
    with pytest.raises(EngineUnavailable, match="not answered"):
        await lease.renew()
    faulty.renew = real  # type: ignore[method-assign]
    assert await lease.lost.wait(SOON)
    assert calls == [1]


@pytest.mark.client_side
async def test_bug_of_an_engine_in_a_renewal_is_logged_and_retried(
    locks: LocksView, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected error of an engine in a renewal is logged and the renewal tried again; the renewer continues."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=0.9).acquire()
    real, failures = faulty.renew, list[int]()

    async def broken(grants: Any) -> list[Renewal]:
        if len(failures) < 2:
            failures.append(1)
            raise KeyError("a bug")
        return await real(grants)

    faulty.renew = broken  # type: ignore[method-assign]
    await renewed(lease)
    assert len(failures) == 2
    assert "a renewal failed unexpectedly" in caplog.text
    await lease.release()


@pytest.mark.client_side
async def test_waiter_times_out_in_time_while_the_engine_is_down(factory: MakeClient, locks: LocksView) -> None:
    """A waiter whose timeout ends during an outage returns in time."""
    async with factory.connect().lock("x"):
        faulty = Faulty.around(locks)
        faulty.refuse("wait", 1000)
        faulty.refuse("abandon", 1)
        begun = time.monotonic()
        with pytest.raises((EngineUnavailable, LockTimeout)):
            await locks.lock("x", ttl=30).acquire(timeout=0.3)
        assert time.monotonic() - begun < SOON
    await wait_until_unclaimed(factory.connect(), "x")


async def test_two_attempts_of_one_claim_give_one_grant(factory: MakeClient) -> None:
    """Two attempts of one claim give one grant with one token, and the second restarts its ttl."""
    engine = factory.engine()
    claim = Claim("x", 30)
    first = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    again = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(first, Grant)
    assert isinstance(again, Grant)
    assert first.token == again.token
    assert again.since > first.since
    assert len((await engine.inspect("x")).holders) == 1
    assert await engine.release(again) is True
    assert await engine.release(first) is False


async def test_repeated_attempt_keeps_one_queue_entry(factory: MakeClient) -> None:
    """Two attempts of one claim on a held lock give one queue entry."""
    engine = factory.engine()
    holder, claim = Claim("x", 30), Claim("x", 30)
    assert isinstance(await engine.attempt(holder, enqueue=True, deadline=NO_DEADLINE), Grant)
    for _ in range(2):
        assert isinstance(await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE), Waiting)
    assert len((await engine.inspect("x")).waiters) == 1
    assert isinstance(await engine.attempt(claim, enqueue=False, deadline=NO_DEADLINE), Waiting)
    assert (await engine.inspect("x")).waiters == ()
    await engine.abandon(holder)


async def test_abandon_removes_the_claim_and_no_other(factory: MakeClient) -> None:
    """`abandon` of the engine removes a queued or granted claim, may be repeated, and removes no other claim."""
    engine = factory.engine()
    holder, waiter = Claim("x", 30), Claim("x", 30)
    await engine.abandon(holder)
    held = Claim("x", 30)
    assert isinstance(await engine.attempt(held, enqueue=True, deadline=NO_DEADLINE), Grant)
    assert isinstance(await engine.attempt(waiter, enqueue=True, deadline=NO_DEADLINE), Waiting)
    for _ in range(2):
        await engine.abandon(waiter)
    assert (await engine.inspect("x")).waiters == ()
    for _ in range(2):
        await engine.abandon(held)
    assert isinstance(await engine.attempt(Claim("x", 30), enqueue=False, deadline=NO_DEADLINE), Grant)
    await engine.abandon(held)
    assert len((await engine.inspect("x")).holders) == 1


@pytest.mark.client_side
async def test_release_overtaken_by_close_raises_no_lease_lost(factory: MakeClient) -> None:
    """A holder that releases while its client is being closed gets no LeaseLost."""
    losses: list[LossReason] = []
    locks = factory.connect(on_lost=lambda lease, reason: losses.append(reason))
    lease = await locks.lock("x", ttl=30).acquire()
    faulty = Faulty.around(locks)
    faulty.late("release", 1, 0.3)
    faulty.slow("abandon", 1, 1.0)

    async def release() -> None:
        await lease.release()

    async with background(release()) as (releasing,):

        async def in_flight() -> bool:
            return bool(faulty.calls["release"])

        await eventually(in_flight, "the release is under way")
        await locks.close()
        await releasing
    assert faulty.answers["release"] == [False]
    assert lease.reason is None
    assert not losses


async def test_release_and_renewal_under_another_id_do_nothing(factory: MakeClient) -> None:
    """`release` and `renew` of the engine do nothing under another claim's id."""
    engine = factory.engine()
    grant = await engine.attempt(Claim("x", 30), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    stranger = Grant(Claim("x", 30), grant.token, grant.since, grant.engine_state)
    assert await engine.release(stranger) is False
    assert await engine.renew([stranger, grant]) == [Renewal.LOST, Renewal.RENEWED]
    assert len((await engine.inspect("x")).holders) == 1


@pytest.mark.client_side
def test_outcome_unknown_is_an_engine_unavailable() -> None:
    """OutcomeUnknown is an EngineUnavailable, so callers need to catch one error only."""
    assert issubclass(OutcomeUnknown, EngineUnavailable)
    assert issubclass(EngineUnavailable, ConnectionError)
