"""Which engine a URL names. Engines are imported when they are asked for, so that nobody pays for what is not used."""

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
        """A connection of PyMySQL's, which has no types of its own."""

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
    """What an application connects to a database with, and may hand in instead of a URL."""


T = TypeVar("T")


class EngineModule(NamedTuple):
    """A line of the table: the module that has `connect(world, url, namespace)`, and the extra that brings its driver."""

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
"""The engines, for people: one scheme for each. Their pages name the others, for TLS, Sentinel and so on."""

PORTS = {"6379": "redis", "2379": "etcd", "2181": "zookeeper", "5432": "postgresql", "3306": "mysql"}
"""What somebody probably means who writes host:port without a scheme."""

NO_CLUSTER = (
    "fencelock does not support Redis Cluster; use redis:// with a server of its own, redis+sentinel://, or redlock:// with "
    "several servers"
)

CLIENTS = {
    "redis": ENGINES["redis"],
    **dict.fromkeys(("psycopg", "psycopg_pool"), ENGINES["postgresql"]),
    **dict.fromkeys(("pymysql", "MySQLdb", "aiomysql", "asyncmy", "mysql"), ENGINES["mysql"]),
}
"""Engines that take a client of their users' driver, by the driver's package; `adopt(world, client, namespace)`."""

TOOLKITS: dict[str, Callable[[Any], object]] = {
    "sqlalchemy": lambda client: client.dialect.name,
    "django": lambda client: client.vendor,
}
"""Packages whose clients speak to several databases, and how each says which: by the name that its URLs begin with."""


class FromEnvironment(str):
    """A URL that stood in $FENCELOCK_URL: what is wrong with it is said of that."""

    __slots__ = ()


def resolve(url: T | None) -> T | str:
    """Return what is meant: the URL or client given, else $FENCELOCK_URL, else SQLite in the user's state folder."""
    if url is None:
        given = os.environ.get("FENCELOCK_URL")
        if given is not None and not given.strip():
            # Somebody meant a server, and a variable of theirs was empty: with the default each machine would lock alone.
            raise InvalidURL("$FENCELOCK_URL is empty; name an engine there, or unset it to use SQLite on this machine")
        return "sqlite://" if given is None else FromEnvironment(given)
    return url


def open_engine(runtime: Runtime, url: object, namespace: str) -> Engine:
    """Return the engine that the URL names, or that a driver's client speaks to; raise InvalidURL or MissingDependency."""
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
    """Return the engine for an object of the application's own that knows a server."""
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
    "of objects, these are taken: a client of redis-py, a connection of psycopg or PyMySQL, a pool of psycopg_pool, and an "
    "engine of SQLAlchemy or a connection of Django (django.db.connection) to PostgreSQL or MySQL"
)


def open_schema(runtime: Runtime, url: str) -> Schema | None:
    """Return what makes the tables of the engine that the URL names, or None if it needs none.

    An engine that needs some has `schema_for(world, url)` in its module.
    """
    make = getattr(module_of(url), "schema_for", None)
    return None if make is None else cast("Callable[[Runtime, str], Schema]", make)(runtime, url)


def shown(url: object, engine: Engine) -> str:
    """Return the URL for people to see: without its password, and what a default stands for in its place."""
    return redact(getattr(engine, "url", None) or str(url))


def _unknown(url: str) -> str:
    """Return what is wrong with a URL that names no engine, and what its writer may have meant."""
    scheme, colon, rest = url.partition(":")
    kind, _, driver = scheme.lower().partition("+")
    if driver == "cluster":
        return f"{redact(url)!r}: {NO_CLUSTER}"
    meant = None
    if redact(url) != url:
        pass  # it has a password: a guess could show a part of it
    elif url.lower() in ENGINES:
        meant = f"{url.lower()}://"
    elif _port(rest) in PORTS:
        meant = f"{PORTS[_port(rest)]}://{url}"
    elif url and (not colon or url[0] in "/.~"):
        path = url.replace("%", "%25").replace("?", "%3F").replace("#", "%23")
        meant = f"sqlite:{'///' if url[0] == '/' else ''}{path}"
    if meant is None and colon and kind and not _port(rest).isdecimal():
        from difflib import get_close_matches  # 3 ms that only a slip of the pen should pay

        meant = next((redact(f"{near}:{rest}") for near in get_close_matches(kind, ENGINES, n=1)), None)
    guess = "" if meant is None else f" Did you mean {meant}?"
    return f"{redact(url)!r} names no engine.{guess} The engines are {KNOWN}"


def _port(rest: str) -> str:
    """Return what would be the port if a host stood in the place of the scheme: 6379 in localhost:6379/0."""
    return rest.partition("/")[0]


def redact(url: str) -> str:
    """Return the URL without its password, for people to see.

    >>> redact("redis://app:s3cret@db:6379/0?password=x&db=1")
    'redis://app:***@db:6379/0?password=***&db=1'
    """
    if "@" not in url and "=" not in url:
        return url
    import re  # most URLs have nothing to hide and need not pay for it

    # The last @ ends the credentials: a password may contain an @, / or ? that was not escaped. Rather too much than
    # too little: nobody needs to see what stands there. Without a scheme, or with a wrong one, it is hidden all the same, and
    # after a slash too many.
    start, slashes, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    rest = re.sub(r"(?s)^([^:@?#]*:).*@", r"\1***@", rest)
    rest = re.sub(r"(?is)(\w*(?:pass|secret|token|pwd)\w*\s*=\s*)('[^']*'|[^\s&;#]*)", r"\1***", rest)
    return f"{start}{slashes}{rest}"
