"""An application's own objects in a URL's place: they say how to connect, and their connections are left alone.

A lock lives and dies with its connection, so it never has one that somebody else closes, resets, or puts back into a pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fencelock.core.adopted_client import AdoptedClient, Words, ask_engine, check_engine, ready
from fencelock.core.runtime import Runtime
from fencelock.engines.mysql.place import MODES, PORT, Place, context
from fencelock.errors import EngineUnavailable, InvalidType

CIPHER = "SHOW SESSION STATUS LIKE 'Ssl_cipher'"
HIDDEN = "its connections are encrypted, and only PyMySQL's say how: write ssl_ca into its URL, or give fencelock a URL"


def spelled(words: Words) -> Place:
    """Return what a driver's words mean."""
    text = {name: value.decode() if isinstance(value, bytes) else value for name, value in words.items()}
    database = text.get("database") or text.get("db")
    if not database:
        raise EngineUnavailable("the application's connections have no database, and fencelock's tables need one")
    socket = text.get("unix_socket")
    return Place(
        socket or text.get("host") or "localhost",
        int(text.get("port") or PORT),
        text.get("user") or "",
        text.get("password") or text.get("passwd") or "",
        database,
        None if socket else _tls(text),
    )


def _tls(words: Words) -> Any:
    """Return how to encrypt: as PyMySQL does, which is stricter about a server's name than others are."""
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
    return context(mode, files)


def application(runtime: Runtime, client: Any) -> AdoptedClient[Place]:
    """Return what an object stands for; raise InvalidType if there is no telling, or it belongs to the other colour."""
    if hasattr(client, "get_connection_params"):
        return _django(client)
    if hasattr(client, "dialect"):
        url = check_engine(runtime, client)
        return AdoptedClient(
            lambda: ask_engine(runtime, client, _engine_words), spelled, "the application's engine", url, connects=True
        )
    if not hasattr(client, "ctx"):
        raise InvalidType(
            f"a {type(client).__module__}.{type(client).__name__} does not say how it was connected; give its URL as mysql://"
        )
    words = _attributes(client)  # now: it may be closed by the time it is needed
    return AdoptedClient(lambda: ready(words), spelled, "the application's connection", _url(words))


def _attributes(connection: Any) -> Words:
    """Return what a connection of PyMySQL's was made with."""
    names = ("host", "port", "user", "password", "db", "unix_socket")
    return {**{name: getattr(connection, name) for name in names}, "ssl": connection.ctx if connection.ssl else None}


def _django(connection: Any) -> AdoptedClient[Place]:
    async def find() -> Words:
        words: Words = connection.get_connection_params()
        return words

    settings = connection.settings_dict
    url = _url({"host": settings.get("HOST"), "db": settings.get("NAME")})
    return AdoptedClient(find, spelled, "Django's connection", url)


def _engine_words(engine: Any, connection: Any) -> Words:
    """Return what a connection of the engine's was made with; what its driver does not tell, the URL does."""
    driver = connection.driver_connection
    if hasattr(driver, "ctx"):
        return _attributes(driver)
    cursor = connection.cursor()
    try:
        cursor.execute(CIPHER)
        return _of_url(engine, cursor.fetchone())
    finally:
        cursor.close()


def _of_url(engine: Any, cipher: Any) -> Words:
    """Return what the URL says, unless the engine's arguments beside it say more: then nobody is trusted blindly."""
    _, words = engine.dialect.create_connect_args(engine.url)
    if cipher[1] and _tls(words) is None and not words.get("unix_socket"):
        raise EngineUnavailable(f"the application's engine cannot say how to connect: {HIDDEN}")
    return dict(words)


def _url(words: Words) -> str:
    return f"mysql://{words.get('host') or ''}/{words.get('database') or words.get('db') or ''}"
