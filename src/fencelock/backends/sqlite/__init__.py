"""The SQLite engine, the embedded default: many processes on one machine, no server, nothing to install.

`place` says which file a URL names and whether it may be used, `database` keeps the connection and its transactions,
`engine` does what the protocol of `fencelock.core.backend` asks for.
"""

from __future__ import annotations

from fencelock.backends.sqlite.database import Database
from fencelock.backends.sqlite.engine import SqliteBackend
from fencelock.backends.sqlite.place import path_of
from fencelock.core.world import World


def connect(world: World, url: str, namespace: str) -> SqliteBackend:
    """Return the engine for a `sqlite:` URL. The file is opened when it is first needed."""
    return SqliteBackend(world, Database(path_of(url), world.now), namespace)
