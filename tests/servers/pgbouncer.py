"""PgBouncer, in front of a PostgreSQL."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.servers import packages, ports_and_folders
from tests.servers.postgres import Postgres
from tests.servers.process import Account
from tests.servers.server import Server


class PgBouncer(Server):
    """A pooler in transaction mode, unless `settings` say otherwise; all clients connect as `postgres`."""

    family = "pgbouncer"

    def __init__(self, behind: Postgres, **options: Any) -> None:
        super().__init__(**options)
        self.behind = behind

    def url_at(self, address: str) -> str:
        return f"postgresql://postgres@{address}/postgres"

    def _account(self) -> Account | None:
        return self.behind._account()

    def _prepare(self) -> None:
        settings = {
            "listen_addr": self.host,
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": "8",
            **self.settings,
        }
        lines = [
            "[databases]",
            f"postgres = host={self.behind.host} port={self.behind.port} user=postgres",
            "[pgbouncer]",
        ]
        path = self.folder / "pgbouncer.ini"
        path.write_text("\n".join([*lines, *(f"{name} = {value}" for name, value in settings.items())]) + "\n")
        ports_and_folders.give(path, self._owner())

    def _command(self) -> tuple[list[str], packages.Program]:
        program = packages.find(self.family, "pgbouncer")
        return [str(program.path), str(self.folder / "pgbouncer.ini")], program

    def _probe(self, timeout: float) -> None:
        with psycopg.connect(self.url, connect_timeout=max(2, int(timeout)), autocommit=True) as connection:
            connection.execute("SELECT 1")
