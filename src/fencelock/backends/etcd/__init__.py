"""etcd. `connect` is what the URL table calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.backends.etcd.engine import EtcdBackend
from fencelock.backends.etcd.place import parse

if TYPE_CHECKING:
    from fencelock.core.world import World


def connect(world: World, url: str, namespace: str) -> EtcdBackend:
    """Open `etcd://` or, with TLS, `etcds://`."""
    return EtcdBackend(world, parse(url), namespace)
