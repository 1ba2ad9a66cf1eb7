"""The SQLite engine, the embedded default: many processes on one machine, no server, nothing to install.

`paths` finds the file that a URL names and checks its file system, `access` checks the user's permissions, `opening` opens or
creates the database, `database` owns the connection, `transactions` runs steps on it in either runtime, `queue` has the
statements and steps of locks, and `engine` implements the protocol of `fencelock.core.engine`.
"""

from __future__ import annotations

from fencelock.core.runtime import Runtime
from fencelock.engines.sqlite.database import Database
from fencelock.engines.sqlite.engine import SqliteEngine
from fencelock.engines.sqlite.paths import is_default, path_of, url_of


def connect(runtime: Runtime, url: str, namespace: str) -> SqliteEngine:
    """Return the engine for a `sqlite:` URL. The file is opened when it is first needed."""
    path, default = path_of(url), is_default(url)
    engine = SqliteEngine(runtime, Database(path, runtime.now, make_folder=default), namespace)
    engine.url = url_of(path)
    return engine
