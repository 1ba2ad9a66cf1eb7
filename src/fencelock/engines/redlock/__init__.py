"""Fenced Redlock. `core/urls.py` calls `connect`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fencelock.core.engine import FIRST_CONNECT_TIMEOUT
from fencelock.core.urls import redact
from fencelock.engines.redis.connector import RedisConnector, from_url
from fencelock.engines.redlock.engine import RedlockEngine
from fencelock.errors import InvalidURL

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime

_log = logging.getLogger("fencelock")


def connect(runtime: Runtime, url: str, namespace: str) -> RedlockEngine:
    """Open `redlock://[user:password@]host:port,host:port,…[/db][?options]`; `redlocks://` for TLS.

    A node without a login takes that of the first node. Raise InvalidURL.
    """
    scheme, _, rest = url.partition("://")
    server = "rediss" if scheme.lower().endswith("s") else "redis"
    location, question, options = rest.partition("?")
    hosts, slash, database = location.partition("/")
    tail = f"/{database}{question}{options}" if slash or question else ""
    if "," in database:
        raise InvalidURL(f"{redact(url)!r}: the database stands once, behind all nodes, as in redlock://h1,h2,h3/0")
    first = ""
    connectors: list[RedisConnector] = []
    for part in hosts.split(","):
        login, at, host = part.strip().rpartition("@")
        if not host:
            raise InvalidURL(
                f"{redact(url)!r}: redlock:// takes the addresses of its nodes, as in redlock://h1:6379,h2,h3"
            )
        first = first or f"{login}{at}"
        try:
            if connectors and at and ":" not in login:
                raise InvalidURL("a user without a password, and not of the first node")
            connectors.append(
                from_url(f"{server}://{f'{login}{at}' or first}{host}{tail}", FIRST_CONNECT_TIMEOUT, redact(url))
            )
        except InvalidURL:
            if "@" not in hosts.partition(",")[2]:
                raise
            # Nothing of this part is quoted: it may be half a password.
            raise InvalidURL(
                f"{redact(url)!r}: every node is given as host:port or user:password@host:port, and a password's comma is "
                "written %2C"
            ) from None
    addresses = [connector.address for connector in connectors]
    if len(set(addresses)) < len(addresses):
        twice = next(address for address in addresses if addresses.count(address) > 1)
        raise InvalidURL(f"{redact(url)!r} names {twice} twice; Redlock needs nodes that fail on their own")
    better = max(3, len(connectors) | 1)
    if len(connectors) < better:
        _log.warning(
            "Redlock over %d node%s survives the loss of %d; %d nodes would survive %d: use an odd number, and 3 at least",
            len(connectors),
            "" if len(connectors) == 1 else "s",
            (len(connectors) - 1) // 2,
            better,
            better // 2,
        )
    return RedlockEngine(runtime, connectors, namespace)
