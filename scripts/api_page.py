"""Write docs/api.md from the docstrings: `make docs`. A test fails when the page and the code differ."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from textwrap import dedent
from typing import Any

import fencelock
from fencelock import fences
from fencelock.aio.fences import http as aio_http
from fencelock.aio.lockfree import asgi
from fencelock.fences import etcd, file, http, memory, objects, redis, sql, zookeeper
from fencelock.lockfree import crdt, idempotency, optimistic, outbox, relay, schema

PAGE = Path(__file__).resolve().parents[1] / "docs/api.md"
INTRODUCTION = """\
# Every public name

`make docs` writes this page from the docstrings. Start with the [README](../README.md); this page is for looking things up.

`fencelock.aio` has the same names, awaited: `async with locks.lock(…)`, `await lock.acquire()`, `await lease.release()`,
`async for name in locks.names()`. Methods that only look at an object are not awaited: `lease.token`, `lease.remaining`,
`lease.check()`, `lease.is_lost()`, `lease.lost.is_set()`, `lease.progress()`, `locks.assert_held()`, `election.healthy()`.
Functions that you pass (`work`, `build`) are coroutine functions there.

`Locks.lock` explains the options that most primitives share (`ttl`, `timeout`, `renew`, `max_hold`, `stall_after`,
`purpose`); `= ...` in a signature stands for the default there. Every error has `name`, the name of the lock.
"""
CHAPTERS: dict[str, tuple[str, ...]] = {
    "Connecting, locking, holding": ("connect", "Locks", "Lock", "RWLock", "Lease", "Lost"),
    "Several names, elections": ("MultiLock", "Group", "Election", "Leader", "Candidate"),
    "Jobs": ("Once", "Schedule", "Slot", "Run", "Outcome"),
    "Rate limits and cached values": ("RateLimit", "RateState", "CachedFunction"),
    "Looking": ("Snapshot", "Holder", "Waiter", "Mode", "LossReason", "Traits", "TokenGuarantee"),
    "Errors": (
        "FencelockError",
        "LockTimeout",
        "LeaseLost",
        "NotHeld",
        "WouldDeadlock",
        "StaleToken",
        "RateLimited",
        "BuildFailed",
        "KeyInProgress",
        "KeyReused",
        "VersionConflict",
        "EngineUnavailable",
        "OutcomeUnknown",
        "ReleaseFailed",
        "GuaranteeUnavailable",
        "InvalidArgument",
        "InvalidType",
        "InvalidName",
        "InvalidTTL",
        "InvalidURL",
        "MissingDependency",
        "ClientClosed",
        "DifferentLoop",
    ),
}
MADE_BY = {
    "Locks": "`connect(…)`",
    "Lock": "`locks.lock(…)`, `locks.semaphore(…)`, `rwlock.read()`, `rwlock.write()` and `election.campaign(…)`",
    "RWLock": "`locks.rwlock(…)`",
    "Lease": "`lock.acquire()`, `lock.try_acquire()` and `with lock as lease`",
    "Lost": "`lease.lost` and `group.lost`",
    "MultiLock": "`locks.multi(…)`",
    "Group": "`locks.multi(…).acquire()` and `with locks.multi(…) as group`",
    "Election": "`locks.election(…)`",
    "RateLimit": "`locks.rate_limit(…)` and `locks.rate_limits(…)`",
    "CachedFunction": "`@locks.cached(…)`",
}
"""Where users get the objects that they do not construct."""
NOT_FOR_USERS: dict[type, set[str]] = {fencelock.Snapshot: {"of"}}
"""Public methods that only engines call."""
FENCES = (
    sql.SqlFence,
    sql.FenceColumn,
    sql.StandaloneSqlFence,
    redis.RedisFence,
    redis.FencedPipeline,
    etcd.EtcdFence,
    zookeeper.ZooKeeperFence,
    file.FileFence,
    objects.ObjectFence,
    http.FencingTokenAuth,
    http.raise_for_stale,
    http.WsgiFencingMiddleware,
    aio_http.FencingMiddleware,
    http.header,
    http.parse,
    http.path_of,
    memory.MemoryFence,
    fences.from_environ,
    fences.TokenPair,
)
"""All fences, each with what belongs to it."""
LOCKFREE = {
    idempotency: ("IdempotencyKey", "Run", "ResultTooLarge", "idempotent", "prune"),
    asgi: ("IdempotencyMiddleware", "Work"),
    optimistic: (
        "VersionedValue",
        "Versioned",
        "SqlRow",
        "RedisKey",
        "EtcdKey",
        "RecordKey",
        "HttpResource",
        "etag",
        "check_if_match",
    ),
    outbox: ("Outbox", "Message"),
    relay: ("Relay",),
    crdt: ("GCounter", "PNCounter", "ORSet", "LWWRegister", "HybridClock", "Stamp", "ClockAhead"),
    schema: ("create_tables", "schema_text"),
}
"""What needs no lock, by the module that it is imported from."""


def text_of(thing: object) -> str:
    """Return a docstring as Markdown: what is typed at a prompt becomes a block of code."""
    text = inspect.getdoc(thing) or ""
    return re.sub(r"(?m)((?:^ *>>> .*\n?)(?:^(?! *$).*\n?)*)", r"```python\n\1\n```\n", text).replace(
        "\n\n```\n", "\n```\n"
    )


def home_of(thing: Any) -> str:
    """Return the module that a name is to be imported from: the outermost package that offers it, or its own module."""
    *packages, _ = accumulate(thing.__module__.split("."), "{}.{}".format)
    offering = (name for name in packages if thing.__name__ in getattr(sys.modules[name], "__all__", ()))
    return next(offering, thing.__module__)


def signature_of(name: str, thing: Any) -> str:
    """Return a name with its parameters, as one would call it."""
    parameters = re.sub(r"""(: |-> )(?:'([^']*)'|"([^"]*)")""", r"\1\2\3", str(inspect.signature(thing)))
    parameters = re.sub(
        r"frozenset\({(.*?)}\)", lambda match: f"{{{', '.join(sorted(match[1].split(', ')))}}}", parameters
    )
    parameters = re.sub(r"<built-in function (\w+)>", r"\1", parameters)
    parameters = parameters.replace(", **unknown: Never", "")  # there for the sake of an error, not for callers
    parameters = re.sub(r"\*\*options: Unpack\[(\w+)\]", lambda match: options_of(match[1], parameters), parameters)
    return name + re.sub(r"^\(self(?:, )?", "(", parameters)


def options_of(name: str, parameters: str) -> str:
    """Return the keyword parameters that a TypedDict of options stands for."""
    modules = [import_module(name) for name in fencelock.PUBLIC_MODULES]
    options: Any = next(getattr(module, name) for module in modules if hasattr(module, name))
    written = [
        f"{field}: {type_text(kind)}{'' if field in options.__required_keys__ else ' = ...'}"
        for field, kind in options.__annotations__.items()
    ]
    keyword_only = re.search(r"\*(?:\w+: |, )", parameters.partition("**")[0])
    return ", ".join(written if keyword_only else ["*", *written])


def type_text(annotation: Any) -> str:
    """Return a type as its source has it."""
    return str(getattr(annotation, "__forward_arg__", annotation))


def bases_of(kind: type) -> list[type]:
    """Return a class and its bases that are ours, the outermost base first."""
    return [base for base in reversed(kind.__mro__) if base.__module__.startswith("fencelock")]


def attributes_of(kind: type) -> dict[str, str]:
    """Return the public attributes that the source of a class assigns or declares, with the string that follows each."""
    found: dict[str, str] = {}
    for base in bases_of(kind):
        definition = ast.parse(dedent(inspect.getsource(base))).body[0]
        assert isinstance(definition, ast.ClassDef)
        made = [part for part in definition.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        for body in (definition.body, *(part.body for part in made)):
            for statement, following in zip(body, [*body[1:], None], strict=True):
                target = getattr(statement, "target", None) or (getattr(statement, "targets", None) or [None])[0]
                name = getattr(target, "attr", getattr(target, "id", "_"))
                if not name.startswith("_"):
                    text = following.value if isinstance(following, ast.Expr) else None
                    found[name] = " ".join(str(text.value).split()) if isinstance(text, ast.Constant) else ""
    return found


def fields_of(kind: Any) -> Iterator[str]:
    """Yield a line for each value of an enum, each field of a tuple, and each attribute of another class."""
    attributes = attributes_of(kind)
    if issubclass(kind, Enum):
        for member in kind:
            yield f"- `{kind.__name__}.{member.name}` = `{member.value!r}`{colon(attributes.get(member.name))}"
        return
    types = {
        name: type_text(of) for base in bases_of(kind) for name, of in vars(base).get("__annotations__", {}).items()
    }
    if "__init__" in vars(kind):
        types |= {name: type_text(of.annotation) for name, of in inspect.signature(kind.__init__).parameters.items()}
    defaults = getattr(kind, "_field_defaults", {})
    if issubclass(kind, Exception) and kind is not fencelock.FencelockError:
        attributes.pop("name")  # every error has it
    documented = [name for name, text in attributes.items() if text or issubclass(kind, Exception)]
    for name in getattr(kind, "_fields", documented):
        default = f" = {defaults[name]!r}" if name in defaults else ""
        shown = f"{name}: {types[name]}" if name in types else name
        yield f"- `{shown}{default}`{colon(attributes.get(name))}"


def colon(text: str | None) -> str:
    """Return a description to put behind a name."""
    return f": {text}" if text else ""


def members_of(kind: type) -> Iterator[str]:
    """Yield a line or a paragraph for everything of a class that users may touch."""
    if fields := list(fields_of(kind)):
        title = "Values" if issubclass(kind, Enum) else "Fields"
        yield f"{title}:\n\n" + "\n".join(fields)
    if issubclass(kind, Enum | Exception):
        return
    seen: dict[str, Any] = {}
    for base in bases_of(kind):
        seen.update(vars(base))
    for name, member in seen.items():
        if name.startswith("_") or name in getattr(kind, "_fields", ()) or name in NOT_FOR_USERS.get(kind, ()):
            continue
        if isinstance(member, property):
            yield f"**`.{name}`** {text_of(member)}"
        elif callable(method := getattr(kind, name)):
            yield f"**`.{signature_of(name, method)}`** {text_of(method)}"


def entry(name: str, thing: Any) -> Iterator[str]:
    """Yield the paragraphs of one name."""
    if not isinstance(thing, type):
        yield f"### `{signature_of(name, thing)}`"
        yield text_of(thing)
        return
    above = [base.__name__ for base in thing.__bases__ if base is not object and not base.__name__.startswith("_")]
    if issubclass(thing, Exception):
        yield f"### `{name}` ({', '.join(above)})"
    elif name in MADE_BY or issubclass(thing, Enum | tuple):
        yield f"### `{name}`"
    else:
        yield f"### `{signature_of(name, thing)}`".replace(" -> None", "")
    yield text_of(thing)
    if name in MADE_BY:
        yield f"Made by {MADE_BY[name]}."
    yield from members_of(thing)


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION.rstrip()]
    for title, names in CHAPTERS.items():
        parts.append(f"## {title}")
        for name in names:
            parts += entry(name, getattr(fencelock, name))
    parts.append("## Fences")
    for fence in FENCES:
        parts.append(f"`from {home_of(fence)} import {fence.__name__}`")
        parts += entry(fence.__name__, fence)
    parts.append("## Without a lock")
    for module, names in LOCKFREE.items():
        for name in names:
            parts.append(f"`from {module.__name__} import {name}`")
            parts += entry(name, getattr(module, name))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
