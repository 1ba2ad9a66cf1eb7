"""PostgreSQL."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import struct
from functools import cache
from pathlib import Path
from typing import Any

from tests.servers import certificate, packages, ports_and_folders, template
from tests.servers.lifeline import release_memory
from tests.servers.process import Account
from tests.servers.server import Server

INITDB = ("--no-sync", "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-instructions")
# Copying the initial data takes longer than the server's start, so they are small: a short log, and no spare template.
SMALL = ("--wal-segsize=1",)
LEAVE_OUT = (
    "UPDATE pg_database SET datistemplate = false WHERE datname = 'template0'\nDROP DATABASE template0\nCHECKPOINT\n"
)


class Postgres(Server):
    """A PostgreSQL whose commits are on disk when they are acknowledged; `postgres` logs in without a password."""

    family = "postgres"
    stop_signal = signal.SIGINT

    def url_at(self, address: str) -> str:
        return f"postgresql://postgres@{address}/postgres"

    def query(self, sql: str) -> str:
        """Run a statement through psql; return the rows without headings."""
        arguments = ("-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", self.url, "-c", sql)
        return template.run(packages.find(self.family, "psql"), *arguments, folder=self.folder).strip()

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
            template.fill(
                self.data, self.family, [_version(initdb), *INITDB, *SMALL, LEAVE_OUT], lambda: self._initialise(initdb)
            )
            ports_and_folders.give(self.data, self._owner())
            self.data.chmod(0o700)

    def _initialise(self, initdb: packages.Program) -> None:
        account = self._account()
        template.run(initdb, *INITDB, *SMALL, "-D", str(self.data), folder=self.folder, account=account)
        alone = ("--single", "-D", str(self.data), "postgres")
        template.run(
            packages.find(self.family, "postgres"), *alone, folder=self.folder, account=account, feed=LEAVE_OUT
        )

    def _command(self) -> tuple[list[str], packages.Program]:
        program = packages.find(self.family, "postgres")
        settings = {
            "port": str(self.port),
            "listen_addresses": self.host,
            "unix_socket_directories": "",
            "max_connections": "400",
            "shared_buffers": "32MB",
            # Shared memory in files of the data folder, removed with it: segments in /dev/shm would outlive a kill -9.
            "dynamic_shared_memory_type": "mmap",
            "jit": "off",
            "max_wal_size": "1GB",  # as it is with segments of the usual length
            **self.settings,
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(program.path), "-D", str(self.data), *options], program

    def _probe(self, timeout: float) -> None:
        body = struct.pack(">i", 196608) + b"user\0postgres\0database\0postgres\0\0"
        with socket.create_connection((self.host, self.port), timeout) as sock:
            sock.settimeout(timeout)
            sock.sendall(struct.pack(">i", len(body) + 4) + body)
            with sock.makefile("rb") as replies:
                while (kind := replies.read(1)) != b"Z":
                    (length,) = struct.unpack(">i", replies.read(4))
                    content = replies.read(length - 4)
                    if kind == b"E":
                        raise ConnectionError(content.replace(b"\0", b" ").decode(errors="replace"))
            # A proper end, so that the server does not log a lost client.
            sock.sendall(b"X\0\0\0\4")

    def _clean_up(self) -> None:
        release_memory(self.data)


@cache
def _version(program: packages.Program) -> str:
    return template.run(program, "--version", folder=Path("/"))


class PostgresTls(Postgres):
    """A PostgreSQL that also accepts TLS, with a self-signed certificate."""

    @property
    def certificate(self) -> Path:
        """The certificate that a client has to trust."""
        return self.folder / "certificate.pem"

    @property
    def tls_url(self) -> str:
        """The URL for TLS with a verified certificate and host."""
        return f"{self.url}?sslmode=verify-full&sslrootcert={self.certificate}"

    def _prepare(self) -> None:
        key = self.folder / "key.pem"
        certificate.make(self.certificate, key, self.host)
        ports_and_folders.give(key, self._owner())
        super()._prepare()
        self.settings |= {"ssl": "on", "ssl_cert_file": str(self.certificate), "ssl_key_file": str(key)}


class PostgresStandby(Postgres):
    """A hot standby: a copy of another server that follows it."""

    def __init__(self, primary: Postgres, **options: Any) -> None:
        super().__init__(**options)
        self.primary = primary

    def _prepare(self) -> None:
        if not any(self.data.iterdir()):
            copy = packages.find(self.family, "pg_basebackup")
            arguments = ("-D", str(self.data), "-d", self.primary.url, "-R", "-X", "stream", "-c", "fast")
            template.run(copy, *arguments, folder=self.folder, account=self._account())
            self.data.chmod(0o700)


# Any user may mount in its own namespace. The second namespace is there because the server refuses to run as root.
SMALL_DISK = """
mount -t tmpfs -o size="$2" none "$1" && shift 2 && exec unshare --user --map-user=1000 --map-group=1000 "$@"
"""


class PostgresSmallDisk(Postgres):
    """A PostgreSQL with a tablespace `small`, the default for new tables, on a disk of limited size."""

    size = 1_500_000

    @property
    def disk(self) -> Path:
        """The path of the small disk in the server's namespace."""
        return self.folder / "disk"

    def _command(self) -> tuple[list[str], packages.Program]:
        command, program = super()._command()
        self.disk.mkdir(exist_ok=True)
        ports_and_folders.give(self.disk, self._owner())
        shell = ["/usr/bin/unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-c", SMALL_DISK, "sh"]
        return [*shell, str(self.disk), str(self.size), *command], program
