"""etcd. The URL table calls `connect`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.engines.etcd.url import parse

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime


def connect(runtime: Runtime, url: str, namespace: str) -> EtcdEngine:
    """Open `etcd://`, or `etcds://` with TLS."""
    return EtcdEngine(runtime, parse(url), namespace)
