"""Free ports, and folders that the user of a server can access."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
import tempfile
import threading
from pathlib import Path

HOST = "127.0.0.1"
LOWEST_PORT = 10_000
_taken: set[int] = set()
_lock = threading.Lock()


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports on which no process listens, and that this function has not returned before.

    They lie below the range from which the kernel serves outgoing connections. A port inside it could be taken by any
    client while its server is down, and a client that keeps trying a dead loopback port can even connect to itself.
    """
    ports: list[int] = []
    below = _ephemeral_start()
    with _lock:
        while len(ports) < count:
            port = random.randrange(LOWEST_PORT, below)
            if port not in _taken and _is_free(port):
                _taken.add(port)
                ports.append(port)
    return tuple(ports)


def _ephemeral_start() -> int:
    try:
        start = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        start = 32_768
    # If clients may use nearly every port, there is no safe range: use the upper half.
    return start if start > LOWEST_PORT + 2_000 else 65_536


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def new_folder(name: str, owner: tuple[int, int] | None) -> Path:
    """Return a new data folder; with an owner, one that this user can access."""
    parent = next(
        (place for place in (tempfile.gettempdir(), "/tmp", "/var/tmp") if owner is None or _open_to_all(Path(place))),
        None,
    )
    folder = Path(tempfile.mkdtemp(prefix=f"fencelock-{name}-", dir=parent))
    if owner is not None:
        os.chown(folder, *owner)
    return folder


def give(folder: Path, owner: tuple[int, int] | None) -> None:
    """Give a folder and everything in it to another user."""
    if owner is not None:
        os.chown(folder, *owner, follow_symlinks=False)
        for place, folders, files in os.walk(folder):
            for name in (*folders, *files):
                os.chown(os.path.join(place, name), *owner, follow_symlinks=False)


def remove(folder: Path) -> None:
    """Remove a folder that a dying process may still be writing into."""
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    shutil.rmtree(folder)


def _open_to_all(place: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (place, *place.resolve().parents))
