"""What the members of an ensemble say of themselves, for `doctor`: version, role, latencies, ticks."""

from __future__ import annotations

import socket
from contextlib import suppress

from fencelock.engines.zookeeper.address import Address

WORDS = {"mntr": "\t", "srvr": ": ", "conf": "="}
"""ZooKeeper's four-letter words, and what stands between a key and its value; most servers allow only srvr."""
SECONDS = 2.0


def facts(address: Address) -> dict[str, dict[str, str]]:
    """Return what each host says, empty for one that cannot be asked: it is down, or has TLS only. It blocks."""
    return {host: {} if address.tls else _ask_all(host) for host in address.hosts}


def _ask_all(host: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word, between in WORDS.items():
        with suppress(OSError):
            for line in _ask(host, word).splitlines():
                key, there, value = line.partition(between)
                if there:
                    found[key.strip()] = value.strip()
    return found


def _ask(host: str, word: str) -> str:
    name, _, port = host.rpartition(":")
    with socket.create_connection((name.strip("[]"), int(port)), SECONDS) as sock:
        sock.sendall(word.encode())
        answer = b""
        while chunk := sock.recv(65536):
            answer += chunk
    return answer.decode("utf-8", "replace")
