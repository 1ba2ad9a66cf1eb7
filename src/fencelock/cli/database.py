"""An application's own database, by its URL: for what `fencelock schema` makes there beside an engine's tables."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from urllib.parse import unquote, urlsplit

from fencelock.core.urls import redact
from fencelock.errors import EngineUnavailable, InvalidURL, MissingDependency
from fencelock.sqlio import MYSQL, POSTGRESQL, SQLITE, codes

DIALECTS = {
    "sqlite": SQLITE,
    **dict.fromkeys(("postgresql", "postgres", "postgresql+advisory", "postgres+advisory"), POSTGRESQL),
    **dict.fromkeys(("mysql", "mariadb"), MYSQL),
}


_STEPS: list[tuple[set[str], tuple[str, ...], str]] = [
    (
        {"42501", "1142", "1044", "1227"},
        (),
        "Run it as a user who may make tables, or have such a user run what --print writes",
    ),
    ({"3D000", "1049"}, ('" does not exist',), "Make the database first, or name another one in the URL"),
    ({"28P01", "28000", "1045"}, ("authentication failed",), "Look at the user and the password in the URL"),
    (set(), ("unable to open", "readonly"), "Make sure that its folder and file are there, and may be written"),
    (set(), ("not a database",), "Name another file in the URL"),
    (set(), ("locked",), "Try again when nobody writes to it"),
    ({"2003"}, ("refused", "timeout", "timed out", "resolve"), "Make sure that the server runs there"),
]
"""What databases say, by number or by word, and what to do about it. psycopg has no number for what goes wrong at first."""


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
        if not parts.path.strip("/"):
            raise InvalidURL(f"{redact(url)!r} names no database on the server: add it, as in mysql://app@db/shop")
        options = {"host": parts.hostname or "localhost", "port": parts.port or 3306}
        options |= {"user": unquote(parts.username or ""), "password": unquote(parts.password or "")}
        return _driver("pymysql", url).connect(**options, database=unquote(parts.path.strip("/")))
    except (InvalidURL, MissingDependency):
        raise
    except Exception as error:
        raise EngineUnavailable(f"{redact(url)}: {redact(str(error))}{next_step(error)}") from error


def next_step(error: Exception) -> str:
    """Return what to do about an error of a database, or nothing where it speaks for itself.

    >>> next_step(OSError("attempt to write a readonly database"))
    '. Make sure that its folder and file are there, and may be written'
    """
    said, found = str(error), codes(error)
    for numbers, words, advice in _STEPS:
        if found & numbers or any(word in said for word in words):
            return f". {advice}"
    return ""


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
