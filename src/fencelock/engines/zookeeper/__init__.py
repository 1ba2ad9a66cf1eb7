"""ZooKeeper. `connect` is what the URL table calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.engines.zookeeper.engine import ZooKeeperEngine
from fencelock.engines.zookeeper.url import parse

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime


def connect(runtime: Runtime, url: str, namespace: str) -> ZooKeeperEngine:
    """Open `zookeeper://` or `zookeepers://` (TLS)."""
    return ZooKeeperEngine(runtime, parse(url), namespace)
