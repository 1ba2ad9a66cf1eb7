"""MySQL and MariaDB. `connect` is what the URL table calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.backends.mysql.engine import MysqlBackend
from fencelock.backends.mysql.links import MysqlSchema
from fencelock.backends.mysql.place import parse

if TYPE_CHECKING:
    from fencelock.core.world import World


def adopt(world: World, client: object, namespace: str) -> MysqlBackend:
    """Connect as an application's own object does, over connections of our own."""
    from fencelock.backends.mysql.application import application

    theirs = application(world, client)
    return MysqlBackend(world, theirs, namespace, theirs.url)


def schema_for(world: World, url: str) -> MysqlSchema:
    """Return what makes the tables in the database that the URL names."""
    return MysqlSchema(world, parse(url))


def connect(world: World, url: str, namespace: str) -> MysqlBackend:
    """Open `mysql://` or `mariadb://`, which are the same: what it is, the server says."""
    return MysqlBackend(world, parse(url), namespace)
