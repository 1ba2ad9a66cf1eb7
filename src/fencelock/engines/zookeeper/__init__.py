"""The ZooKeeper engine: a node for each claim, in a session that the claims of a client share.

`engine` implements the protocol of `fencelock.core.engine`. `queue` creates, finds and removes the nodes of claims; `paths`
has their names and their data; `namespace` has the base of tokens. `session_pool` opens sessions and sends heartbeats; a
`session` reconnects, sends requests, and sets `watches`; `session_clock` says how long the leader must keep it; a
`connection` is one TCP connection to one member; `protocol` has frames, replies and errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.engines.zookeeper.engine import ZooKeeperEngine
from fencelock.engines.zookeeper.url import parse

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime


def connect(runtime: Runtime, url: str, namespace: str) -> ZooKeeperEngine:
    """Open `zookeeper://` or `zookeepers://` (TLS)."""
    return ZooKeeperEngine(runtime, parse(url), namespace)
