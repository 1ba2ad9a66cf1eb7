"""An application's own objects instead of a URL: PyMySQL connections, SQLAlchemy engines, Django connections.

The engine reads how they connect and opens connections of its own. A lock ends with its connection, so it must not use one
that the application may close, reset, or return to a pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fencelock.core.adopted_client import AdoptedClient, Arguments, adopt_django, adopt_engine, ready
from fencelock.core.runtime import Runtime
from fencelock.engines.mysql.url import MODES, PORT, MySQLUrl, tls_context
from fencelock.errors import EngineUnavailable, InvalidType

CIPHER = "SHOW SESSION STATUS LIKE 'Ssl_cipher'"
HIDDEN = "its connections are encrypted, and only PyMySQL's say how: write ssl_ca into its URL, or give fencelock a URL"


def url_from_arguments(words: Arguments) -> MySQLUrl:
    """Return the URL that a driver's connection arguments stand for."""
    text = {name: value.decode() if isinstance(value, bytes) else value for name, value in words.items()}
    database = text.get("database") or text.get("db")
    if not database:
        raise EngineUnavailable("the application's connections have no database, and fencelock's tables need one")
    socket = text.get("unix_socket")
    return MySQLUrl(
        socket or text.get("host") or "localhost",
        int(text.get("port") or PORT),
        text.get("user") or "",
        text.get("password") or text.get("passwd") or "",
        database,
        None if socket else _tls(text),
    )


def _tls(words: Arguments) -> Any:
    """Return the TLS context. As in PyMySQL, the server's name is checked unless the arguments say otherwise."""
    given = words.get("ssl")
    if hasattr(given, "wrap_bio"):
        return given
    files = {f"ssl-{name}": words[f"ssl_{name}"] for name in ("ca", "cert", "key") if words.get(f"ssl_{name}")}
    check = words.get("ssl_verify_identity", True)
    if isinstance(given, Mapping):
        files |= {f"ssl-{name}": str(given[name]) for name in ("ca", "cert", "key") if given.get(name)}
        check = given.get("check_hostname", True)
    mode = str(words.get("ssl_mode") or "").upper()
    if mode not in MODES:
        mode = ("VERIFY_IDENTITY" if check else "VERIFY_CA") if "ssl-ca" in files else "REQUIRED"
        if not files and not given:
            return None
    return tls_context(mode, files)


def adopted_client(runtime: Runtime, client: Any) -> AdoptedClient[MySQLUrl]:
    """Adopt an object. Raises InvalidType if it does not tell how it connects, or belongs to the other runtime."""
    if hasattr(client, "get_connection_params"):
        return adopt_django(client, url_from_arguments, "mysql")
    if hasattr(client, "dialect"):
        return adopt_engine(runtime, client, url_from_arguments, _engine_arguments)
    if not hasattr(client, "ctx"):
        raise InvalidType(
            f"a {type(client).__module__}.{type(client).__name__} does not say how it was connected; give its URL as mysql://"
        )
    words = _attributes(client)  # read now: the application may close it before the first use
    url = f"mysql://{words['host'] or ''}/{words['db'] or ''}"
    return AdoptedClient(lambda: ready(words), url_from_arguments, "the application's connection", url)


def _attributes(connection: Any) -> Arguments:
    """Return the arguments of a PyMySQL connection."""
    names = ("host", "port", "user", "password", "db", "unix_socket")
    return {**{name: getattr(connection, name) for name in names}, "ssl": connection.ctx if connection.ssl else None}


def _engine_arguments(engine: Any, connection: Any) -> Arguments:
    """Return the arguments of an SQLAlchemy engine: from a PyMySQL connection, else from the engine's URL."""
    driver = connection.driver_connection
    if hasattr(driver, "ctx"):
        return _attributes(driver)
    cursor = connection.cursor()
    try:
        cursor.execute(CIPHER)
        return _arguments_of_url(engine, cursor.fetchone())
    finally:
        cursor.close()


def _arguments_of_url(engine: Any, cipher: Any) -> Arguments:
    """Return the arguments in the engine's URL.

    Raises EngineUnavailable if the engine encrypts and its URL does not tell how: fencelock would connect without TLS.
    """
    _, words = engine.dialect.create_connect_args(engine.url)
    if cipher[1] and _tls(words) is None and not words.get("unix_socket"):
        raise EngineUnavailable(f"the application's engine cannot say how to connect: {HIDDEN}")
    return dict(words)
