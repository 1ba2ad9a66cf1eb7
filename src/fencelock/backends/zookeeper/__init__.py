"""ZooKeeper. `connect` is what the URL table calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.backends.zookeeper.address import parse
from fencelock.backends.zookeeper.engine import ZooKeeperBackend

if TYPE_CHECKING:
    from fencelock.core.world import World


def connect(world: World, url: str, namespace: str) -> ZooKeeperBackend:
    """Open `zookeeper://` or `zookeepers://` (TLS)."""
    return ZooKeeperBackend(world, parse(url), namespace)
