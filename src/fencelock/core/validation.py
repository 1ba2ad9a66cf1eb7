"""Checks of users' arguments: names, namespaces, ttls, timeouts. The same for every engine."""

from __future__ import annotations

from functools import partial
from typing import Any

from fencelock.core import log as log_module
from fencelock.core.log import WARNING, log
from fencelock.errors import GuaranteeUnavailable, InvalidArgument, InvalidName, InvalidTTL, InvalidType
from fencelock.model import CORRECT, Mode, Traits

NAME_MAX_BYTES = 1024
ELECTION_VALUE_MAX_BYTES = 1024
MAX_LIMIT = 1_000_000
MAX_SECONDS = 1e9
"""Seconds; a longer timeout counts as none."""
LONG_TTL = 3600.0
"""Seconds. A longer ttl or timeout is allowed, but it may be a mistake: a number of milliseconds."""
CO_COROUTINE = 0x80  # the constant of inspect, whose import takes 10 ms
PURPOSES = ("efficiency", "correctness")
SAFE = "sqlite:, etcd:, zookeeper:, postgresql: or mysql:"
"""URLs of engines that are safe for both purposes."""


def check_name(name: str, what: str = "a lock's name") -> str:
    """Return the name unchanged, or raise InvalidName: 1 to 1024 bytes of UTF-8 without control characters."""
    if not isinstance(name, str):
        raise InvalidName(f"{what} must be a str, not {type(name).__name__}: {name!r:.80}")
    if name and len(name) <= NAME_MAX_BYTES and name.isascii() and name.isprintable():
        return name
    if not name:
        raise InvalidName(f"{what} must not be empty")
    for character in name:
        code = ord(character)
        if code < 0x20 or 0x7F <= code < 0xA0:
            raise InvalidName(f"{what} must not contain control characters: {name!r:.80} has U+{code:04X}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidName(f"{what} must be text that UTF-8 can express: {name!r:.80} has a lone surrogate") from None
    if size > NAME_MAX_BYTES:
        raise InvalidName(f"{what} may have at most {NAME_MAX_BYTES} bytes in UTF-8, {name!r:.40}… has {size}")
    return name


def check_ttl(ttl: object, traits: Traits, name: str | None = None) -> float:
    """Return the ttl as a float, or raise InvalidTTL with the range that the engine allows."""
    if isinstance(ttl, bool) or not isinstance(ttl, int | float):
        raise InvalidTTL(f"ttl must be a number of seconds, not {type(ttl).__name__}", name)
    if not traits.ttl_min <= ttl <= traits.ttl_max:  # false for NaN, too
        raise InvalidTTL(
            f"ttl must be between {traits.ttl_min:g} and {traits.ttl_max:g} seconds on {traits.engine}, not {ttl!r:.40}",
            name,
        )
    return float(ttl)


def warn_long_ttl(ttl: float, name: str | None = None) -> None:
    """Log a warning for a ttl above one hour, once per process: others wait that long for a holder that died."""
    global _warned_long_ttl
    if ttl <= LONG_TTL or _warned_long_ttl:
        return
    _warned_long_ttl = True
    log("client", WARNING, f"{'' if name is None else f'{name!r}: '}{long_ttl(ttl)}", lock=name, ttl=ttl)


def long_ttl(ttl: float) -> str:
    """Return the warning about a ttl above one hour."""
    return (
        f"ttl is in seconds: {ttl:g} is {ttl / 3600:.1f} hours, and others wait that long for a holder that died or hangs. "
        "A lease is renewed in the background, so 30 is enough for work of any length"
    )


_warned_long_ttl = False


def check_timeout(timeout: object, name: str) -> float | None:
    """Return a timeout, or None to wait for ever; raise InvalidArgument. One above an hour is logged, once per process."""
    global _warned_long_timeout
    seconds = check_seconds(timeout, "timeout", name, zero=True)
    if seconds is not None and seconds > LONG_TTL and not _warned_long_timeout and log_module.sink is None:
        # Not on the command line, where times have units.
        _warned_long_timeout = True
        message = f"{name!r}: timeout is in seconds: {seconds:g} is {seconds / 3600:.1f} hours"
        log("client", WARNING, f"{message}, and the caller waits that long for the lock", lock=name, timeout=seconds)
    return seconds


_warned_long_timeout = False


def check_seconds(value: object, what: str, name: str, *, zero: bool) -> float | None:
    """Return a duration, or None for no limit; raise InvalidArgument."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # NaN
        raise InvalidArgument(f"{name!r}: {what} must be a number of seconds or None, not {value!r:.40}", name)
    if value < 0 or (value == 0 and not zero):
        raise InvalidArgument(
            f"{name!r}: {what} must be {'0 or more' if zero else 'more than 0'} seconds, not {value!r:.40}", name
        )
    return float(value) if value <= MAX_SECONDS else None


def check_reason(reason: object, name: str) -> str:
    """Return the reason of a forced release, or raise InvalidArgument."""
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidArgument(f"a forced release of {name!r} needs a reason that others can read later", name)
    return reason


def check_purpose(purpose: str, traits: Traits, name: str) -> None:
    """Raise GuaranteeUnavailable if the purpose is correctness and the engine's tokens could repeat after a failure."""
    if purpose not in PURPOSES:
        raise InvalidArgument(f"{name!r}: purpose must be one of {', '.join(PURPOSES)}, not {purpose!r:.40}", name)
    if purpose == "correctness" and traits.weakness:
        raise GuaranteeUnavailable(
            f"{name!r}: tokens of this {traits.engine} server could repeat after a crash of its machine: {traits.weakness}, "
            "or use the purpose 'efficiency'",
            name,
        )
    if purpose == "correctness" and traits.guarantee not in CORRECT:
        raise GuaranteeUnavailable(
            f"{name!r}: tokens of {traits.engine} are only as strong as {traits.guarantee.value!r} and could repeat after a "
            f"failure; use an engine with {' or '.join(sorted(s.value for s in CORRECT))} tokens, such as {SAFE}, or the "
            "purpose 'efficiency'",
            name,
        )


def check_mode(mode: Mode, traits: Traits, name: str) -> None:
    """Raise GuaranteeUnavailable if the engine has no readers or no permits."""
    if (mode is Mode.SHARED and not traits.readers) or (mode is Mode.PERMIT and not traits.permits):
        what = "reader-writer locks" if mode is Mode.SHARED else "semaphores"
        raise GuaranteeUnavailable(
            f"{name!r}: {traits.engine} has no {what}; the page of the engine says what it has, and sqlite:, redis:, etcd:, "
            "zookeeper: and postgresql: have both",
            name,
        )


def check_mode_name(mode: object, name: str) -> Mode:
    """Return the mode of that name, or raise InvalidArgument."""
    if not isinstance(mode, str) or mode not in tuple(Mode):
        raise InvalidArgument(f"{name!r}: mode must be one of {', '.join(Mode)}, not {mode!r:.40}", name)
    return Mode(mode)


def check_limit(limit: object, name: str) -> int:
    """Return the limit of a semaphore, or raise InvalidArgument."""
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise InvalidType(f"{name!r}: limit must be a whole number of permits, not {type(limit).__name__}", name)
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidArgument(f"{name!r}: limit must be between 1 and {MAX_LIMIT}, not {limit!r:.40}", name)
    return limit


def check_value(value: object, name: str) -> str:
    """Return the value of an election's candidate, or raise InvalidArgument."""
    if not isinstance(value, str):
        raise InvalidType(f"{name!r}: value must be a str, not {type(value).__name__}", name)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name!r}: value must be text that UTF-8 can express", name) from None
    if size > ELECTION_VALUE_MAX_BYTES or "\0" in value:
        why = "contains U+0000" if "\0" in value else f"has {size} bytes"
        raise InvalidArgument(
            f"{name!r}: value may have at most {ELECTION_VALUE_MAX_BYTES} bytes and no U+0000; it {why}", name
        )
    return value


def check_function(function: object, what: str, argument: str | None = None) -> None:
    """Raise InvalidType unless it is a plain function, of the `argument` if given: nobody would await an async def."""
    if not callable(function):
        raise InvalidType(f"{what} must be a function, not {type(function).__name__}")
    if _is_coroutine_function(function):
        raise InvalidType(f"{what} is an async def, and nobody would await it; use fencelock.aio")
    _check_argument(function, what, argument)


def check_coroutine_function(function: object, what: str, argument: str | None = None) -> None:
    """Raise InvalidType unless it is an async def, of the `argument` if given: a plain function would block the loop."""
    if not _is_coroutine_function(function):
        raise InvalidType(f"{what} must be an async def: a plain function would block the event loop")
    _check_argument(function, what, argument)


def _check_argument(function: Any, what: str, argument: str | None) -> None:
    """Raise InvalidType if a call with one argument would fail: a job would have used up its slot by then."""
    if argument is None:
        return
    from inspect import signature

    try:
        # Not of what it wraps: a decorator may take the argument for a function that does not.
        accepts = signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # some builtins have no signature
    try:
        accepts.bind(None)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise InvalidType(
            f"{what} is called with one argument, as in `def {what}({argument})`; {name}() does not accept that: {error}"
        ) from None


def _is_coroutine_function(function: object) -> bool:
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__code__") and not hasattr(function, "__func__"):
        function = getattr(type(function), "__call__", function)  # noqa: B004
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return bool(getattr(code, "co_flags", 0) & CO_COROUTINE)


def check_callback(on_lost: object) -> None:
    """Raise InvalidType unless it is None or a plain function of a lease and a reason."""
    if on_lost is None:
        return
    if not callable(on_lost):
        raise InvalidType(f"on_lost must be a function of a lease and a reason, not {type(on_lost).__name__}")
    if _is_coroutine_function(on_lost):
        raise InvalidType("on_lost is an async def, and nobody would await it; have a plain function start a task")
