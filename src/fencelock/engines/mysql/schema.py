"""The tables of a database, for `fencelock schema`."""

from __future__ import annotations

from fencelock.core.runtime import Runtime
from fencelock.engines.mysql import statements as sql
from fencelock.engines.mysql.pool import MySQLPool
from fencelock.engines.mysql.url import MySQLUrl


class MySQLSchema:
    """`fencelock.core.engine.Schema` of one database."""

    def __init__(self, runtime: Runtime, url: MySQLUrl) -> None:
        self._pool = MySQLPool(runtime, url)
        self._database = url.database

    def text(self) -> str:
        """Return the statements that create the tables, with comments."""
        return sql.script()

    def grants(self) -> str:
        """Return the privileges that another user needs."""
        database = self._database.replace("`", "``")
        return f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.* TO 'app'@'%';\n"

    async def apply(self) -> bool:
        """Create the tables, as every first connection does; return False if they existed."""
        try:
            await self._pool.get()
        finally:
            self._pool.close()
        return self._pool.created
