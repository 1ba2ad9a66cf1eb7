"""Single flight and cached functions: one builder in the fleet, and callers get a stale value without waiting."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencelock import BuildFailed, ClientClosed, InvalidArgument, InvalidName, InvalidType, LockTimeout, WouldDeadlock
from fencelock.errors import EngineUnavailable
from fencelock.primitives import single_flight
from fencelock.primitives.cached_values import cache_options
from fencelock.primitives.single_flight import SingleFlight
from fencelock.runtime.blocking import run_sync
from tests.contract.factory import MakeClient
from tests.contract.faults import Faulty
from tests.contract.runtimes import LocksView, client_of
from tests.contract.steps import background
from tests.support.waiting import SOON, eventually

pytestmark = pytest.mark.records


async def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of either API without blocking the event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


class Builder:
    """A build function of either API that counts its calls and waits until it may end."""

    def __init__(self, locks: LocksView, value: Any = "built", *, held: bool = False) -> None:
        self.calls = 0
        self.value = value
        self.error: Exception | None = None
        self._may_end = threading.Event()
        if not held:
            self._may_end.set()
        self.awaited = inspect.iscoroutinefunction(locks.raw.close)

    @property
    def function(self) -> Callable[[], Any]:
        return self._await if self.awaited else self._block

    def finish(self) -> None:
        self._may_end.set()

    def _block(self) -> Any:
        self.calls += 1
        assert self._may_end.wait(SOON)
        if self.error is not None:
            raise self.error
        return self.value

    async def _await(self) -> Any:
        self.calls += 1
        assert await asyncio.to_thread(self._may_end.wait, SOON)
        if self.error is not None:
            raise self.error
        return self.value

    async def began(self) -> bool:
        return self.calls > 0


def as_coroutine(builder: Builder) -> Callable[[], Awaitable[Any]]:
    """Return the build function as the core takes it."""

    async def build() -> Any:
        return await builder._await() if builder.awaited else builder._block()

    return build


async def get(locks: LocksView, builder: Builder, key: str = "k", **options: Any) -> Any:
    return await call(locks.raw.single_flight, key, builder.function, **{"ttl": 60, **options})


async def test_value_is_built_once_and_shared(factory: MakeClient) -> None:
    """A value that one client builds is returned to all clients while it is fresh."""
    one, two = factory.connect(), factory.connect()
    first, second = Builder(one, {"a": [1, None, "ü"]}), Builder(two)
    assert await get(one, first) == {"a": [1, None, "ü"]}
    assert await get(two, second) == {"a": [1, None, "ü"]}
    assert await get(one, second) == {"a": [1, None, "ü"]}
    assert (first.calls, second.calls) == (1, 0)
    assert await get(two, second, "other") == "built"


async def test_callers_of_two_clients_wait_for_one_builder(factory: MakeClient) -> None:
    """Callers of the same client and of another one wait, and all get the result of one build."""
    one, two = factory.connect(), factory.connect()
    builder, other = Builder(one, held=True), Builder(two)
    async with background(*(get(one, builder) for _ in range(4))) as same:
        await eventually(builder.began, "the build has begun")
        async with background(*(get(two, other) for _ in range(4))) as others:

            async def queued() -> bool:
                return bool((await one.inspect("cache:k")).waiters)

            await eventually(queued, "the other client waits")
            builder.finish()
            assert [await task for task in (*same, *others)] == ["built"] * 8
    assert (builder.calls, other.calls) == (1, 0)

    async def free() -> bool:
        return (await one.inspect("cache:k")).holders == ()

    await eventually(free, "nothing is held")


@pytest.mark.client_side
async def test_stale_reads_do_not_attempt_while_another_process_rebuilds(
    factory: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that finds another one rebuilding a stale value sends no attempt for its next reads, until a pause is over."""
    monkeypatch.setattr(single_flight, "RETRY_SECONDS", 600.0)
    one, two = factory.connect(), factory.connect()
    assert await get(one, Builder(one, "old"), ttl=0.3, stale=600) == "old"
    rebuild = Builder(one, "new", held=True)

    async def begun() -> bool:
        assert await get(one, rebuild, ttl=60, stale=600) == "old"
        return rebuild.calls > 0

    await eventually(begun, "the value is stale and the first client rebuilds it")
    client = two.raw._client

    async def found_out() -> bool:
        assert await get(two, rebuild, ttl=60, stale=600) == "old"
        return bool(client.rebuild_retries) and not client.flights

    await eventually(found_out, "the second client has found that out")
    monkeypatch.setattr(client, "acquire", None)  # an attempt would raise, in the background, and be logged
    for _ in range(20):
        assert await get(two, rebuild, ttl=60, stale=600) == "old"
        assert not client.flights
    monkeypatch.undo()
    rebuild.finish()

    async def rebuilt() -> bool:
        return bool(await get(two, rebuild, ttl=60, stale=600) == "new")

    await eventually(rebuilt, "the new value is there")
    assert rebuild.calls == 1


async def test_stale_value_is_returned_at_once_and_rebuilt_once(factory: MakeClient) -> None:
    """Between ttl and ttl + stale, callers get the old value at once, and one of them rebuilds it in the background."""
    one, two = factory.connect(), factory.connect()
    assert await get(one, Builder(one, "old"), ttl=0.3, stale=600) == "old"
    rebuild = Builder(one, "new", held=True)

    async def begun() -> bool:
        assert await get(one, rebuild, ttl=60, stale=600) == "old"
        assert await get(two, rebuild, ttl=60, stale=600) == "old"
        return rebuild.calls > 0

    await eventually(begun, "the value is stale and the rebuild has begun")
    for _ in range(3):
        assert await get(two, rebuild, ttl=60, stale=600) == "old"
    rebuild.finish()

    async def rebuilt() -> bool:
        return bool(await get(two, rebuild, ttl=60, stale=600) == "new")

    await eventually(rebuilt, "the new value is there")
    assert rebuild.calls == 1


async def test_failed_build_is_remembered_for_a_while(factory: MakeClient) -> None:
    """The builder raises the original error, other clients BuildFailed; after `error_for` one of them builds again."""
    one, two = factory.connect(), factory.connect()
    failing = Builder(one)
    failing.error = ValueError("no such report")
    with pytest.raises(ValueError, match="no such report"):
        await get(one, failing, error_for=600)
    other = Builder(two)
    with pytest.raises(BuildFailed, match="no such report") as caught:
        await get(two, other, error_for=600)
    assert (caught.value.name, caught.value.type, caught.value.message) == ("k", "ValueError", "no such report")
    assert other.calls == 0
    again = Builder(one)
    again.error = ValueError("short")
    with pytest.raises(ValueError, match="short"):
        await get(one, again, "k2", error_for=0)
    assert await get(two, other, "k2") == "built"


async def test_waiters_get_the_error_of_a_failed_build(factory: MakeClient) -> None:
    """Callers that wait for a build that fails get its error, and none of them builds again."""
    one, two = factory.connect(), factory.connect()
    failing, other = Builder(one, held=True), Builder(two)
    failing.error = ValueError("broken")
    async with background(get(one, failing, error_for=600)) as (building,):
        await eventually(failing.began, "the build has begun")
        async with background(get(two, other, error_for=600)) as (waiting,):

            async def queued() -> bool:
                return bool((await one.inspect("cache:k")).waiters)

            await eventually(queued, "the other client waits")
            failing.finish()
            with pytest.raises(BuildFailed, match="broken"):
                await waiting
        with pytest.raises(ValueError, match="broken"):
            await building
    assert other.calls == 0


@pytest.mark.client_side
async def test_failed_rebuild_leaves_the_stale_value(locks: LocksView) -> None:
    """A failed rebuild in the background is logged, and callers still get the old value."""
    assert await get(locks, Builder(locks, "old"), ttl=0.3, stale=600) == "old"
    failing = Builder(locks)
    failing.error = ValueError("broken")

    async def tried() -> bool:
        assert await get(locks, failing, ttl=60, stale=600, error_for=600) == "old"
        return failing.calls > 0

    await eventually(tried, "the rebuild has failed")
    for _ in range(3):
        assert await get(locks, failing, ttl=60, stale=600, error_for=600) == "old"


async def test_caller_times_out_while_another_client_builds(factory: MakeClient) -> None:
    """A caller that waits for longer than its timeout raises LockTimeout, and the build continues."""
    one, two = factory.connect(), factory.connect()
    builder = Builder(one, held=True)
    async with background(get(one, builder)) as (building,):
        await eventually(builder.began, "the build has begun")
        with pytest.raises(LockTimeout, match="k"):
            await get(two, Builder(two), timeout=0.2)
        with pytest.raises(LockTimeout, match="k"):
            await get(one, Builder(one), timeout=0.2)
        builder.finish()
        assert await building == "built"


@pytest.mark.client_side
@pytest.mark.runtime_name("aio")
async def test_cancelled_caller_does_not_affect_the_others(factory: MakeClient) -> None:
    """When the caller that started the build is cancelled, the others still get the result."""
    locks = factory.connect()
    builder = Builder(locks, held=True)
    first = asyncio.create_task(get(locks, builder))
    await eventually(builder.began, "the build has begun")
    second = asyncio.create_task(get(locks, builder))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    builder.finish()
    assert await second == "built"
    assert builder.calls == 1


@pytest.mark.client_side
async def test_build_that_needs_its_own_value_raises(locks: LocksView) -> None:
    """A build that asks for its own value gets an error instead of waiting for itself."""
    if inspect.iscoroutinefunction(locks.raw.close):

        async def build_again() -> Any:
            return await locks.raw.single_flight("k", build_again, ttl=60)

        with pytest.raises(WouldDeadlock, match="'k'"):
            await locks.raw.single_flight("k", build_again, ttl=60)
    else:

        def build() -> Any:
            return locks.raw.single_flight("k", build, ttl=60)

        with pytest.raises(WouldDeadlock, match="'k'"):
            await asyncio.to_thread(locks.raw.single_flight, "k", build, ttl=60)


@pytest.mark.client_side
async def test_builds_that_need_each_other_raise(locks: LocksView) -> None:
    """Two builds that ask for each other's value get an error instead of waiting for ever."""
    if inspect.iscoroutinefunction(locks.raw.close):

        async def build_a_again() -> Any:
            return await locks.raw.single_flight("b", build_b_again, ttl=60, error_for=0)

        async def build_b_again() -> Any:
            return await locks.raw.single_flight("a", build_a_again, ttl=60, error_for=0)

        with pytest.raises(WouldDeadlock, match="'a'"):
            await asyncio.wait_for(locks.raw.single_flight("a", build_a_again, ttl=60, error_for=0), SOON)
    else:

        def build_a() -> Any:
            return locks.raw.single_flight("b", build_b, ttl=60, error_for=0)

        def build_b() -> Any:
            return locks.raw.single_flight("a", build_a, ttl=60, error_for=0)

        with pytest.raises(WouldDeadlock, match="'a'"):
            await asyncio.to_thread(locks.raw.single_flight, "a", build_a, ttl=60, error_for=0)
    assert not client_of(locks).flights


@pytest.mark.client_side
async def test_refresh_does_not_join_a_build_that_began_before_it(locks: LocksView) -> None:
    """`refresh` calls the function again although a build is running: that build may have read older data."""
    old, new = Builder(locks, "old", held=True), Builder(locks, "new")
    refresh = SingleFlight(
        client_of(locks), "k", as_coroutine(new), cache_options("single_flight", "k", {"ttl": 60})
    ).refresh
    async with background(get(locks, old)) as (building,):
        await eventually(old.began, "the first build has begun")
        run = refresh() if old.awaited else asyncio.to_thread(run_sync, refresh())
        async with background(run) as (refreshing,):
            old.finish()
            assert (await building, await refreshing) == ("old", "new")
    assert await get(locks, Builder(locks, "third")) == "new"


@pytest.mark.client_side
@pytest.mark.runtime_name("aio")
async def test_close_during_a_build_raises_client_closed(factory: MakeClient) -> None:
    """A caller whose client is closed during the build gets ClientClosed, not CancelledError."""
    locks = factory.connect()
    builder = Builder(locks, held=True)
    async with background(get(locks, builder), get(locks, builder)) as tasks:
        await eventually(builder.began, "the build has begun")
        await locks.close()
        builder.finish()
        for task in tasks:
            with pytest.raises(ClientClosed):
                await task


@pytest.mark.client_side
async def test_interrupted_build_does_not_block_its_key(locks: LocksView) -> None:
    """After a build was interrupted by KeyboardInterrupt, the next caller builds."""
    builder = Builder(locks)
    builder.error = KeyboardInterrupt()  # type: ignore[assignment]
    if builder.awaited:
        builder.error = asyncio.CancelledError()  # type: ignore[assignment]
    with pytest.raises((KeyboardInterrupt, BuildFailed)):
        await get(locks, builder)
    assert not client_of(locks).flights
    assert await get(locks, Builder(locks, "next")) == "next"


async def test_late_store_of_a_builder_that_lost_its_lock_is_refused(factory: MakeClient) -> None:
    """A builder whose lock was released by force does not overwrite the value of the next builder, and returns that value."""
    one, two = factory.connect(), factory.connect()
    late = Builder(one, "late", held=True)
    async with background(get(one, late)) as (building,):
        await eventually(late.began, "the build has begun")
        await two.force_release("cache:k", reason="test")
        assert await get(two, Builder(two, "newer")) == "newer"
        late.finish()
        assert await building in ("late", "newer")
    assert await get(two, Builder(two, "third")) == "newer"


async def test_invalidated_value_is_built_again(factory: MakeClient) -> None:
    """An invalidated value is built again, and a build that began before the invalidation is not stored."""
    one, two = factory.connect(), factory.connect()
    assert await get(one, Builder(one, "old")) == "old"
    await call(two.raw.invalidate, "k")
    slow = Builder(one, "outdated", held=True)
    async with background(get(one, slow)) as (building,):
        await eventually(slow.began, "the build has begun")
        await call(two.raw.invalidate, "k")
        slow.finish()
        assert await building == "outdated"
    assert await get(two, Builder(two, "new")) == "new"
    assert await get(one, Builder(one, "newer")) == "new"


@pytest.mark.client_side
async def test_value_that_cannot_be_stored_raises(locks: LocksView) -> None:
    """A value that is too large or cannot be encoded raises an error, and nothing is stored."""
    with pytest.raises(InvalidArgument, match="300002 bytes"):
        await get(locks, Builder(locks, "x" * 300_000), error_for=0)
    with pytest.raises(
        InvalidType, match=r"^'k': the codec cannot encode a value of type object: .*pass codec="
    ) as info:
        await get(locks, Builder(locks, object()), error_for=0)
    assert type(info.value.__cause__) is TypeError
    assert await get(locks, Builder(locks, "small")) == "small"
    assert await get(locks, Builder(locks, {1, 2}), "set", codec=pickle) == {1, 2}
    assert await get(locks, Builder(locks), "set", codec=pickle) == {1, 2}


@pytest.mark.client_side
async def test_builder_gets_the_decoded_value(locks: LocksView) -> None:
    """The builder gets its value as the codec decodes it, as every later caller does."""
    builder = Builder(locks, {"pair": (1, 2), 3: None})
    for _ in range(2):
        assert await get(locks, builder) == {"pair": [1, 2], "3": None}
    assert builder.calls == 1


@pytest.mark.client_side
async def test_cached_function_is_called_once_for_each_key(locks: LocksView) -> None:
    """A cached function is called once for each key; `invalidate` and `refresh` take the arguments of a call."""
    calls: list[int] = []
    if inspect.iscoroutinefunction(locks.raw.close):

        @locks.raw.cached("square:{n}", ttl=60)  # type: ignore[untyped-decorator]
        async def square(n: int) -> int:
            calls.append(n)
            return n * n
    else:

        @locks.raw.cached("square:{n}", ttl=60)  # type: ignore[untyped-decorator]
        def square(n: int) -> int:
            calls.append(n)
            return n * n

    async def result(value: Any) -> Any:
        return await value if isinstance(value, Awaitable) else value

    assert [await result(square(n)) for n in (2, 3, 2)] == [4, 9, 4]
    assert calls == [2, 3]
    assert await result(square.refresh(2)) == 4
    await result(square.invalidate(3))
    assert await result(square(3)) == 9
    assert calls == [2, 3, 2, 3]
    assert square.__name__ == "square"


@pytest.mark.client_side
async def test_cached_key_without_parameters_is_refused(locks: LocksView) -> None:
    """`cached` refuses a key that uses no parameter of the function, unless it has none but `self`."""
    cached = locks.raw.cached

    def plain(day: str, *, limit: int = 1) -> None: ...
    async def awaited(day: str, *, limit: int = 1) -> None: ...
    def plain_method(self: object) -> None: ...
    async def awaited_method(self: object) -> None: ...

    is_aio = inspect.iscoroutinefunction(locks.raw.close)
    function, method = (awaited, awaited_method) if is_aio else (plain, plain_method)
    with pytest.raises(InvalidName, match=r'uses none of its parameters \(day, limit\), .* "same:\{day\}"$'):
        cached("same", ttl=60)(function)
    cached("same:{limit}", ttl=60)(function)
    cached("same", ttl=60)(method)
    with pytest.raises(InvalidType, match=rf'write @locks.cached\("{function.__name__}:\{{id\}}", ttl=60\)$'):
        cached(function)


@pytest.mark.client_side
async def test_nothing_is_built_while_the_engine_is_down(factory: MakeClient) -> None:
    """If the engine is unreachable, single_flight raises and builds nothing."""
    locks = factory.connect()
    builder = Builder(locks)
    faulty = Faulty.around(locks)
    faulty.refuse("attempt", 1000)
    with pytest.raises(EngineUnavailable, match="k"):
        await get(locks, builder)
    assert builder.calls == 0
    faulty.heal()
    assert await get(locks, builder) == "built"
    assert not client_of(locks).flights


@pytest.mark.client_side
async def test_bad_arguments_are_refused(locks: LocksView) -> None:
    """single_flight refuses bad arguments before it builds anything."""
    builder = Builder(locks)
    for bad in ({"ttl": 0}, {"ttl": 60, "stale": -1}, {"ttl": None}, {"ttl": 60, "error_for": -1}):
        with pytest.raises(InvalidArgument):
            await get(locks, builder, **bad)
    with pytest.raises(InvalidType, match=r"^single_flight\(\) needs ttl="):
        await call(locks.raw.single_flight, "k", builder.function)
    with pytest.raises(InvalidType, match=r"^single_flight\(\) has no argument 'stael': did you mean 'stale'\?"):
        await get(locks, builder, stael=1)
    with pytest.raises(InvalidType, match=r"^cached\(\) needs ttl="):
        locks.raw.cached("k")(builder.function)
    with pytest.raises(InvalidType, match=r"^cached\(\) has no argument 'tll': did you mean 'ttl'\?"):
        locks.raw.cached("k", tll=60)(builder.function)
    with pytest.raises(InvalidType, match="codec"):
        await get(locks, builder, codec=object())
    wrong: Any = (lambda: 1) if builder.awaited else builder._await
    with pytest.raises(InvalidType, match="build"):
        await call(locks.raw.single_flight, "k", wrong, ttl=60)
    assert builder.calls == 0
