"""Parses a `mysql://` URL: host, database, login and TLS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from fencelock.core.urls import redact
from fencelock.errors import InvalidURL

if TYPE_CHECKING:
    from ssl import SSLContext

PORT = 3306
CONNECT_TIMEOUT = 5.0
"""Seconds for connecting and the login, unless the URL has another connect_timeout."""

HELP = "a MySQL URL is mysql://user:password@host:3306/database, or mysql://user@/database?unix_socket=/path"
OPTIONS = {"ssl-mode", "ssl-ca", "ssl-cert", "ssl-key", "connect_timeout", "unix_socket"}
MODES = ("DISABLED", "REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY")


class MySQLUrl(NamedTuple):
    """A parsed URL. A host that begins with a slash is the path of a Unix socket."""

    host: str
    port: int
    user: str
    password: str
    database: str
    tls: SSLContext | None = None
    seconds: float = CONNECT_TIMEOUT
    """The connect timeout. `cli/database.py` reads this name and `local`, too."""

    @property
    def address(self) -> str:
        """Host and port, for messages."""
        if self.local:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether the server is reached over a Unix socket."""
        return self.host.startswith("/")

    def __repr__(self) -> str:
        return f"<MySQLUrl {self.address}/{self.database}>"


def parse(url: str) -> MySQLUrl:
    """Parse a URL. Raises InvalidURL, without the parts that may contain a password."""
    parts = _split(url)
    if parts is None:  # raised outside of the except block: the ValueError may quote the password
        raise InvalidURL(f"{redact(url)!r}: {HELP}; a password's /, ?, # and @ are written %2F, %3F, %23 and %40")
    host, port, user, password, database, options = parts
    if unknown := set(options) - OPTIONS:
        raise InvalidURL(
            f"{redact(url)!r}: no such option: {', '.join(sorted(unknown))}; there are {', '.join(sorted(OPTIONS))}"
        )
    if not database or "/" in database:
        raise InvalidURL(f"{redact(url)!r}: name the database that fencelock's tables are in; {HELP}")
    if "\0" in user + password + database:
        raise InvalidURL(f"{redact(url)!r}: a NUL cannot be in a user, a password or a database; {HELP}")
    tls = _tls(url, options)
    if tls is not None and host.startswith("/"):
        raise InvalidURL(f"{redact(url)!r}: a Unix socket needs no TLS; leave out the ssl options")
    return MySQLUrl(host, port, user, password, database, tls, _connect_timeout(url, options))


def _split(url: str) -> tuple[str, int, str, str, str, dict[str, str]] | None:
    try:
        parts = urlsplit(url)
        login = parts.netloc.rpartition("@")[0]
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        host, port = parts.hostname, parts.port or PORT
    except ValueError:
        return None
    socket = options.get("unix_socket")
    if socket is not None:
        if host not in (None, "localhost") or not socket.startswith("/"):
            return None
        host = socket
    if not host or parts.fragment or "@" in parts.path + parts.query.partition("=")[0]:
        return None  # a password with an unescaped /, ? or # ends up after the host
    user, _, password = login.partition(":")
    return (
        host,
        port,
        unquote(user) or _current_user(),
        unquote(password),
        unquote(parts.path.removeprefix("/")),
        options,
    )


def _current_user() -> str:
    from getpass import getuser

    try:
        return getuser()
    except (OSError, KeyError):  # the process has no user name
        return "root"


def _connect_timeout(url: str, options: dict[str, str]) -> float:
    try:
        seconds = float(options.get("connect_timeout", CONNECT_TIMEOUT))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise InvalidURL(f"{redact(url)!r}: connect_timeout is a number of seconds") from None
    return seconds


def _tls(url: str, options: dict[str, str]) -> SSLContext | None:
    """Return the TLS context for options that are named as in MySQL's own clients."""
    files = [name for name in ("ssl-ca", "ssl-cert", "ssl-key") if name in options]
    mode = options.get("ssl-mode", "VERIFY_IDENTITY" if files else "DISABLED").upper()
    if mode not in MODES:
        raise InvalidURL(f"{redact(url)!r}: ssl-mode is one of {', '.join(MODES)}")
    if mode == "DISABLED" and files:
        raise InvalidURL(f"{redact(url)!r}: {', '.join(files)} without TLS; leave out ssl-mode=DISABLED")
    try:
        return tls_context(mode, options)
    except (OSError, ValueError) as error:
        raise InvalidURL(f"{redact(url)!r}: the files for TLS cannot be used: {error}") from error


def tls_context(mode: str, files: Mapping[str, str]) -> SSLContext | None:
    """Return a TLS context for an ssl-mode, or None if it is DISABLED."""
    if mode == "DISABLED":
        return None
    import ssl  # imported late: it is slow, and most connections do not need it

    context = ssl.create_default_context(cafile=files.get("ssl-ca"))
    context.check_hostname = mode == "VERIFY_IDENTITY"
    if mode == "REQUIRED":
        context.verify_mode = ssl.CERT_NONE
    if "ssl-cert" in files:
        context.load_cert_chain(files["ssl-cert"], files.get("ssl-key"))
    return context
