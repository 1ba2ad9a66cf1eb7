"""The server that a URL names, as libpq reads it: with all of its parameters, PG* variables and pgpass included."""

from __future__ import annotations

from collections.abc import Mapping
from re import search
from typing import Any, NamedTuple
from urllib.parse import quote

from psycopg import Error
from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo

from fencelock.core.urls import redact
from fencelock.errors import InvalidURL

CONNECT_TIMEOUT = 5.0
"""Seconds to connect to one host, unless the URL has a connect_timeout."""

KEYWORDS = frozenset(option.keyword.decode() for option in Conninfo.get_defaults())
"""The parameters that libpq knows; a driver may take others of its own."""
ESCAPED = "a password's /, ?, # and @ are written %2F, %3F, %23 and %40"


class PostgresUrl(NamedTuple):
    """A server, or several hosts of which the client uses one that takes writes."""

    conninfos: tuple[bytes, ...]
    """One conninfo string per host, so that each host has a timeout of its own; libpq has one for all."""
    address: str
    """For messages."""
    timeout: float

    def __repr__(self) -> str:
        return f"PostgresUrl({self.address!r})"  # the conninfos contain the password


def parse(url: str) -> PostgresUrl:
    """Parse a URL; raise InvalidURL."""
    scheme, _, rest = url.partition(":")
    if not rest.startswith("//"):
        raise InvalidURL(f"{redact(url)!r} is no URL of a server; write {scheme.lower()}://user@host/database")
    try:
        options = Conninfo.parse(f"postgresql:{rest}".encode())
    except Error as error:
        # libpq's message may quote a part of the password.
        named = search(r'invalid URI query parameter: "(\w+)"', str(error))
        if named is not None and "@" not in rest.partition("?")[2]:
            raise InvalidURL(f"{redact(url)!r}: libpq knows no parameter {named[1]!r}") from None
        raise InvalidURL(f"{redact(url)!r} is not a URL that libpq understands: {ESCAPED}") from None
    params = {option.keyword.decode(): option.val.decode() for option in options if option.val is not None}
    defaults = {option.keyword.decode(): option.val for option in Conninfo.get_defaults() if option.val is not None}
    timeout = CONNECT_TIMEOUT
    try:
        timeout = float(params.pop("connect_timeout", "0")) or CONNECT_TIMEOUT
    except ValueError:
        raise InvalidURL(f"{redact(url)!r}: connect_timeout is a number of seconds") from None
    params |= {"client_encoding": "UTF8"}
    params.setdefault("application_name", "fencelock")
    hosts = params.get("host", "").split(",")
    addresses = params.get("hostaddr", "").split(",")
    ports = params.get("port", "").split(",")
    number = max(len(hosts), len(addresses))
    if len(ports) == 1:
        ports *= number
    if not all(port.isdigit() or not port for port in ports):
        raise InvalidURL(f"{redact(url)!r}: a port is a number; {ESCAPED}")
    if len(ports) != number or (len(addresses) not in (1, number)) or (len(hosts) not in (1, number)):
        raise InvalidURL(f"{redact(url)!r}: as many ports as hosts, please")
    if number > 1:
        params.setdefault("target_session_attrs", "read-write")
    conninfos = []
    for index in range(number):
        of_host = dict(params)
        for keyword, values in (("host", hosts), ("hostaddr", addresses), ("port", ports)):
            value = values[index] if len(values) == number else values[0]
            of_host.pop(keyword, None)
            if value:
                of_host[keyword] = value
        conninfos.append(make_conninfo("", **of_host).encode())
    host = params.get("host") or params.get("hostaddr") or _text(defaults.get("host")) or "the local server"
    port = params.get("port") or _text(defaults.get("port"))
    database = params.get("dbname") or _text(defaults.get("dbname")) or ""
    return PostgresUrl(tuple(conninfos), f"postgresql at {host}{f':{port}' if port else ''}/{database}", timeout)


def from_params(params: Mapping[str, Any]) -> PostgresUrl:
    """Return the URL for an application's own connection parameters. libpq's defaults fill in the others."""
    given = {word: str(value) for word, value in params.items() if word in KEYWORDS and value not in (None, "")}
    given.pop("application_name", None)  # administrators must be able to tell our connections from the application's
    return parse("postgresql://?" + "&".join(f"{word}={quote(value, safe='')}" for word, value in given.items()))


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode(errors="replace")
