"""An application's own database, by its URL: for what `fencelock schema` makes there beside an engine's tables."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from urllib.parse import unquote, urlsplit

from fencelock.core.urls import redact
from fencelock.errors import EngineUnavailable, InvalidURL, MissingDependency
from fencelock.sqlio import MYSQL, POSTGRESQL, SQLITE

DIALECTS = {
    "sqlite": SQLITE,
    **dict.fromkeys(("postgresql", "postgres", "postgresql+advisory", "postgres+advisory"), POSTGRESQL),
    **dict.fromkeys(("mysql", "mariadb"), MYSQL),
}


def dialect_of(url: str) -> str:
    """Return the language of the database that a URL names; raise InvalidURL if it names none.

    >>> dialect_of("mariadb://app@db/shop")
    'mysql'
    """
    dialect = DIALECTS.get(url.partition(":")[0].lower())
    if dialect is None:
        raise InvalidURL(f"{redact(url)!r} names no database: give a sqlite:, postgresql: or mysql: URL")
    return dialect


def connect(url: str) -> Any:
    """Return a connection of the DB-API; raise InvalidURL, MissingDependency or EngineUnavailable."""
    dialect = dialect_of(url)
    try:
        if dialect == SQLITE:
            import sqlite3

            return sqlite3.connect(_path(url))
        if dialect == POSTGRESQL:
            return _driver("psycopg", url).connect(f"postgresql:{url.partition(':')[2]}")
        parts = urlsplit(url)
        options = {"host": parts.hostname or "localhost", "port": parts.port or 3306}
        options |= {"user": unquote(parts.username or ""), "password": unquote(parts.password or "")}
        return _driver("pymysql", url).connect(**options, database=unquote(parts.path.strip("/")))
    except (InvalidURL, MissingDependency):
        raise
    except Exception as error:
        raise EngineUnavailable(f"{redact(url)}: {redact(str(error))}") from error


def _path(url: str) -> str:
    path = unquote(url.partition(":")[2])
    path = path[2:] if path.startswith("//") else path
    if not path.strip("/"):
        raise InvalidURL(f"{redact(url)!r} names no file: a fence belongs into the application's own database")
    return path


def _driver(name: str, url: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f"{name} is needed to reach {redact(url)} (pip install {name}); or give what `--print` writes to the database's "
            "own program"
        ) from error
