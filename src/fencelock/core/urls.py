"""Find the engine that a URL names. An engine's module is imported on first use."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from fencelock.errors import InvalidURL, MissingDependency

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Protocol, TypeAlias

    from psycopg import AsyncConnection, Connection
    from psycopg_pool import AsyncConnectionPool, ConnectionPool
    from sqlalchemy import Engine as SqlAlchemyEngine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from fencelock.core.engine import Engine, Schema
    from fencelock.core.runtime import Runtime

    class DjangoConnection(Protocol):
        """`django.db.connection`, or one of `django.db.connections`."""

        vendor: str
        settings_dict: dict[str, Any]

        def get_connection_params(self) -> dict[str, Any]: ...

    class PyMysqlConnection(Protocol):
        """A connection of PyMySQL, which has no type hints."""

        host: Any
        db: Any
        unix_socket: Any

    Database: TypeAlias = (
        Connection[Any]
        | AsyncConnection[Any]
        | ConnectionPool[Any]
        | AsyncConnectionPool[Any]
        | SqlAlchemyEngine
        | AsyncEngine
        | DjangoConnection
        | PyMysqlConnection
    )
    """An application's own database object, which `connect` accepts instead of a URL."""


T = TypeVar("T")


class EngineModule(NamedTuple):
    """The module of an engine, which has `connect(runtime, url, namespace)`, and the extra that installs its driver."""

    module: str
    extra: str | None = None


ENGINES: dict[str, EngineModule] = {
    "memory": EngineModule("fencelock.engines.memory"),
    "sqlite": EngineModule("fencelock.engines.sqlite"),
    **dict.fromkeys(
        (
            "redis",
            "rediss",
            "unix",
            "valkey",
            "valkeys",
            "redis+sentinel",
            "rediss+sentinel",
            "valkey+sentinel",
            "valkeys+sentinel",
        ),
        EngineModule("fencelock.engines.redis", "redis"),
    ),
    **dict.fromkeys(("zookeeper", "zookeepers", "zk", "zks"), EngineModule("fencelock.engines.zookeeper", "zookeeper")),
    **dict.fromkeys(("redlock", "redlocks"), EngineModule("fencelock.engines.redlock", "redlock")),
    **dict.fromkeys(("etcd", "etcds"), EngineModule("fencelock.engines.etcd", "etcd")),
    **dict.fromkeys(("postgresql", "postgres"), EngineModule("fencelock.engines.postgres", "postgres")),
    **dict.fromkeys(
        ("postgresql+advisory", "postgres+advisory"), EngineModule("fencelock.engines.postgres_advisory", "postgres")
    ),
    **dict.fromkeys(("mysql", "mariadb"), EngineModule("fencelock.engines.mysql", "mysql")),
}

KNOWN = "sqlite:, redis://, redlock://, etcd://, zookeeper://, postgresql://, mysql:// and memory://"
"""The engines for messages, one scheme each. Their pages in the docs name the others, for TLS, Sentinel and so on."""

PORTS = {"6379": "redis", "2379": "etcd", "2181": "zookeeper", "5432": "postgresql", "3306": "mysql"}
"""The scheme that host:port without a scheme probably means."""

NO_CLUSTER = (
    "fencelock does not support Redis Cluster; use redis:// with a server of its own, redis+sentinel://, or redlock:// with "
    "several servers"
)

CLIENTS = {
    "redis": ENGINES["redis"],
    **dict.fromkeys(("psycopg", "psycopg_pool"), ENGINES["postgresql"]),
    **dict.fromkeys(("pymysql", "MySQLdb", "aiomysql", "asyncmy", "mysql"), ENGINES["mysql"]),
}
"""Engines that accept an object of a driver, by the driver's package: `adopt(runtime, client, namespace)`."""

TOOLKITS: dict[str, Callable[[Any], object]] = {
    "sqlalchemy": lambda client: client.dialect.name,
    "django": lambda client: client.vendor,
}
"""Packages for several databases, and how to get the scheme of the database from one of their objects."""


class FromEnvironment(str):
    """A URL from $FENCELOCK_URL: errors name the variable."""

    __slots__ = ()


def resolve(url: T | None) -> T | str:
    """Return the given URL or client, else $FENCELOCK_URL, else the URL of SQLite in the user's state folder."""
    if url is None:
        given = os.environ.get("FENCELOCK_URL")
        if given is not None and not given.strip():
            # Probably a variable for a server was empty. With the default, each machine would have its own locks.
            raise InvalidURL("$FENCELOCK_URL is empty; name an engine there, or unset it to use SQLite on this machine")
        return "sqlite://" if given is None else FromEnvironment(given)
    return url


def open_engine(runtime: Runtime, url: object, namespace: str) -> Engine:
    """Return the engine of a URL or of a driver's object; raise InvalidURL or MissingDependency."""
    if not isinstance(url, str):
        return _adopt(runtime, url, namespace)
    if isinstance(url, FromEnvironment):
        try:
            return open_engine(runtime, str(url), namespace)
        except InvalidURL as error:
            raise InvalidURL(f"$FENCELOCK_URL: {error}") from error.__cause__
    return cast("Callable[[Runtime, str, str], Engine]", module_of(url).connect)(runtime, url, namespace)


def module_of(url: str) -> ModuleType:
    """Return the module of the engine that a URL names; raise InvalidURL or MissingDependency."""
    scheme, colon, rest = url.partition(":")
    scheme = scheme.lower()
    engine = (ENGINES.get(scheme) or _installed(scheme)) if colon else None
    if engine is None or (engine.extra is not None and _port(rest) in PORTS):  # redis:6379 is a host and its port
        raise InvalidURL(_unknown(url))
    return _load(scheme, engine)


def _installed(scheme: str) -> EngineModule | None:
    """Return the engine that another package has registered for the scheme, under the entry point `fencelock.engines`.

    The entry point names a module with `connect(runtime, url, namespace)`.
    """
    from importlib.metadata import entry_points

    found = next(iter(entry_points(group="fencelock.engines", name=scheme)), None)
    return None if found is None else EngineModule(found.module)


def _load(scheme: str, engine: EngineModule) -> ModuleType:
    try:
        return import_module(engine.module)
    except ImportError as error:
        if engine.extra is None:
            raise
        raise MissingDependency(
            f"{scheme}:// needs a driver that is not installed ({error}): pip install 'fencelock[{engine.extra}]'"
        ) from error


def _adopt(runtime: Runtime, client: object, namespace: str) -> Engine:
    """Return the engine for an application's own client, connection, pool or SQLAlchemy engine."""
    if isinstance(client, os.PathLike):
        raise InvalidURL(_unknown(os.fsdecode(client)))
    for kind in type(client).__mro__:
        package = kind.__module__.partition(".")[0]
        scheme, engine = package, CLIENTS.get(package)
        if package in TOOLKITS:
            with suppress(AttributeError):
                scheme = str(TOOLKITS[package](client))
                engine = ENGINES.get(scheme)
        adopt = None if engine is None else getattr(_load(scheme, engine), "adopt", None)
        if adopt is not None:
            return cast("Callable[[Runtime, object, str], Engine]", adopt)(runtime, client, namespace)
    kind = type(client)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}."
    raise InvalidURL(
        f"a URL must be a str such as 'sqlite:////var/lib/app/locks.db', not {where}{kind.__name__}; {TAKEN}"
    )


TAKEN = (
    "connect() also accepts a client of redis-py, a connection of psycopg or PyMySQL, a pool of psycopg_pool, and an "
    "engine of SQLAlchemy or a connection of Django (django.db.connection) to PostgreSQL or MySQL"
)


def open_schema(runtime: Runtime, url: str) -> Schema | None:
    """Return the `Schema` of the engine that the URL names, or None if the engine has no tables.

    The module of an engine with tables has `schema_for(runtime, url)`.
    """
    make = getattr(module_of(url), "schema_for", None)
    return None if make is None else cast("Callable[[Runtime, str], Schema]", make)(runtime, url)


def shown(url: object, engine: Engine) -> str:
    """Return the URL for messages: without its password, and with the path of the default."""
    return redact(getattr(engine, "url", None) or str(url))


def _unknown(url: str) -> str:
    """Return the error message for a URL that names no engine, with a guess of what was meant."""
    scheme, colon, rest = url.partition(":")
    kind, _, driver = scheme.lower().partition("+")
    if driver == "cluster":
        return f"{redact(url)!r}: {NO_CLUSTER}"
    meant = None
    if redact(url) != url:
        pass  # it has a password, and a guess could show a part of it
    elif url.lower() in ENGINES:
        meant = f"{url.lower()}://"
    elif _port(rest) in PORTS:
        meant = f"{PORTS[_port(rest)]}://{url}"
    elif url and (not colon or url[0] in "/.~"):
        path = url.replace("%", "%25").replace("?", "%3F").replace("#", "%23")
        meant = f"sqlite:{'///' if url[0] == '/' else ''}{path}"
    if meant is None and colon and kind and not _port(rest).isdecimal():
        from difflib import get_close_matches  # the import takes 3 ms, and only a wrong URL needs it

        meant = next((redact(f"{near}:{rest}") for near in get_close_matches(kind, ENGINES, n=1)), None)
    guess = "" if meant is None else f" Did you mean {meant}?"
    return f"{redact(url)!r} names no engine.{guess} The engines are {KNOWN}"


def _port(rest: str) -> str:
    """Return the part that is a port if the URL is host:port without a scheme: 6379 of localhost:6379/0."""
    return rest.partition("/")[0]


def redact(url: str) -> str:
    """Return the URL without its password, for messages.

    >>> redact("redis://app:s3cret@db:6379/0?password=x&db=1")
    'redis://app:***@db:6379/0?password=***&db=1'
    """
    if "@" not in url and "=" not in url:
        return url
    import re  # most URLs have no password and do not need it

    # The last @ ends the credentials: a password may contain an @, / or ? that was not escaped. Hiding too much does no
    # harm. The password is also hidden without a scheme, with a wrong one, and after a slash too many.
    start, slashes, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    rest = re.sub(r"(?s)^([^:@?#]*:).*@", r"\1***@", rest)
    rest = re.sub(r"(?is)(\w*(?:pass|secret|token|pwd)\w*\s*=\s*)('[^']*'|[^\s&;#]*)", r"\1***", rest)
    return f"{start}{slashes}{rest}"
