"""The first commands on a connection: subscribe to its channel, and check that this release can use the server."""

from __future__ import annotations

from fencelock.core.log import WARNING, log
from fencelock.core.runtime import NO_REPLY, Command, Runtime
from fencelock.engines.redis.connection import RedisConnection
from fencelock.engines.redis.errors import HINTS, raise_for_error
from fencelock.errors import EngineUnavailable

LAYOUT = "2"
"""The version of the stored data. Releases with different versions must not share a namespace."""


async def shake_hands(
    runtime: Runtime, connection: RedisConnection, address: str, namespace: str, timeout: float
) -> dict[bytes, bytes]:
    """Return the server's INFO. Raise EngineUnavailable for a cluster node, an unknown layout, or a missing permission."""
    layout = f"{namespace}:layout"
    commands: list[Command] = [("SUBSCRIBE", connection.channel), ("INFO",), ("GET", layout)]
    requests = [(connection.raw, command) for command in commands]
    replies = await runtime.request_all(requests, timeout, lambda replies: NO_REPLY not in replies)
    _, info_reply, stored = replies
    raise_for_error(info_reply, address)
    info = dict(line.split(b":", 1) for line in info_reply.splitlines() if b":" in line)
    # Check this before the other replies: a cluster node would refuse GET with MOVED, which says less. Valkey reports
    # server_mode instead of redis_mode.
    if b"cluster" in (info.get(b"redis_mode"), info.get(b"server_mode")):
        raise EngineUnavailable(f"{address}: {HINTS['MOVED']}")
    for reply in replies:
        raise_for_error(reply, address)
    if stored is None:
        raise_for_error(await connection.raw.request(("SET", layout, LAYOUT, "NX"), timeout), address)
    elif stored != LAYOUT.encode():
        raise EngineUnavailable(
            f"{address}: the namespace {namespace!r} was written by another release of fencelock (layout "
            f"{stored.decode(errors='replace')}, this one has {LAYOUT}); use another namespace, or upgrade"
        )
    return info


def warn_about_server(info: dict[bytes, bytes], previous_run_id: bytes | None, address: str) -> bytes:
    """Log a risky eviction policy on the first connection, and a restarted server later. Return the server's run id."""
    run_id = info.get(b"run_id", b"")
    if previous_run_id is None:
        policy = info.get(b"maxmemory_policy", b"noeviction").decode()
        if policy != "noeviction" and info.get(b"maxmemory", b"0") != b"0":
            message = (
                f"{address} may drop locks when its memory is full: set maxmemory-policy, now {policy}, to noeviction"
            )
            log("redis", WARNING, message)
    elif previous_run_id != run_id:
        log("redis", WARNING, f"{address} was restarted or replaced: locks that it had not saved are lost")
    return run_id
