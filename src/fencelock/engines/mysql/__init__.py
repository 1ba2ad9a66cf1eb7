"""MySQL and MariaDB. `connect` is what the URL table calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.engines.mysql.engine import MysqlEngine
from fencelock.engines.mysql.links import MysqlSchema
from fencelock.engines.mysql.place import parse

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime


def adopt(runtime: Runtime, client: object, namespace: str) -> MysqlEngine:
    """Connect as an application's own object does, over connections of our own."""
    from fencelock.engines.mysql.application import application

    theirs = application(runtime, client)
    return MysqlEngine(runtime, theirs, namespace, theirs.url)


def schema_for(runtime: Runtime, url: str) -> MysqlSchema:
    """Return what makes the tables in the database that the URL names."""
    return MysqlSchema(runtime, parse(url))


def connect(runtime: Runtime, url: str, namespace: str) -> MysqlEngine:
    """Open `mysql://` or `mariadb://`, which are the same: what it is, the server says."""
    return MysqlEngine(runtime, parse(url), namespace)
