"""URLs of ensembles: hosts, chroot, login and TLS."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote

from fencelock.core.runtime import Endpoint
from fencelock.core.urls import redact
from fencelock.errors import EngineUnavailable, InvalidURL

if TYPE_CHECKING:
    from ssl import SSLContext

PORT = 2181
TLS_PORT = 2281
FORM = "zookeeper://[user:password@]host:port,host:port/chroot"


class ZooKeeperUrl(NamedTuple):
    """A parsed URL."""

    hosts: tuple[str, ...]
    chroot: str
    login: str | None
    """`user:password`, for ZooKeeper's digest scheme."""
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __repr__(self) -> str:
        return f"<ZooKeeperUrl {self.name}>"

    def endpoints(self, timeout: float) -> list[Endpoint]:
        """Return where the members listen; raise EngineUnavailable."""
        tls = self._tls_context() if self.tls else None
        hosts = (host.rpartition(":") for host in self.hosts)
        return [Endpoint(name.strip("[]"), int(port), tls, timeout) for name, _, port in hosts]

    def _tls_context(self) -> SSLContext:
        from ssl import create_default_context  # slow to import

        try:
            context = create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ValueError) as error:
            raise EngineUnavailable(f"{self.name}: the TLS files cannot be used: {error}") from error
        return context

    @property
    def name(self) -> str:
        """The hosts and the chroot, for messages: without the password."""
        return ",".join(self.hosts) + self.chroot


def parse(url: str) -> ZooKeeperUrl:
    """Parse a URL; raise InvalidURL."""
    shown = redact(url)
    scheme, _, rest = url.partition("://")
    tls = scheme.lower() in ("zookeepers", "zks")
    rest, _, query = rest.partition("?")
    login, at, rest = rest.rpartition("@")
    listed, slash, chroot = rest.partition("/")
    hosts = tuple(_host(host, TLS_PORT if tls else PORT, shown) for host in listed.split(",")) if listed else ()
    if not hosts:
        raise InvalidURL(f"{shown!r} names no host; write {FORM}")
    if len(set(hosts)) < len(hosts):
        raise InvalidURL(f"{shown!r} names a host twice")
    if at and (not login.partition(":")[0] or ":" not in login):
        raise InvalidURL(f"{shown!r}: a login takes a user and a password; write {FORM}")
    options = {} if not query else dict(parse_qsl(query, keep_blank_values=True))
    for option in options:
        if option not in ("ca", "cert", "key"):
            # The message does not quote it: it may be the end of a password with an unescaped "?".
            raise InvalidURL(f"{shown!r} has an unknown option; the options are ca, cert and key")
        if not tls:
            raise InvalidURL(f"{shown!r}: {option}= is for TLS; write zookeepers://")
        if not os.path.isfile(options[option]):
            raise InvalidURL(f"{shown!r}: {option}= names no file")
    if ("cert" in options) != ("key" in options):
        raise InvalidURL(f"{shown!r}: cert= and key= go together")
    chroot = slash + unquote(chroot).strip("/")
    if any(step in ("", ".", "..") for step in chroot.split("/")[1:]) and chroot != "/":
        raise InvalidURL(f"{shown!r}: the chroot must be a path without empty steps, '.' and '..'")
    return ZooKeeperUrl(hosts, chroot.rstrip("/"), unquote(login) if at else None, tls, **options)


def _host(text: str, port: int, shown: str) -> str:
    host, colon, number = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, number = text, str(port)
    if not host or (":" in host and not host.startswith("[")):
        raise InvalidURL(f"{shown!r} lacks a host, or has one too many colons; write {FORM}")
    if not number.isascii() or not number.isdigit() or not 0 < int(number) < 65536:
        raise InvalidURL(f"{shown!r}: a port must be a number up to 65535")
    return f"{host}:{number}"
