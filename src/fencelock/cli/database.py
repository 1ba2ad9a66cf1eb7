"""Connect to an application's own database by its URL, for the tables that `fencelock schema` makes there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from math import ceil
from typing import Any

from fencelock.core.urls import module_of, redact
from fencelock.errors import EngineUnavailable, FencelockError, InvalidURL, MissingDependency
from fencelock.sqlio import MYSQL, POSTGRESQL, SQLITE, error_codes

DIALECTS = {
    "sqlite": SQLITE,
    **dict.fromkeys(("postgresql", "postgres", "postgresql+advisory", "postgres+advisory"), POSTGRESQL),
    **dict.fromkeys(("mysql", "mariadb"), MYSQL),
}

_STEPS: list[tuple[set[str], tuple[str, ...], str]] = [
    ({"42501", "1142", "1044", "1227"}, (), "Run it, or what --print writes, as a user who may make tables"),
    ({"3D000", "1049"}, ('" does not exist',), "Make the database first, or name another one in the URL"),
    ({"28P01", "28000", "1045"}, ("authentication failed",), "Look at the user and the password in the URL"),
    (set(), ("unable to open", "readonly"), "Make sure that its folder and file are there, and may be written"),
    (set(), ("not a database",), "Name another file in the URL"),
    (set(), ("locked",), "Try again when nobody writes to it"),
    ({"2003"}, ("refused", "timeout", "timed out", "resolve"), "Make sure that the server runs there"),
]
"""Error codes, words of the message, and what to do. psycopg gives no code for errors of the first connection."""


def dialect_of(url: str) -> str:
    """Return the SQL dialect of the database that a URL names; raise InvalidURL if it names none.

    >>> dialect_of("mariadb://app@db/shop")
    'mysql'
    """
    dialect = DIALECTS.get(url.partition(":")[0].lower())
    if dialect is None:
        raise InvalidURL(f"{redact(url)!r} names no database: give a sqlite:, postgresql: or mysql: URL")
    return dialect


@contextmanager
def connect(url: str) -> Iterator[Any]:
    """Yield a connection of the DB-API, and commit at the end; raise InvalidURL, MissingDependency or EngineUnavailable.

    The engine's own module parses the URL, so that every option (TLS, a Unix socket, a home folder) works here too.
    """
    try:
        with closing(_connect(url)) as connection:
            yield connection
            connection.commit()
    except FencelockError:
        raise
    except Exception as error:
        raise EngineUnavailable(f"{redact(url)}: {redact(str(error))}{next_step(error)}") from error


def _connect(url: str) -> Any:
    dialect = dialect_of(url)
    if dialect == SQLITE:
        import sqlite3

        return sqlite3.connect(_path(url))
    if dialect == POSTGRESQL:
        return _driver("psycopg", url).connect(f"postgresql:{url.partition(':')[2]}")
    return _connect_mysql(url)


def _connect_mysql(url: str) -> Any:
    place = module_of(url).parse(url)
    server = {"unix_socket": place.host} if place.local else {"host": place.host, "port": place.port, "ssl": place.tls}
    connection = _driver("pymysql", url).connect(
        **server,
        user=place.user,
        password=place.password,
        database=place.database,
        connect_timeout=max(1, ceil(place.seconds)),  # PyMySQL requires an int
    )
    if place.tls is not None:
        cursor = connection.cursor()
        cursor.execute("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
        if not cursor.fetchone()[1]:  # older releases of PyMySQL continue without TLS if the server has none
            connection.close()
            raise EngineUnavailable(
                f"{redact(url)}: the server has no TLS; switch it on there, or leave out the ssl options"
            )
    return connection


def next_step(error: Exception) -> str:
    """Return what to do about an error of a database, or "" if the error needs no advice.

    >>> next_step(OSError("attempt to write a readonly database"))
    '. Make sure that its folder and file are there, and may be written'
    """
    said, found = str(error), error_codes(error)
    for numbers, words, advice in _STEPS:
        if found & numbers or any(word in said for word in words):
            return f". {advice}"
    return ""


def _path(url: str) -> str:
    sqlite = module_of(url)
    if sqlite.is_default(url):
        raise InvalidURL(f"{redact(url)!r} names no file: a fence belongs into the application's own database")
    return str(sqlite.path_of(url))


def _driver(name: str, url: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f"{name} is needed to reach {redact(url)} (pip install {name}); or give what `--print` writes to the database's "
            "own program"
        ) from error
