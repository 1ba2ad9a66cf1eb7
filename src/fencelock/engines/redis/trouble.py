"""What a server's errors mean: the one place where they are translated."""

from __future__ import annotations

from typing import Any

from fencelock.core.runtime import NO_REPLY
from fencelock.engines.redis.dial import ServerError
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
NOT_IN_SCRIPTS = "The user executing the script can't", "ACL failure in script"
"""What a user may not do inside a script is told as any other error of a script: so until Redis 7.0, so from 7.2 on."""
ANEW = frozenset({"LOADING", "READONLY", "MASTERDOWN", "NOAUTH", "MOVED"})
"""After these, connecting anew may lead to a server that can do it."""


def leads_elsewhere(error: EngineUnavailable) -> bool:
    """Return whether connecting anew may lead to a server that can do what this one refused."""
    return isinstance(error.__cause__, ServerError) and error.__cause__.kind in ANEW


def check(answer: Any, address: str) -> None:
    """Raise what is to be raised for a server's error, or for no answer."""
    if answer is NO_REPLY:
        raise OutcomeUnknown(f"{address}: no answer")
    if isinstance(answer, ServerError):
        kind = "NOPERM" if any(words in str(answer) for words in NOT_IN_SCRIPTS) else answer.kind
        hint = HINTS.get(kind)
        raise EngineUnavailable(f"{address} refused: {answer}" + (f" ({hint})" if hint else "")) from answer
