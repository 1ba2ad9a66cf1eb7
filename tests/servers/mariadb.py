"""MariaDB, or MySQL instead, which Debian does not have: see `unpacked`."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pymysql
from pymysql.constants import CLIENT

from tests.servers import certificate, packages, template
from tests.servers.server import Server

INSTALL = ("--skip-test-db", "--auth-root-authentication-method=normal", "--skip-name-resolve")
# Small files, because they are copied for every server. The durability of commits is the default.
SMALL = {
    "innodb-log-file-size": "8M",
    "innodb-data-file-path": "ibdata1:8M:autoextend",
    "innodb-buffer-pool-size": "32M",
}


class MariaDB(Server):
    """A MariaDB whose commits are on disk when they are acknowledged; `root` logs in without a password."""

    family = "mariadb"

    def url_at(self, address: str) -> str:
        return f"mysql://root@{address}/fencelock"

    def query(self, sql: str) -> str:
        """Run a statement through the command-line client; return the rows without headings."""
        where = ("--no-defaults", "--protocol=tcp", f"--host={self.host}", f"--port={self.port}", "--user=root")
        arguments = (*where, "--batch", "--skip-column-names", "fencelock", "-e", sql)
        return template.run(packages.find(self.family, "mariadb"), *arguments, folder=self.folder).strip()

    def _prepare(self) -> None:
        if not any(self.data.iterdir()):
            server = packages.find(self.family, "mariadbd")
            version = template.run(server, "--no-defaults", "--version", folder=self.folder)
            recipe = [version, *INSTALL, *(f"{name}={value}" for name, value in SMALL.items())]
            template.fill(self.data, self.family, recipe, lambda: self._initialise(server))
            # As in every MariaDB, a database is a folder.
            (self.data / "fencelock").mkdir(exist_ok=True)

    def _initialise(self, server: packages.Program) -> None:
        installer = packages.find(self.family, "mariadb-install-db")
        arguments = ("--no-defaults", f"--basedir={server.prefix / 'usr'}", f"--datadir={self.data}", *INSTALL)
        template.run(installer, *arguments, *self._options(), folder=self.folder)

    def _options(self) -> list[str]:
        # Each server has its own folder for temporary tables: in a shared one, two servers could remove each other's.
        settings = {**SMALL, "innodb-flush-method": "fsync", "tmpdir": str(self.folder), **self.settings}
        # Without this option MariaDB refuses to run as root.
        user = ["--user=root"] if os.geteuid() == 0 else []
        return [*user, *(f"--{name}={value}" for name, value in settings.items())]

    def _command(self) -> tuple[list[str], packages.Program]:
        program = packages.find(self.family, "mariadbd")
        return [
            str(program.path),
            "--no-defaults",
            f"--basedir={program.prefix / 'usr'}",
            f"--datadir={self.data}",
            f"--socket={self.folder / 'socket'}",
            f"--pid-file={self.folder / 'pid'}",
            f"--bind-address={self.host}",
            f"--port={self.port}",
            "--skip-name-resolve",
            "--max-connections=1000",
            "--performance-schema=off",
            *self._options(),
        ], program

    def _probe(self, timeout: float) -> None:
        with socket.create_connection((self.host, self.port), timeout) as sock:
            sock.settimeout(timeout)
            with sock.makefile("rb") as replies:
                header = replies.read(4)
                greeting = replies.read(int.from_bytes(header[:3], "little"))
        # Version 10 of the protocol; anything else is an error packet or a closed connection.
        if not greeting.startswith(b"\x0a"):
            raise ConnectionError(f"MariaDB greets with {greeting[:80]!r}")


def unpacked() -> Path | None:
    """Return the folder of an unpacked MySQL server, if there is one: then the tests run on it instead of MariaDB."""
    where = os.environ.get("FENCELOCK_MYSQL")
    return Path(where) if where else None


class MySQL(MariaDB):
    """A MySQL, from packages that were unpacked by hand."""

    def query(self, sql: str) -> str:
        """Run statements; return the rows as the command-line client prints them."""
        found = []
        with pymysql.connect(
            host=self.host, port=self.port, user="root", database="fencelock", autocommit=True,
            client_flag=CLIENT.MULTI_STATEMENTS,
        ) as connection, connection.cursor() as cursor:  # fmt: skip
            try:
                cursor.execute(sql)
                found += cursor.fetchall()
                while cursor.nextset():
                    found += cursor.fetchall()
            except pymysql.MySQLError as error:
                raise RuntimeError(f"{sql}: {error}") from error
        return "\n".join("\t".join("NULL" if value is None else str(value) for value in row) for row in found)

    def _prepare(self) -> None:
        if not any(self.data.iterdir()):
            program, arguments = self._program()
            template.fill(self.data, "mysql", [str(program.path)], lambda: self._initialise(program, arguments))
        (self.folder / "first.sql").write_text("CREATE DATABASE IF NOT EXISTS fencelock;\n")

    def _initialise(self, server: packages.Program, arguments: Sequence[str] = ()) -> None:
        template.run(server, *arguments, f"--datadir={self.data}", "--initialize-insecure", folder=self.folder)

    def _program(self) -> tuple[packages.Program, list[str]]:
        prefix = unpacked()
        assert prefix is not None
        share = prefix / "usr" / "share" / "mysql"
        user = ["--user=root"] if os.geteuid() == 0 else []
        arguments = [
            "--no-defaults", *user, f"--basedir={prefix / 'usr'}", f"--lc-messages-dir={share}",
            f"--character-sets-dir={share / 'charsets'}", f"--plugin-dir={prefix / 'usr' / 'lib' / 'mysql' / 'plugin'}",
            "--innodb-buffer-pool-size=32M", "--innodb-redo-log-capacity=16M", "--secure-file-priv=",
        ]  # fmt: skip
        return packages.Program(prefix / "usr" / "sbin" / "mysqld", prefix), arguments

    def _command(self) -> tuple[list[str], packages.Program]:
        program, arguments = self._program()
        more = [f"--{name}={value}" for name, value in self.settings.items()]
        return [
            str(program.path), *arguments, f"--datadir={self.data}", f"--socket={self.folder / 'socket'}",
            f"--pid-file={self.folder / 'pid'}", f"--bind-address={self.host}", f"--port={self.port}", "--mysqlx=OFF",
            f"--tmpdir={self.folder}", "--max-connections=1000", "--disable-log-bin", "--tls-version=",
            f"--init-file={self.folder / 'first.sql'}", *more,
        ], program  # fmt: skip


def sql_server(**options: Any) -> MariaDB:
    """Return the server that the tests of MySQL's engine run on."""
    return MySQL(**options) if unpacked() else MariaDB(**options)


class MariaDBTls(MariaDB):
    """A MariaDB that also accepts TLS, with a self-signed certificate."""

    @property
    def certificate(self) -> Path:
        """The certificate that a client has to trust."""
        return self.folder / "certificate.pem"

    @property
    def tls_url(self) -> str:
        """The URL for TLS with a verified certificate and host."""
        return f"{self.url}?ssl-ca={self.certificate}"

    def _prepare(self) -> None:
        key = self.folder / "key.pem"
        certificate.make(self.certificate, key, self.host)
        super()._prepare()
        self.settings |= {"ssl-cert": str(self.certificate), "ssl-key": str(key)}
