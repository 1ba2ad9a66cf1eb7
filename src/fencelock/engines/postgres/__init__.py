"""`postgresql://`: locks in rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.engines.postgres.place import parse

if TYPE_CHECKING:
    from fencelock.core.engine import Engine, Schema
    from fencelock.core.runtime import Runtime


def connect(runtime: Runtime, url: str, namespace: str) -> Engine:
    """Open the engine that keeps locks in rows."""
    from fencelock.engines.postgres.rows import RowsEngine

    return RowsEngine(runtime, parse(url), namespace)


def adopt(runtime: Runtime, client: object, namespace: str) -> Engine:
    """Keep locks in rows of the database that an application's own object connects to, over connections of our own."""
    from fencelock.engines.postgres.application import application
    from fencelock.engines.postgres.rows import RowsEngine

    theirs = application(runtime, client)
    return RowsEngine(runtime, theirs, namespace, theirs.url)


def schema_for(runtime: Runtime, url: str) -> Schema:
    """Return what makes the schema in the database that the URL names."""
    from fencelock.engines.postgres.schema import DatabaseSchema

    return DatabaseSchema(runtime, parse(url))
