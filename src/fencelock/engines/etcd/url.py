"""etcd URLs: the endpoints, the prefix of all keys, TLS, user and password."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from fencelock.core.urls import redact
from fencelock.errors import InvalidURL

if TYPE_CHECKING:
    from ssl import SSLContext

PORT = 2379
HELP = "an etcd URL is etcd://[user:password@]host:port,host:port/prefix, or etcds://…?ca=…&cert=…&key=… for TLS"


class EtcdUrl(NamedTuple):
    """The parts of a URL."""

    endpoints: tuple[tuple[str, int], ...]
    prefix: str
    user: str
    password: str
    tls: SSLContext | None

    def __repr__(self) -> str:
        return f"<EtcdUrl {', '.join(f'{host}:{port}' for host, port in self.endpoints)}>"


def parse(url: str) -> EtcdUrl:
    """Parse a URL. Raises InvalidURL, which never quotes what may be a part of a password."""
    parts = _split(url)
    if parts is None:  # outside the except block: its error would quote parts of the URL
        raise InvalidURL(
            f"{redact(url)!r}: {HELP}; a password's /, ?, #, @ and comma are written %2F, %3F, %23, %40 and %2C"
        )
    encrypted, login, endpoints, path, options = parts
    if set(options) - ({"ca", "cert", "key"} if encrypted else set()):
        raise InvalidURL(f"{redact(url)!r}: unknown options; {HELP}")
    user, _, password = login.partition(":")
    if bool(user) != bool(password):
        raise InvalidURL(f"{redact(url)!r}: give both user and password, or none; {HELP}")
    tls = _tls(url, options) if encrypted else None
    return EtcdUrl(endpoints, unquote(path).rstrip("/"), unquote(user), unquote(password), tls)


def _split(url: str) -> tuple[bool, str, tuple[tuple[str, int], ...], str, dict[str, str]] | None:
    try:
        parts = urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        endpoints = tuple(_endpoint(host) for host in hosts.split(","))
    except ValueError:
        return None
    if parts.fragment or "@" in parts.path + parts.query.partition("=")[0]:
        return None  # an unescaped /, ? or # in a password ends the host part
    return parts.scheme.lower() == "etcds", login, endpoints, parts.path, options


def _endpoint(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.username is not None or parts.path:
        raise ValueError("no host")
    return parts.hostname, parts.port or PORT


def _tls(url: str, options: dict[str, str]) -> SSLContext:
    import ssl  # importing it is slow, and only TLS needs it

    if ("key" in options) and "cert" not in options:
        raise InvalidURL(f"{redact(url)!r}: a key needs its cert; {HELP}")
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            context.load_cert_chain(options["cert"], options.get("key"))
    except (OSError, ValueError) as error:
        raise InvalidURL(f"{redact(url)!r}: the TLS files cannot be used: {error}") from error
    context.set_alpn_protocols(["h2"])
    return context
