"""PostgreSQL."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import struct

from tests.engines import packages, places, template
from tests.engines.leash import release_memory
from tests.engines.process import Account
from tests.engines.server import Server

INITDB = ("--no-sync", "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-instructions")


class Postgres(Server):
    """A PostgreSQL whose commits are on disk when they are acknowledged; `postgres` logs in without a password."""

    family = "postgres"
    stop_signal = signal.SIGINT

    def url_at(self, address: str) -> str:
        return f"postgresql://postgres@{address}/postgres"

    def query(self, sql: str) -> str:
        """Run a statement through psql; the rows without decoration."""
        words = ("-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", self.url, "-c", sql)
        return template.run(packages.find(self.family, "psql"), *words, folder=self.folder).strip()

    def _account(self) -> Account | None:
        if os.geteuid() != 0:
            return None
        for name in ("postgres", "nobody"):
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            return Account(entry.pw_uid, entry.pw_gid)
        raise RuntimeError("PostgreSQL refuses to run as root, and there is neither a user `postgres` nor `nobody`")

    def _prepare(self) -> None:
        if not any(self.data.iterdir()):
            initdb = packages.find(self.family, "initdb")
            version = template.run(initdb, "--version", folder=self.folder)
            template.fill(
                self.data,
                self.family,
                [version, *INITDB],
                lambda: self._initialise(initdb),
            )
            places.give(self.data, self._owner())
            self.data.chmod(0o700)

    def _initialise(self, initdb: packages.Program) -> None:
        template.run(initdb, *INITDB, "-D", str(self.data), folder=self.folder, account=self._account())

    def _command(self) -> tuple[list[str], packages.Program]:
        program = packages.find(self.family, "postgres")
        settings = {
            "port": str(self.port),
            "listen_addresses": self.host,
            "unix_socket_directories": "",
            "max_connections": "400",
            "shared_buffers": "32MB",
            # Files in the data folder, which go with it: segments in /dev/shm would outlive a kill -9.
            "dynamic_shared_memory_type": "mmap",
            "jit": "off",
            **self.settings,
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(program.path), "-D", str(self.data), *options], program

    def _probe(self, timeout: float) -> None:
        body = struct.pack(">i", 196608) + b"user\0postgres\0database\0postgres\0\0"
        with socket.create_connection((self.host, self.port), timeout) as wire:
            wire.settimeout(timeout)
            wire.sendall(struct.pack(">i", len(body) + 4) + body)
            with wire.makefile("rb") as replies:
                while (kind := replies.read(1)) != b"Z":
                    (length,) = struct.unpack(">i", replies.read(4))
                    content = replies.read(length - 4)
                    if kind == b"E":
                        raise ConnectionError(content.replace(b"\0", b" ").decode(errors="replace"))
            # Said properly, so that the log has no complaint about a lost client.
            wire.sendall(b"X\0\0\0\4")

    def _clean_up(self) -> None:
        release_memory(self.data)
