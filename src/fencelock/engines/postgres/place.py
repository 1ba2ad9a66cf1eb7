"""Which server a URL names, as libpq reads it: with all parameters that it knows, PG* variables and pgpass included."""

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

DIAL_SECONDS = 5.0
"""How long connecting may take, unless the URL has a connect_timeout."""

KEYWORDS = frozenset(option.keyword.decode() for option in Conninfo.get_defaults())
"""All that libpq can be told; other arguments that a driver takes are its own."""
ESCAPED = "a password's /, ?, # and @ are written %2F, %3F, %23 and %40"


class Place(NamedTuple):
    """A server, or several of which one is to take writes."""

    attempts: tuple[bytes, ...]
    """What to connect with, host after host: each has its own time, which libpq does not see to by itself."""
    address: str
    """For people."""
    seconds: float

    def __repr__(self) -> str:
        return f"Place({self.address!r})"  # the rest has the password in it


def parse(url: str) -> Place:
    """Return the place that a URL names; raise InvalidURL."""
    scheme, _, rest = url.partition(":")
    if not rest.startswith("//"):
        raise InvalidURL(f"{redact(url)!r} is no URL of a server; write {scheme.lower()}://user@host/database")
    try:
        given = Conninfo.parse(f"postgresql:{rest}".encode())
    except Error as error:
        # libpq's own words may quote what stands where a password was meant to be.
        named = search(r'invalid URI query parameter: "(\w+)"', str(error))
        if named is not None and "@" not in rest.partition("?")[2]:
            raise InvalidURL(f"{redact(url)!r}: libpq knows no parameter {named[1]!r}") from None
        raise InvalidURL(f"{redact(url)!r} is not a URL that libpq understands: {ESCAPED}") from None
    words = {option.keyword.decode(): option.val.decode() for option in given if option.val is not None}
    defaults = {option.keyword.decode(): option.val for option in Conninfo.get_defaults() if option.val is not None}
    seconds = DIAL_SECONDS
    try:
        seconds = float(words.pop("connect_timeout", "0")) or DIAL_SECONDS
    except ValueError:
        raise InvalidURL(f"{redact(url)!r}: connect_timeout is a number of seconds") from None
    words |= {"client_encoding": "UTF8"}
    words.setdefault("application_name", "fencelock")
    hosts = words.get("host", "").split(",")
    addresses = words.get("hostaddr", "").split(",")
    ports = words.get("port", "").split(",")
    number = max(len(hosts), len(addresses))
    if len(ports) == 1:
        ports *= number
    if not all(port.isdigit() or not port for port in ports):
        raise InvalidURL(f"{redact(url)!r}: a port is a number; {ESCAPED}")
    if len(ports) != number or (len(addresses) not in (1, number)) or (len(hosts) not in (1, number)):
        raise InvalidURL(f"{redact(url)!r}: as many ports as hosts, please")
    if number > 1:
        words.setdefault("target_session_attrs", "read-write")
    attempts = []
    for place in range(number):
        mine = dict(words)
        for word, values in (("host", hosts), ("hostaddr", addresses), ("port", ports)):
            value = values[place] if len(values) == number else values[0]
            mine.pop(word, None)
            if value:
                mine[word] = value
        attempts.append(make_conninfo("", **mine).encode())
    host = words.get("host") or words.get("hostaddr") or _text(defaults.get("host")) or "the local server"
    port = words.get("port") or _text(defaults.get("port"))
    database = words.get("dbname") or _text(defaults.get("dbname")) or ""
    return Place(tuple(attempts), f"postgresql at {host}{f':{port}' if port else ''}/{database}", seconds)


def spelled(words: Mapping[str, Any]) -> Place:
    """Return the place that an application's own connection parameters name; it says nothing of what they do not set."""
    given = {word: str(value) for word, value in words.items() if word in KEYWORDS and value not in (None, "")}
    given.pop("application_name", None)  # ours are not the application's: administrators should see whose they are
    return parse("postgresql://?" + "&".join(f"{word}={quote(value, safe='')}" for word, value in given.items()))


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode(errors="replace")
