"""What tests ask of a Redis server beside fencelock."""

from __future__ import annotations

import re
import socket
from typing import Any

import redis

from tests.servers.redis import Redis


def tell(server: Redis, *words: Any, db: int = 0) -> Any:
    """Send a command over a connection of its own; return the answer as redis-py gives it."""
    password = server.settings.get("requirepass")
    with redis.Redis(
        host=server.host, port=server.port, db=db, socket_timeout=10, protocol=2, password=password
    ) as client:
        return client.execute_command(*words)


def connections(server: Redis) -> list[dict[str, str]]:
    """Return every connection but the one that asks."""
    return [client for client in tell(server, "CLIENT LIST") if client["cmd"] != "client|list"]


def commands(server: Redis) -> dict[str, int]:
    """Return how often each command was run since the last `CONFIG RESETSTAT`, scripts' own commands included."""
    return {name.removeprefix("cmdstat_"): seen["calls"] for name, seen in tell(server, "INFO", "commandstats").items()}


def only_counters(server: Redis) -> bool:
    """Return whether nothing is stored but the counters of the buckets and the version of the layout."""
    return all(re.fullmatch(rb"fencelock:(layout|\{\d+\})", key) for key in tell(server, "KEYS", "*"))


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
