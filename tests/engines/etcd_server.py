"""What the tests of etcd ask the server itself, past fencelock: counts, leases, compaction, users."""

from __future__ import annotations

import base64
import itertools
import os
import urllib.request
from typing import Any

from tests.servers.etcd import Etcd

_numbers = itertools.count()


def own_prefix(url: str) -> str:
    """Return the URL with a prefix that nobody else uses."""
    return f"{url}/backends-{os.getpid()}-{next(_numbers)}"


def counted(server: Etcd, name: str, **labels: str) -> float:
    """Return the sum of a counter over all its labels but these."""
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    values = [
        float(line.rpartition(" ")[2])
        for line in lines
        if line.partition("{")[0].partition(" ")[0] == name and all(label in line for label in wanted)
    ]
    return sum(values)


def messages(server: Etcd, method: str) -> float:
    """Return how many messages of a kind the server has received."""
    return counted(server, "grpc_server_msg_received_total", grpc_method=method)


def leases(server: Etcd) -> list[str]:
    """Return the numbers of all leases."""
    return [lease["ID"] for lease in server.call("/v3/lease/leases", {}).get("leases", [])]


def revoke(server: Etcd, lease: str) -> None:
    """End a lease, as an operator may."""
    server.call("/v3/lease/revoke", {"ID": lease})


def keys(server: Etcd, prefix: str) -> list[str]:
    """Return all keys that begin with a prefix."""
    return [pair["key"] for pair in pairs(server, prefix)]


def pairs(server: Etcd, prefix: str) -> list[dict[str, Any]]:
    """Return all keys that begin with a prefix, and what is known of them."""
    start = prefix.encode()
    end = start[:-1] + bytes((start[-1] + 1,))
    found = server.call("/v3/kv/range", {"key": _pack(start), "range_end": _pack(end)}).get("kvs", [])
    return [{**pair, "key": base64.b64decode(pair["key"]).decode()} for pair in found]


def delete(server: Etcd, key: str) -> None:
    """Delete a key, as an operator may."""
    server.call("/v3/kv/deleterange", {"key": _pack(key.encode())})


def compact(server: Etcd) -> None:
    """Forget all of the past."""
    revision = server.call("/v3/kv/range", {"key": _pack(b"x")})["header"]["revision"]
    server.call("/v3/kv/compaction", {"revision": revision, "physical": True})


def add_users(server: Etcd, password: str, *, prefix: str = "/") -> None:
    """Make a root and a user `app` that may use the keys below a prefix, and turn authentication on."""
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    server.call("/v3/auth/user/add", {"name": "root", "password": password})
    server.call("/v3/auth/user/grant", {"user": "root", "role": "root"})
    server.call("/v3/auth/role/add", {"name": "app"})
    permission = {"permType": "READWRITE", "key": _pack(prefix.encode()), "range_end": _pack(end.encode())}
    server.call("/v3/auth/role/grant", {"name": "app", "perm": permission})
    server.call("/v3/auth/user/add", {"name": "app", "password": password})
    server.call("/v3/auth/user/grant", {"user": "app", "role": "app"})
    server.call("/v3/auth/enable", {})


def change_role(server: Etcd, password: str) -> None:
    """Add a role once there are users: it changes the auth store, and tokens that name its revision are old then."""
    token = server.call("/v3/auth/authenticate", {"name": "root", "password": password})["token"]
    server.call("/v3/auth/role/add", {"name": f"role-{next(_numbers)}"}, token=token)


def _pack(data: bytes) -> str:
    return base64.b64encode(data).decode()
