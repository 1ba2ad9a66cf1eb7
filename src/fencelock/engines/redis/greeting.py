"""What is asked first on a link: to be called on its channel, and whether the server is one that we can work with."""

from __future__ import annotations

import logging

from fencelock.core.runtime import Command, Runtime
from fencelock.engines.redis.link import Link, all_there
from fencelock.engines.redis.trouble import HINTS, check
from fencelock.errors import EngineUnavailable

LAYOUT = "1"
"""The version of everything that is stored; releases that disagree about it must not share a namespace."""


async def before_tls(runtime: Runtime, link: Link, address: str, namespace: str, patience: float) -> dict[bytes, bytes]:
    """Return what the server says of itself; raise if it is none that we can work with."""
    layout = f"{namespace}:layout"
    asked: list[Command] = [("SUBSCRIBE", link.channel), ("INFO",), ("GET", layout)]
    answers = await runtime.request_all([(link.connection, command) for command in asked], patience, all_there)
    _, info, found = answers
    check(info, address)
    known = dict(line.split(b":", 1) for line in info.splitlines() if b":" in line)
    # First: a key in somebody else's slot would only be refused as such. Valkey has its own word for it.
    if b"cluster" in (known.get(b"redis_mode"), known.get(b"server_mode")):
        raise EngineUnavailable(f"{address}: {HINTS['MOVED']}")
    for answer in answers:
        check(answer, address)
    if found is None:
        check(await link.connection.request(("SET", layout, LAYOUT, "NX"), patience), address)
    elif found != LAYOUT.encode():
        raise EngineUnavailable(
            f"{address}: the namespace {namespace!r} was written by another release of fencelock (layout "
            f"{found.decode(errors='replace')}, this one has {LAYOUT}); use another namespace, or upgrade"
        )
    return known


def look_at(info: dict[bytes, bytes], before: bytes | None, address: str) -> bytes:
    """Say what people should know about the server; return which run of it this is, which was `before` another."""
    log = logging.getLogger("fencelock")
    run_id = info.get(b"run_id", b"")
    if before is None:
        policy = info.get(b"maxmemory_policy", b"noeviction").decode()
        if policy != "noeviction" and info.get(b"maxmemory", b"0") != b"0":
            log.warning(
                "%s may drop locks when its memory is full: maxmemory-policy is %s, and should be noeviction",
                address,
                policy,
            )
    elif before != run_id:
        log.warning("%s is not the server it was: what it had not saved is gone, locks too", address)
    return run_id
