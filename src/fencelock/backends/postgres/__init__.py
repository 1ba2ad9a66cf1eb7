"""PostgreSQL: `postgresql://` keeps locks in rows, `postgresql+advisory://` in the server's own advisory locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.backends.postgres.place import ADVISORY, parse

if TYPE_CHECKING:
    from fencelock.core.backend import Backend, Schema
    from fencelock.core.world import World


def connect(world: World, url: str, namespace: str) -> Backend:
    """Open the engine that the URL's scheme names."""
    if url.partition(":")[0].lower() in ADVISORY:
        from fencelock.backends.postgres.advisory.engine import AdvisoryBackend

        return AdvisoryBackend(world, parse(url), namespace)
    from fencelock.backends.postgres.rows import RowsBackend

    return RowsBackend(world, parse(url), namespace)


def adopt(world: World, client: object, namespace: str) -> Backend:
    """Keep locks in rows of the database that an application's own object connects to, over connections of our own."""
    from fencelock.backends.postgres.application import application
    from fencelock.backends.postgres.rows import RowsBackend

    theirs = application(world, client)
    return RowsBackend(world, theirs, namespace, theirs.url)


def schema_for(world: World, url: str) -> Schema:
    """Return what makes the schema in the database that the URL names."""
    from fencelock.backends.postgres.schema import DatabaseSchema

    return DatabaseSchema(world, parse(url))
