"""The SQLite engine, the embedded default: many processes on one machine, no server, nothing to install.

`place` says which file a URL names and whether its file system is fit, `access` whether this user may use it, `database`
keeps the connection and its transactions, `queue` has the statements and the steps of a transaction, and `engine` does what
`fencelock.core.engine` asks for.
"""

from __future__ import annotations

from fencelock.core.runtime import Runtime
from fencelock.engines.sqlite.database import Database
from fencelock.engines.sqlite.engine import SqliteEngine
from fencelock.engines.sqlite.place import is_default, path_of, url_of


def connect(runtime: Runtime, url: str, namespace: str) -> SqliteEngine:
    """Return the engine for a `sqlite:` URL. The file is opened when it is first needed."""
    path, default = path_of(url), is_default(url)
    engine = SqliteEngine(runtime, Database(path, runtime.now, make_folder=default), namespace)
    engine.url = url_of(path)
    return engine
