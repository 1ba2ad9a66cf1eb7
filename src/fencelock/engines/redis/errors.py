"""Translates a server's error replies into fencelock's errors."""

from __future__ import annotations

from typing import Any

from fencelock.core.runtime import NO_REPLY
from fencelock.engines.redis.connector import ServerError
from fencelock.errors import EngineUnavailable, OutcomeUnknown

HINTS = {
    "LOADING": "it is still reading its data",
    "READONLY": "it is a replica: connect to the master, or through Sentinel",
    "MASTERDOWN": "it is a replica that has lost its master",
    "OOM": "it is out of memory",
    "MISCONF": "it cannot save its data",
    "NOREPLICAS": "too few of its replicas are connected",
    "BUSY": "it is busy with somebody's script",
    "NOAUTH": "give the password in the URL",
    "NOPERM": "the user needs `+@all -@dangerous +info`, and all keys and channels that begin with the namespace",
    **dict.fromkeys(
        ("MOVED", "CROSSSLOT", "CLUSTERDOWN"),
        "it is a node of a Redis Cluster, which this release does not know; use a server of its own, redis+sentinel://, or "
        "redlock:// over several",
    ),
}
NO_PERMISSION_IN_SCRIPT = "The user executing the script can't", "ACL failure in script"
"""How servers report a missing permission inside a script: the first until Redis 7.0, the second since 7.2."""
RECONNECT_KINDS = frozenset({"LOADING", "READONLY", "MASTERDOWN", "NOAUTH", "MOVED"})
"""After these errors a new connection may reach a server that can do it."""


def reconnect_may_help(error: EngineUnavailable) -> bool:
    """Return whether a new connection may reach a server that can do what this one refused."""
    return isinstance(error.__cause__, ServerError) and error.__cause__.kind in RECONNECT_KINDS


def raise_for_error(reply: Any, address: str) -> None:
    """Raise OutcomeUnknown for a missing reply, and EngineUnavailable with a hint for an error reply."""
    if reply is NO_REPLY:
        raise OutcomeUnknown(f"{address}: no answer")
    if isinstance(reply, ServerError):
        kind = "NOPERM" if any(words in str(reply) for words in NO_PERMISSION_IN_SCRIPT) else reply.kind
        hint = HINTS.get(kind)
        raise EngineUnavailable(f"{address} refused: {reply}" + (f" ({hint})" if hint else "")) from reply
