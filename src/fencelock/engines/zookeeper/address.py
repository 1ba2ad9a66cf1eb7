"""What a URL says: hosts, chroot, login and TLS."""

from __future__ import annotations

import os
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from fencelock.core.urls import redact
from fencelock.errors import InvalidURL

PORT = 2181
TLS_PORT = 2281
FORM = "zookeeper://[user:password@]host:port,host:port/chroot"


class Address(NamedTuple):
    """An ensemble, and our place and rights in it."""

    hosts: tuple[str, ...]
    chroot: str
    login: str | None
    """`user:password`, for ZooKeeper's digest scheme."""
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __repr__(self) -> str:
        return f"<Address {self.name}>"

    @property
    def name(self) -> str:
        """The ensemble for people to see, without a password."""
        return ",".join(self.hosts) + self.chroot


def parse(url: str) -> Address:
    """Return what a URL says, or raise InvalidURL."""
    shown = redact(url)
    scheme, _, rest = url.partition("://")
    tls = scheme.lower() in ("zookeepers", "zks")
    rest, _, query = rest.partition("?")
    login, at, rest = rest.rpartition("@")
    places, slash, chroot = rest.partition("/")
    hosts = tuple(_host(place, TLS_PORT if tls else PORT, shown) for place in places.split(",")) if places else ()
    if not hosts:
        raise InvalidURL(f"{shown!r} names no host; write {FORM}")
    if len(set(hosts)) < len(hosts):
        raise InvalidURL(f"{shown!r} names a host twice")
    if at and (not login.partition(":")[0] or ":" not in login):
        raise InvalidURL(f"{shown!r}: a login takes a user and a password; write {FORM}")
    options = {} if not query else dict(parse_qsl(query, keep_blank_values=True))
    for option in options:
        if option not in ("ca", "cert", "key"):
            # Not quoted: it may be the end of a password in which a ? was not escaped.
            raise InvalidURL(f"{shown!r} has an option that is not known; there are ca, cert and key")
        if not tls:
            raise InvalidURL(f"{shown!r}: {option}= is for TLS; write zookeepers://")
        if not os.path.isfile(options[option]):
            raise InvalidURL(f"{shown!r}: {option}= names no file")
    if ("cert" in options) != ("key" in options):
        raise InvalidURL(f"{shown!r}: cert= and key= go together")
    chroot = slash + unquote(chroot).strip("/")
    if any(step in ("", ".", "..") for step in chroot.split("/")[1:]) and chroot != "/":
        raise InvalidURL(f"{shown!r}: the chroot must be a path without empty steps, '.' and '..'")
    return Address(hosts, chroot.rstrip("/"), unquote(login) if at else None, tls, **options)


def _host(place: str, port: int, shown: str) -> str:
    host, colon, number = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    if not colon:
        host, number = place, str(port)
    if not host or (":" in host and not host.startswith("[")):
        raise InvalidURL(f"{shown!r} lacks a host, or has one too many colons; write {FORM}")
    if not number.isascii() or not number.isdigit() or not 0 < int(number) < 65536:
        raise InvalidURL(f"{shown!r}: a port must be a number up to 65535")
    return f"{host}:{number}"
