"""Which engine a URL names. Engines are imported when they are asked for, so that nobody pays for what is not used."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, cast

from fencelock.errors import InvalidURL, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencelock.core.backend import Backend
    from fencelock.core.world import World


class Engine(NamedTuple):
    """A line of the table: the module that has `connect(world, url, namespace)`, and the extra that brings its driver."""

    module: str
    extra: str | None = None


ENGINES: dict[str, Engine] = {
    "memory": Engine("fencelock.backends.memory"),
    "sqlite": Engine("fencelock.backends.sqlite"),
}


def resolve(url: str | None) -> str:
    """Return the URL that is meant: the one given, else $FENCELOCK_URL, else SQLite in the user's state folder."""
    if url is None:
        url = os.environ.get("FENCELOCK_URL") or "sqlite://"
    if not isinstance(url, str):
        raise InvalidURL(f"a URL must be a str such as 'sqlite:///var/lib/app/locks.db', not {type(url).__name__}")
    return url


def open_backend(world: World, url: str, namespace: str) -> Backend:
    """Return the engine that the URL names, or raise InvalidURL or MissingDependency."""
    scheme, colon, _ = url.partition(":")
    engine = ENGINES.get(scheme) if colon else None
    if engine is None:
        raise InvalidURL(
            f"{redact(url)!r} names no engine of this release; it has {', '.join(f'{name}://' for name in sorted(ENGINES))}"
        )
    try:
        module = import_module(engine.module)
    except ImportError as error:
        if engine.extra is None:
            raise
        raise MissingDependency(
            f"{scheme}:// needs a driver that is not installed ({error}): pip install 'fencelock[{engine.extra}]'"
        ) from error
    connect = cast("Callable[[World, str, str], Backend]", module.connect)
    return connect(world, url, namespace)


def redact(url: str) -> str:
    """Return the URL without its password, for people to see.

    >>> redact("redis://app:s3cret@db:6379/0?password=x&db=1")
    'redis://app:***@db:6379/0?password=***&db=1'
    """
    if "@" not in url and "=" not in url:
        return url
    import re  # most URLs have nothing to hide and need not pay for it

    # The last @ ends the credentials: a password may contain an @, / or ? that was not escaped. Rather too much than
    # too little: nobody needs to see what stands there. Without a scheme, or with a wrong one, it is hidden all the same.
    start, slashes, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    rest = re.sub(r"(?s)^([^:@/?#]*:).*@", r"\1***@", rest)
    rest = re.sub(r"(?is)(\w*(?:pass|secret|token|pwd)\w*\s*=\s*)('[^']*'|[^\s&;#]*)", r"\1***", rest)
    return f"{start}{slashes}{rest}"
