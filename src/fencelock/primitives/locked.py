"""The decorator's lock name, as in `report:{day}`: the arguments of each call fill in the template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fencelock.errors import InvalidName, InvalidType


def check_template(template: object, decorator: str = "locked") -> None:
    """Raise InvalidType if the name is missing, as with a bare `@locks.locked`."""
    if isinstance(template, str):
        return
    given = getattr(template, "__name__", None) if callable(template) else None
    if given is not None:
        raise InvalidType(f"@locks.{decorator} needs a name for {given}: write @locks.{decorator}({given!r})")
    raise InvalidType(f"@locks.{decorator} needs a name, a str, not {type(template).__name__}")


def name_template(
    template: str, function: Callable[..., Any], *, awaited: bool, decorator: str = "locked"
) -> Callable[..., str]:
    """Return a function that makes the lock's name from a call's arguments; raise InvalidName if the template cannot fit.

    Raise InvalidType for a generator, or a coroutine function without `awaited`: its body would run after the release.
    """
    import inspect  # slow, and only the decorator needs it

    generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if generator or (inspect.iscoroutinefunction(function) and not awaited):
        why = "it is a generator" if generator else "it is an async def; use fencelock.aio for it"
        raise InvalidType(f"@locks.{decorator}: {function.__qualname__} would run after the call has ended: {why}")
    signature = inspect.signature(function)
    try:
        template.format_map(_AnyArgument(signature.parameters))
    except (LookupError, ValueError) as error:
        raise InvalidName(
            f"the name {template!r} does not fit {function.__qualname__}{signature}: {error}; write {{{{ for a brace",
            template,
        ) from None

    def name_of(*args: Any, **kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return template.format_map(bound.arguments)

    return name_of


class _AnyArgument:
    """Stands for the arguments, and for their attributes and items, when the template is checked."""

    def __init__(self, known: Mapping[str, object]) -> None:
        self._known = known

    def __getitem__(self, key: str) -> _Anything:
        if key not in self._known:
            raise LookupError(f"there is no argument {key!r}")
        return _Anything()


class _Anything:
    def __format__(self, spec: str) -> str:
        return "x"

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, key: object) -> _Anything:
        return self
