"""MySQL and MariaDB. The URL table calls `connect`, `adopt` and `schema_for`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.engines.mysql.engine import MySQLEngine
from fencelock.engines.mysql.schema import MySQLSchema
from fencelock.engines.mysql.url import parse

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime


def adopt(runtime: Runtime, client: object, namespace: str) -> MySQLEngine:
    """Connect to the same server as an application's own object, over connections of the engine's own."""
    from fencelock.engines.mysql.adopted_client import adopted_client

    adopted = adopted_client(runtime, client)
    return MySQLEngine(runtime, adopted, namespace, adopted.url)


def schema_for(runtime: Runtime, url: str) -> MySQLSchema:
    """Return the schema of the database that the URL names."""
    return MySQLSchema(runtime, parse(url))


def connect(runtime: Runtime, url: str, namespace: str) -> MySQLEngine:
    """Open a `mysql://` or `mariadb://` URL. Both mean the same: the server tells which of the two it is."""
    return MySQLEngine(runtime, parse(url), namespace)
