"""Write docs/api.md from the docstrings: `make docs`. A test fails when the page and the code differ."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from itertools import accumulate
from pathlib import Path
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

Made from the docstrings by `make docs`. Start with the [README](../README.md); this is for looking things up.

`fencelock.aio` has the same `connect`, `Locks`, `Lock`, `Lease` and `Lost`, to be awaited: `async with locks.lock(…)`,
`await lock.acquire()`, `await lease.release()`, `async for name in locks.names()`. What only looks at an object is not
awaited: `lease.token`, `lease.remaining`, `lease.check()`, `lease.is_lost()`, `lease.lost.is_set()`.
"""
CHAPTERS: dict[str, tuple[str, ...]] = {
    "Connecting, locking, holding": ("connect", "Locks", "Lock", "Lease", "Lost"),
    "Jobs": ("Once", "Schedule", "Slot", "Run", "Outcome"),
    "Beyond the lock": (
        "RWLock",
        "MultiLock",
        "Group",
        "Election",
        "Leader",
        "Candidate",
        "RateLimit",
        "RateState",
        "CachedFunction",
    ),
    "What is reported": ("Snapshot", "Holder", "Waiter", "Mode", "LossReason", "Traits", "TokenGuarantee"),
    "Errors": (
        "FencelockError",
        "LockTimeout",
        "LeaseLost",
        "StaleToken",
        "KeyInProgress",
        "KeyReused",
        "VersionConflict",
        "WouldDeadlock",
        "RateLimited",
        "BuildFailed",
        "EngineUnavailable",
        "OutcomeUnknown",
        "ReleaseFailed",
        "GuaranteeUnavailable",
        "NotHeld",
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
ATTRIBUTES = {"Lease": "**`.reason`** How it was lost, a `LossReason`, or None."}
"""What is set in `__init__`, where no docstring can be found."""
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
    parameters = parameters.replace(", **unknown: Never", "")  # there for the sake of an error, not for callers
    return name + re.sub(r"^\(self(?:, )?", "(", parameters)


def members_of(kind: type) -> Iterator[str]:
    """Yield a line or a paragraph for everything of a class that users may touch."""
    if issubclass(kind, Enum):
        yield "\n".join(f"- `{member.value}`" for member in kind)
        return
    fields = getattr(kind, "_fields", ())
    if fields:
        yield "Fields: " + ", ".join(f"`{field}`" for field in fields) + "."
    seen: dict[str, Any] = {}
    for base in reversed([base for base in kind.__mro__ if base.__module__.startswith("fencelock")]):
        seen.update(vars(base))
    for name, member in seen.items():
        if name.startswith("_") or name in fields:
            continue
        if isinstance(member, property):
            yield f"**`.{name}`** {text_of(member)}"
        elif callable(member):
            yield f"**`.{signature_of(name, member)}`** {text_of(member)}"


def entry(name: str, thing: Any) -> Iterator[str]:
    """Yield the paragraphs of one name."""
    if not isinstance(thing, type):
        yield f"### `{signature_of(name, thing)}`"
        yield text_of(thing)
    else:
        above = [base.__name__ for base in thing.__bases__ if base is not object and not base.__name__.startswith("_")]
        is_error = issubclass(thing, Exception)
        yield f"### `{name}`" + (f" ({', '.join(above)})" if is_error else "")
        yield text_of(thing)
        if not is_error:
            yield from members_of(thing)
            yield ATTRIBUTES.get(name, "")


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
