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
        example = f'"{given}:{{id}}", ttl=60' if decorator == "cached" else repr(given)
        raise InvalidType(f"@locks.{decorator} needs a name for {given}: write @locks.{decorator}({example})")
    raise InvalidType(f"@locks.{decorator} needs a name, a str, not {type(template).__name__}")


def name_template(
    template: str, function: Callable[..., Any], *, awaited: bool, decorator: str = "locked"
) -> Callable[..., str]:
    """Return a function that makes the lock's name from a call's arguments; raise InvalidName if the template cannot fit,
    or if the key of a cached function uses none of its parameters.

    Raise InvalidType for a generator, or a coroutine function without `awaited`: its body would run after the release.
    """
    import inspect  # slow, and only the decorator needs it

    generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if generator or (inspect.iscoroutinefunction(function) and not awaited):
        why = "it is a generator" if generator else "it is an async def; use fencelock.aio for it"
        raise InvalidType(f"@locks.{decorator}: {function.__qualname__} would run after the call has ended: {why}")
    signature = inspect.signature(function)
    arguments = _AnyArgument(signature.parameters)
    try:
        template.format_map(arguments)
    except (LookupError, ValueError) as error:
        raise InvalidName(
            f"the name {template!r} does not fit {function.__qualname__}{signature}: {error}; write {{{{ for a brace",
            template,
        ) from None
    parameters = [name for name in signature.parameters if name not in ("self", "cls")]
    if decorator == "cached" and parameters and not arguments.used:
        raise InvalidName(
            f"the key {template!r} of {function.__qualname__} uses none of its parameters ({', '.join(parameters)}), "
            f'so all calls would share one value; write a key such as "{template}:{{{parameters[0]}}}"',
            template,
        )

    def name_of(*args: Any, **kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return template.format_map(bound.arguments)

    return name_of


class _AnyArgument:
    """Stands for the arguments, and for their attributes and items, when the template is checked."""

    def __init__(self, known: Mapping[str, object]) -> None:
        self._known = known
        self.used: set[str] = set()
        """The arguments that the template names."""

    def __getitem__(self, key: str) -> _Anything:
        if key not in self._known:
            raise LookupError(f"there is no argument {key!r}")
        self.used.add(key)
        return _Anything()


class _Anything:
    def __format__(self, spec: str) -> str:
        return "x"

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, key: object) -> _Anything:
        return self
