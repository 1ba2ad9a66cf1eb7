"""etcd. `connect` is what the URL table calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.engines.etcd.place import parse

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime


def connect(runtime: Runtime, url: str, namespace: str) -> EtcdEngine:
    """Open `etcd://` or, with TLS, `etcds://`."""
    return EtcdEngine(runtime, parse(url), namespace)
