"""`postgresql://`: locks in rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.engines.postgres.url import parse

if TYPE_CHECKING:
    from fencelock.core.engine import Engine, Schema
    from fencelock.core.runtime import Runtime


def connect(runtime: Runtime, url: str, namespace: str) -> Engine:
    """Open the engine that keeps locks in rows."""
    from fencelock.engines.postgres.rows import RowsEngine

    return RowsEngine(runtime, parse(url), namespace)


def adopt(runtime: Runtime, client: object, namespace: str) -> Engine:
    """Open the engine on the database that an application's own object connects to, over connections of its own."""
    from fencelock.engines.postgres.adopted_client import adopted_client
    from fencelock.engines.postgres.rows import RowsEngine

    adopted = adopted_client(runtime, client)
    return RowsEngine(runtime, adopted, namespace, adopted.url)


def schema_for(runtime: Runtime, url: str) -> Schema:
    """Return the schema of the database that the URL names."""
    from fencelock.engines.postgres.schema import DatabaseSchema

    return DatabaseSchema(runtime, parse(url))
