"""Messages that are lost, late or refused: around the real engine, so that what it did is real."""

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
from tests.contract.factory import ClientFactory
from tests.contract.faults import Faulty
from tests.contract.runtimes import LocksView
from tests.contract.steps import assert_notified_once, background, is_free, renewed, take, wait_until_unclaimed, waiting
from tests.contract.ttl_scale import TtlScale
from tests.support.waiting import SOON, eventually


async def test_grant_whose_answer_is_lost(locks: LocksView) -> None:
    """An acquire that was granted but not answered is found again: one grant, one token."""
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


async def test_grant_whose_answer_is_lost_counts_from_the_first_request(locks: LocksView) -> None:
    """The lease after a lost answer never trusts more than the first request allows."""
    faulty = Faulty.around(locks)
    faulty.lose("attempt", 3)
    begun = time.monotonic()
    lease = await locks.lock("x", ttl=10).acquire()
    assert lease.remaining <= 10 - (time.monotonic() - begun) + 0.001
    await lease.release()


async def test_try_acquire_whose_answer_is_lost(factory: ClientFactory, locks: LocksView) -> None:
    """A single try that gets no answer, and none to its repetition, raises and is undone."""
    faulty = Faulty.around(locks)
    faulty.lose("attempt", 2)
    with pytest.raises(EngineUnavailable) as caught:
        await locks.lock("x").try_acquire()
    assert caught.value.name == "x"
    assert await is_free(factory.connect(), "x")


async def test_request_that_never_arrives(locks: LocksView) -> None:
    """Requests that are lost on their way are repeated."""
    faulty = Faulty.around(locks)
    faulty.drop("attempt", 2)
    async with locks.lock("x"):
        assert faulty.calls["attempt"] == 3


@pytest.mark.client_side
async def test_engine_down_at_first(locks: LocksView) -> None:
    """An engine that refuses the very first request is reported at once, and nobody tries to undo what never was."""
    faulty = Faulty.around(locks)
    faulty.refuse("attempt", 100)
    with pytest.raises(EngineUnavailable) as caught:
        await locks.lock("x").acquire()
    assert caught.value.name == "x"
    assert faulty.calls == {"attempt": 1}


async def test_engine_down_while_waiting(factory: ClientFactory, locks: LocksView) -> None:
    """A waiter sits out an engine that is down for a moment, and keeps its place."""
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


async def test_engine_down_for_good_while_waiting(factory: ClientFactory, locks: LocksView) -> None:
    """A waiter gives up with EngineUnavailable once its queue entry must have expired."""
    async with factory.connect().lock("x"):
        faulty = Faulty.around(locks)
        async with background(locks.lock("x", ttl=0.5).acquire()) as (task,):
            await waiting(locks, "x")
            faulty.refuse("wait", 1000)
            faulty.refuse("attempt", 1000)
            with pytest.raises(EngineUnavailable):
                await asyncio.wait_for(task, SOON)


async def test_answer_to_a_wait_is_lost(factory: ClientFactory, locks: LocksView) -> None:
    """A hand-over whose answer is lost is found again under the same token."""
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


async def test_release_whose_answer_is_lost(factory: ClientFactory, locks: LocksView) -> None:
    """A release that was done but not answered is repeated, and never frees a successor."""
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


async def test_release_that_never_arrives(factory: ClientFactory, locks: LocksView) -> None:
    """A release that is not answered is retried, then reported; the lease runs out by itself and is not renewed."""
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
async def test_release_that_is_refused(factory: ClientFactory, locks: LocksView) -> None:
    """A release that the engine refuses is reported at once, with the name."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=0.8).acquire()
    faulty.refuse("release")
    with pytest.raises(EngineUnavailable) as caught:
        await lease.release()
    assert caught.value.name == "x"
    assert faulty.calls["release"] == 1
    assert await take(factory.connect(), "x") > lease.token


@pytest.mark.client_side
async def test_release_error_does_not_mask_the_body(locks: LocksView) -> None:
    """The body's error comes out although the release failed, too."""
    faulty = Faulty.around(locks)
    faulty.refuse("release", 1)
    with pytest.raises(ZeroDivisionError):
        async with locks.lock("x"):
            raise ZeroDivisionError


@pytest.mark.client_side
@pytest.mark.parametrize("fault", ["refuse", "drop"])
async def test_leaving_a_block_only_logs_a_failed_release(
    factory: ClientFactory, locks: LocksView, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The body's work is done: an error would look like a failed acquire. The client releases the lock later."""
    faulty = Faulty.around(locks)
    async with locks.lock("x", ttl=60) as lease:
        getattr(faulty, fault)("release", 100)
    (record,) = [each for each in caplog.records if "could not be released" in each.message]
    assert (record.levelname, record.name) == ("WARNING", "fencelock.lease")
    assert (record.lock, record.token) == ("x", lease.token)  # type: ignore[attr-defined]
    await wait_until_unclaimed(factory.connect(), "x")


@pytest.mark.client_side
async def test_release_that_fails_raises_release_failed(factory: ClientFactory, locks: LocksView) -> None:
    """An explicit release without a reply is an error of its own kind, and the client goes on with it."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=60).acquire()
    faulty.refuse("release", 100)
    with pytest.raises(ReleaseFailed, match="'x' could not be released"):
        await lease.release()
    assert not await lease.release()
    await wait_until_unclaimed(factory.connect(), "x")


async def test_expired_lease_is_abandoned(factory: ClientFactory, locks: LocksView) -> None:
    """A renewal that the engine applied, and whose reply was lost, does not keep the next holder waiting."""
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
async def test_grant_after_the_timeout_is_given_back(factory: ClientFactory, locks: LocksView, timeout: float) -> None:
    """A process that was stopped during acquire, and goes on after its timeout, does not hold the lock."""
    await take(locks, "x")
    faulty = Faulty.around(locks)
    faulty.slow("attempt", 1, timeout + 1)
    with pytest.raises(LockTimeout):
        await locks.lock("x", ttl=60).acquire(timeout)
    assert [type(answer) for answer in faulty.answers["attempt"]] == [Grant]
    await wait_until_unclaimed(factory.connect(), "x")


@pytest.mark.client_side
async def test_close_releases_all_but_the_bad_lock(factory: ClientFactory) -> None:
    """One lock that cannot be released does not keep the others from being released."""
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
async def test_outage_is_logged(locks: LocksView, caplog: pytest.LogCaptureFixture) -> None:
    """The first failed renewal is a warning with the time that is left, the end of the outage is worth an info."""
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
    """An outage that cost a lease does not hide the next one, and is not the reason of a later loss."""
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
async def test_log_handler_that_fails_does_not_stop_the_renewer(factory: ClientFactory) -> None:
    """The loss of one lease cannot be logged: it is reported all the same, and the other lease is renewed."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the log server is down")

    told: list[str] = []
    locks = factory.connect(on_lost=lambda lease, _: told.append(lease.name))
    handler = Broken()
    logging.getLogger("fencelock").addHandler(handler)
    try:
        short = await locks.lock("short", ttl=0.4, renew=False).acquire()
        kept = await locks.lock("kept", ttl=0.9).acquire()
        assert await short.lost.wait(SOON)
        await assert_notified_once(told)
        await renewed(kept, 2)
        await kept.release()
    finally:
        logging.getLogger("fencelock").removeHandler(handler)


@pytest.mark.client_side
async def test_loss_is_logged(locks: LocksView, caplog: pytest.LogCaptureFixture) -> None:
    """Each lost lease is a warning with its reason."""
    lease = await locks.lock("x", ttl=0.4, renew=False).acquire()
    assert await lease.lost.wait(SOON)

    async def logged() -> bool:
        return bool(caplog.records)

    await eventually(logged, "the loss is logged")
    (record,) = [each for each in caplog.records if each.name == "fencelock.lease"]
    assert (record.levelname, record.lock, record.reason) == ("WARNING", "x", "expired")  # type: ignore[attr-defined]


async def test_answer_after_the_deadline(factory: ClientFactory, locks: LocksView, ttl_scale: TtlScale) -> None:
    """A grant that is answered after its own deadline is no grant: it is undone, and another one made."""
    faulty = Faulty.around(locks)
    faulty.slow("attempt", 1, ttl_scale(0.8))
    lease = await locks.lock("x", ttl=0.6).acquire()
    late, good = faulty.answers["attempt"]
    assert lease.token == good.token > late.token
    assert good.claim.id != late.claim.id
    assert lease.remaining > lease.ttl / 3
    assert len((await factory.connect().inspect("x")).holders) == 1
    await lease.release()


async def test_answer_late_in_the_ttl(locks: LocksView) -> None:
    """A grant of which much of the ttl is gone when it is answered is renewed once before it is believed."""
    faulty = Faulty.around(locks)
    faulty.slow("attempt", 1, 2)
    lease = await locks.lock("x", ttl=5).acquire()
    assert faulty.calls["renew"] == 1
    assert lease.remaining > lease.ttl * 0.75
    await lease.release()


@pytest.mark.parametrize("fault", ["lose", "refuse", "drop"])
async def test_late_answer_that_cannot_be_renewed(locks: LocksView, fault: str) -> None:
    """If that renewal is not answered, the grant is undone and another one made."""
    faulty = Faulty.around(locks)
    faulty.slow("attempt", 1, 0.8)
    getattr(faulty, fault)("renew")
    lease = await locks.lock("x", ttl=2).acquire()
    assert lease.token == faulty.answers["attempt"][-1].token > faulty.answers["attempt"][0].token
    assert len((await locks.inspect("x")).holders) == 1
    await lease.release()


@pytest.mark.client_side
async def test_one_renewal_fails(locks: LocksView) -> None:
    """A renewal that fails is tried again, soon, and the lease is kept."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=3).acquire()
    faulty.refuse("renew")
    faulty.lose("renew", 2)
    await renewed(lease)
    assert faulty.calls["renew"] >= 4
    await lease.release()


async def test_renewal_fails_until_the_deadline(factory: ClientFactory) -> None:
    """When no renewal succeeds the lease is lost at its deadline: told once, before anybody else can have it."""
    told: list[tuple[int, LossReason]] = []
    locks = factory.connect(on_lost=lambda lease, reason: told.append((lease.token, reason)))
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=0.9).acquire()
    faulty.refuse("renew", 1000)
    successor = await factory.connect().lock("x").acquire(SOON)
    assert lease.lost.is_set()
    assert lease.reason is LossReason.EXPIRED
    await assert_notified_once(told)
    assert told == [(lease.token, LossReason.EXPIRED)]
    assert faulty.calls["renew"] >= 2
    with pytest.raises(LeaseLost):
        lease.check()
    await successor.release()


@pytest.mark.client_side
async def test_renewal_that_hangs(factory: ClientFactory, ttl_scale: TtlScale) -> None:
    """A renewal that hangs delays neither the news of the loss nor the renewal of another lease."""
    told: list[tuple[str, LossReason]] = []
    locks = factory.connect(on_lost=lambda lease, reason: told.append((lease.name, reason)))
    faulty = Faulty.around(locks)
    hung = await locks.lock("hung", ttl=0.8).acquire()
    faulty.slow("renew", 1, ttl_scale(1.8))

    async def hangs() -> bool:
        return faulty.calls["renew"] == 1

    await eventually(hangs, "the renewal is under way")
    other = await locks.lock("other", ttl=0.8).acquire()
    await renewed(other)
    assert await hung.lost.wait(SOON)
    await assert_notified_once(told)
    assert told == [("hung", LossReason.EXPIRED)]
    await renewed(other)
    await other.release()


async def test_answer_to_a_renewal_after_the_deadline(locks: LocksView, ttl_scale: TtlScale) -> None:
    """A renewal that succeeds but is answered after the deadline does not bring the lease back."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=0.5).acquire()
    faulty.slow("renew", 1, ttl_scale(0.6))
    assert await lease.lost.wait(SOON)
    await ttl_scale.sleep(0.5)
    assert lease.reason is LossReason.EXPIRED
    assert lease.remaining == 0


@pytest.mark.client_side
async def test_renew_by_hand_fails(locks: LocksView) -> None:
    """`renew()` says that it was not answered; the deadline does not move, and renew=False stays what it is."""
    faulty = Faulty.around(locks)
    lease = await locks.lock("x", ttl=0.6, renew=False).acquire()
    so_far = faulty.calls["renew"]  # one, if the answer took so long that the grant had to be renewed
    faulty.drop("renew")
    before = lease.remaining
    with pytest.raises(EngineUnavailable) as caught:
        await lease.renew()
    assert caught.value.name == "x"
    assert lease.remaining < before
    assert await lease.lost.wait(SOON)
    assert faulty.calls["renew"] == so_far + 1


@pytest.mark.client_side
async def test_unknown_renewal_by_hand(locks: LocksView) -> None:
    """An engine that answers UNKNOWN to a renewal by hand does not make the renewer renew it."""
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
async def test_renewal_raises_what_it_never_should(locks: LocksView, caplog: pytest.LogCaptureFixture) -> None:
    """An engine's bug in a renewal is logged and tried again; the renewer continues."""
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
async def test_timeout_while_the_engine_is_down(factory: ClientFactory, locks: LocksView) -> None:
    """A waiter whose time is over while the engine is down gives up in time."""
    async with factory.connect().lock("x"):
        faulty = Faulty.around(locks)
        faulty.refuse("wait", 1000)
        faulty.refuse("abandon", 1)
        begun = time.monotonic()
        with pytest.raises((EngineUnavailable, LockTimeout)):
            await locks.lock("x", ttl=30).acquire(timeout=0.3)
        assert time.monotonic() - begun < SOON
    await wait_until_unclaimed(factory.connect(), "x")


async def test_attempt_twice(factory: ClientFactory) -> None:
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


async def test_repeated_attempt_keeps_one_queue_entry(factory: ClientFactory) -> None:
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


async def test_abandon(factory: ClientFactory) -> None:
    """On the engine itself: abandon gives back whichever it was, is idempotent, and frees nobody else's."""
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
async def test_release_that_a_close_overtakes(factory: ClientFactory) -> None:
    """Who gives a lease back while the client is being closed is not told of a loss: it was the close that let go first."""
    told: list[LossReason] = []
    locks = factory.connect(on_lost=lambda lease, reason: told.append(reason))
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
    assert not told


async def test_release_of_somebody_else(factory: ClientFactory) -> None:
    """On the engine itself: a release or a renewal under another id does nothing."""
    engine = factory.engine()
    grant = await engine.attempt(Claim("x", 30), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    stranger = Grant(Claim("x", 30), grant.token, grant.since, grant.engine_state)
    assert await engine.release(stranger) is False
    assert await engine.renew([stranger, grant]) == [Renewal.LOST, Renewal.RENEWED]
    assert len((await engine.inspect("x")).holders) == 1


@pytest.mark.client_side
def test_unanswered_is_unavailable() -> None:
    """What was not answered is a kind of unavailability: callers need to catch one error only."""
    assert issubclass(OutcomeUnknown, EngineUnavailable)
    assert issubclass(EngineUnavailable, ConnectionError)
