"""The SQLite engine, the embedded default: many processes on one machine, no server, nothing to install.

`place` says which file a URL names and whether its file system is fit, `access` whether this user may use it, `database`
keeps the connection and its transactions, `queue` has the statements and the steps of a transaction, and `engine` does what
`fencelock.core.backend` asks for.
"""

from __future__ import annotations

from fencelock.backends.sqlite.database import Database
from fencelock.backends.sqlite.engine import SqliteBackend
from fencelock.backends.sqlite.place import is_default, path_of, url_of
from fencelock.core.world import World


def connect(world: World, url: str, namespace: str) -> SqliteBackend:
    """Return the engine for a `sqlite:` URL. The file is opened when it is first needed."""
    path, default = path_of(url), is_default(url)
    backend = SqliteBackend(world, Database(path, world.now, make_folder=default), namespace)
    backend.url = url_of(path)
    return backend
