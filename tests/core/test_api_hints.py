"""Habits from redis-py's Lock and `threading.Lock`: each gets an error that says what to write here."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, get_type_hints

import pytest

import fencelock
from fencelock import InvalidType, Locks, aio
from fencelock.primitives.api_hints import OPTIONS
from fencelock.primitives.cached_values import SingleFlightOptions
from fencelock.primitives.lock import CommonOptions, LockOptions, WaitOptions

CONNECT = pytest.mark.parametrize("connect", [fencelock.connect, aio.connect], ids=["blocking", "asyncio"])


@CONNECT
@pytest.mark.parametrize(
    ("attribute", "advice"),
    [
        ("release", r"lease\.release\(\)"),
        ("locked", r"locks\.inspect\(name\)\.holders"),
        ("is_locked", r"locks\.inspect\(name\)\.holders"),
        ("is_acquired", r"lease\.lost"),
        ("owned", r"lease\.lost"),
        ("extend", r"lease\.renew\(\)"),
        ("reacquire", r"lease\.renew\(\)"),
        ("contenders", r"locks\.inspect\(name\)"),
    ],
)
def test_lock_methods_of_redis_py_say_what_to_call(connect: Any, attribute: str, advice: str) -> None:
    """A method of redis-py's lock that fencelock lacks raises an error that names the method of the lease or client."""
    lock = connect("memory://habits").lock("x")
    assert not hasattr(lock, attribute)
    with pytest.raises(AttributeError, match=rf"^a fencelock Lock has no attribute '{attribute}': .*{advice}"):
        getattr(lock, attribute)
    with pytest.raises(AttributeError, match=r"^a fencelock Lock has no attribute 'nosuch'$"):
        _ = lock.nosuch


def test_lease_methods_of_redis_py_say_what_to_call() -> None:
    """A method of redis-py's lock that is called on a lease raises an error that names the method of the lease."""
    with fencelock.connect("memory://habits") as locks, locks.lock("lease") as lease:
        for attribute, advice in (("extend", "renew"), ("reacquire", "renew"), ("owned", "lost"), ("locked", "lost")):
            with pytest.raises(AttributeError, match=rf"^a fencelock Lease has no attribute '{attribute}': .*{advice}"):
                getattr(lease, attribute)
        with pytest.raises(AttributeError, match="'tokn'") as caught:
            _ = lease.tokn  # type: ignore[attr-defined]
        assert (caught.value.name, caught.value.obj) == ("tokn", lease)  # Python adds: Did you mean: 'token'?


@CONNECT
async def test_arguments_of_redis_py_say_what_to_write(connect: Any) -> None:
    """`blocking_timeout` and `blocking` raise an error that names the argument to use."""
    locks = connect("memory://habits")
    with pytest.raises(
        InvalidType, match=r"^lock\(\) has no argument 'blocking_timeout': timeout= is how long to wait"
    ):
        locks.lock("x", timeout=10, blocking_timeout=5)
    with pytest.raises(InvalidType, match=r"^lock\(\) has no argument 'nosuch'$"):
        locks.lock("x", nosuch=1)
    for keywords, words in (
        ({"blocking_timeout": 5}, r"'blocking_timeout': timeout="),
        ({"blocking": False}, r"'blocking': use try_acquire\(\)"),
    ):
        with pytest.raises(InvalidType, match=rf"^acquire\(\) has no argument {words}"):
            await locks.lock("x").acquire(**keywords)
        with pytest.raises(InvalidType, match=rf"^acquire\(\) has no argument {words}"):
            await locks.multi("x", "y").acquire(**keywords)


def primitives(locks: Any) -> dict[str, Any]:
    """Return the functions that take options, each with its other arguments."""
    return {
        "lock": partial(locks.lock, "x"),
        "locked": partial(locks.locked, "x"),
        "rwlock": partial(locks.rwlock, "x"),
        "semaphore": partial(locks.semaphore, "x", 2),
        "multi": partial(locks.multi, "x", "y"),
        "election": partial(locks.election, "x"),
        "rate_limit": partial(locks.rate_limit, "x", 10),
    }


@CONNECT
def test_keywords_of_other_libraries_say_what_to_write(connect: Any) -> None:
    """Every function with options answers a keyword of another library with the keyword to use."""
    for function, make in primitives(connect("memory://habits")).items():
        for keyword in ("blocking_timeout", "blocking", "sleep", "thread_local", "expire"):
            with pytest.raises(InvalidType, match=rf"^{function}\(\) has no argument '{keyword}': \w"):
                make(**{keyword: 1})
        with pytest.raises(InvalidType, match=rf"^{function}\(\) .*: give it to connect\(…, on_lost=f\)$"):
            make(on_lost=print)
    with pytest.raises(
        InvalidType, match=r"^connect\(\) has no argument 'timeout': give it to each lock, as in lock\(name, "
    ):
        connect("memory://habits", timeout=5)
    with pytest.raises(InvalidType, match=r"^connect\(\) has no argument 'blocking_timeout': timeout="):
        connect("memory://habits", blocking_timeout=5)


@CONNECT
def test_misspelt_keyword_suggests_the_right_one(connect: Any) -> None:
    """A misspelt keyword raises an error that suggests the right one."""
    for function, make in primitives(connect("memory://habits")).items():
        wrong, right = ("brust", "burst") if function == "rate_limit" else ("time_out", "timeout")
        with pytest.raises(InvalidType, match=rf"^{function}\(\) has no argument '{wrong}': did you mean '{right}'\?$"):
            make(**{wrong: 1})
    with pytest.raises(InvalidType, match=r"did you mean 'namespace'\?$"):
        connect("memory://habits", name_space="x")


def test_known_keywords_are_those_of_the_functions() -> None:
    """The lists of known keywords have every option of the functions."""
    kinds = (CommonOptions, WaitOptions, LockOptions, SingleFlightOptions)
    job, shared, lock, cache = (set(get_type_hints(kind)) for kind in kinds)
    named = {"rwlock": lock, "locked": lock, "semaphore": shared, "cached": cache, "single_flight": cache}
    named |= {"multi": shared | {"read", "write"}, "election": shared | {"value"}, "acquire": {"timeout"}}
    named["try_acquire"] = set()
    for function in (Locks.lock, Locks.rate_limit, Locks.once, Locks.schedule, fencelock.connect):
        parameters = inspect.signature(function).parameters.values()
        named[function.__name__] = {given.name for given in parameters if given.kind is given.KEYWORD_ONLY}
    named["once"] |= job
    named["schedule"] |= job
    assert {function: set(options) for function, options in OPTIONS.items()} == named


@CONNECT
@pytest.mark.parametrize(
    ("function", "arguments", "keyword", "advice"),
    [
        ("schedule", ("s",), "interval", r"every= is the number of seconds"),
        ("schedule", ("s",), "seconds", r"every= is the number of seconds"),
        ("schedule", ("s",), "retries", r"attempts="),
        ("once", ("s", "1"), "retries", r"attempts="),
        ("lock", ("s",), "retries", r"timeout="),
        ("rate_limit", ("s", 5), "interval", r"per= is the number of seconds"),
    ],
)
def test_keyword_that_means_something_else_to_each_function(
    connect: Any, function: str, arguments: Any, keyword: str, advice: str
) -> None:
    """A keyword of another library leads to the argument of this function."""
    make = getattr(connect("memory://habits"), function)
    with pytest.raises(InvalidType, match=rf"^{function}\(\) has no argument '{keyword}': {advice}"):
        make(*arguments, **{keyword: 1})


def test_expire_of_a_cached_value() -> None:
    """`expire=` of a cached value leads to its ttl, which is not the ttl of a lock."""
    with fencelock.connect("memory://habits") as locks:
        with pytest.raises(
            InvalidType, match=r"^single_flight\(\) has .* 'expire': ttl= is for how many seconds a value is"
        ):
            locks.single_flight("k", list, expire=60)  # type: ignore[call-arg]


@CONNECT
async def test_arguments_in_the_wrong_place(connect: Any) -> None:
    """`try_acquire(timeout=)` and `connect(host=)` say where the argument belongs."""
    locks = connect("memory://habits")
    for lock in (locks.lock("x"), locks.multi("x", "y")):
        with pytest.raises(InvalidType, match=r"^try_acquire\(\) has no argument 'timeout': .*acquire\(timeout=…\)"):
            await lock.try_acquire(timeout=5)
    with pytest.raises(InvalidType, match=r"^connect\(\) has no argument 'host': it is a part of the URL"):
        connect(host="localhost")


@pytest.mark.parametrize("module", [fencelock, aio], ids=["blocking", "asyncio"])
def test_lock_without_a_client(module: Any) -> None:
    """`fencelock.Lock("a")`, `fencelock.lock` and `fencelock.Semaphore` say that a client makes them."""
    with pytest.raises(InvalidType, match=r"^a client makes .*locks\.lock\('a'\)$"):
        module.Lock("a")
    for attribute in ("lock", "Semaphore"):
        with pytest.raises(AttributeError, match=rf"has no attribute '{attribute}': connect\(\) returns a client"):
            getattr(module, attribute)
    with pytest.raises(AttributeError, match=r"has no attribute 'nosuch'$"):
        _ = module.nosuch


@CONNECT
@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda locks: locks.rwlock("x"), r"RWLock .*rwlock\.read\(\) and rwlock\.write\(\)"),
        (lambda locks: locks.election("x"), r"Election .*election\.campaign\(\)"),
        (lambda locks: locks.schedule("x", every=60), r"Schedule .*schedule\.run_due\(work\)"),
        (lambda locks: locks.rate_limit("x", 5), r"RateLimit .*limit\.acquire\(\)"),
    ],
)
async def test_with_block_of_an_object_that_has_none(connect: Any, make: Any, advice: str) -> None:
    """`with` and `async with` on an object that is not held say what to write."""
    made = make(connect("memory://habits"))
    with pytest.raises(InvalidType, match=rf"^a fencelock {advice}"):
        with made:
            pytest.fail("the body ran")
    with pytest.raises(InvalidType, match=rf"^a fencelock {advice}"):
        async with made:
            pytest.fail("the body ran")


@pytest.mark.parametrize("make", [lambda locks: locks, lambda locks: locks.lock("x"), lambda locks: locks.multi("x")])
async def test_with_block_of_the_other_api(make: Any) -> None:
    """`async with` on the blocking API, and `with` on the asyncio API, say what to write, and lock nothing."""
    blocking, awaited = fencelock.connect("memory://other-api"), aio.connect("memory://other-api")
    with pytest.raises(InvalidType, match=r"^this is the blocking API: use `with`, or fencelock\.aio\.connect"):
        async with make(blocking):
            pytest.fail("the body ran")
    with pytest.raises(InvalidType, match=r"^this is the asyncio API: use `async with`, or fencelock\.connect"):
        with make(awaited):
            pytest.fail("the body ran")
    assert list(blocking.names()) == []


def test_names_of_a_multi_lock_in_a_list() -> None:
    """`multi(["a", "b"])` says that names are passed one by one."""
    with fencelock.connect("memory://habits") as locks, pytest.raises(InvalidType, match=r"multi\('a', 'b'\)"):
        locks.multi(["a", "b"])  # type: ignore[arg-type]
