"""The login: the server's greeting, the handshake response, and the authentication methods. No I/O."""

from __future__ import annotations

from hashlib import sha1, sha256
from typing import NamedTuple

from fencelock.engines.mysql.packets import packet, read_error
from fencelock.engines.mysql.url import MySQLUrl

LONG_PASSWORD, WITH_DATABASE, PROTOCOL_41, TLS = 0x1, 0x8, 0x200, 0x800
TRANSACTIONS, SECURE, PLUGINS = 0x2000, 0x8000, 0x80000
CAPABILITIES = LONG_PASSWORD | WITH_DATABASE | PROTOCOL_41 | TRANSACTIONS | SECURE | PLUGINS
UTF8MB4 = 45
PACKET_MAX = 1 << 24

NATIVE, CACHING, CLEAR = "mysql_native_password", "caching_sha2_password", "mysql_clear_password"


class Greeting(NamedTuple):
    """The first packet of a server."""

    version: str
    capabilities: int
    nonce: bytes
    plugin: str
    session_id: int = 0
    """The last 32 bits of the session's id."""

    @property
    def mariadb(self) -> bool:
        """Whether the server is MariaDB, not MySQL."""
        return "mariadb" in self.version.lower()


def read_greeting(body: bytes) -> Greeting:
    """Parse a greeting. Raises the ServerError that the server sent in its place, or ValueError."""
    if body[:1] == b"\xff":
        raise read_error(body)
    if body[:1] != b"\x0a":
        raise ValueError("this is not a MySQL server, or one older than MySQL 4.1")
    end = body.index(b"\0", 1)
    rest = body[end + 1 :]
    if len(rest) < 31:
        raise ValueError("the greeting is too short")
    capabilities = int.from_bytes(rest[13:15], "little") | int.from_bytes(rest[18:20], "little") << 16
    nonce = rest[4:12] + rest[31 : 31 + max(12, rest[20] - 9)]
    plugin = rest[31 + max(13, rest[20] - 8) :].partition(b"\0")[0].decode(errors="replace")
    return Greeting(
        body[1:end].decode(errors="replace"),
        capabilities,
        nonce[:20],
        plugin or NATIVE,
        int.from_bytes(rest[:4], "little"),
    )


def tls_request() -> bytes:
    """Return the packet that asks the server to start TLS."""
    return packet(1, _capabilities(tls=True))


def _capabilities(*, tls: bool) -> bytes:
    capabilities = CAPABILITIES | TLS if tls else CAPABILITIES
    return capabilities.to_bytes(4, "little") + PACKET_MAX.to_bytes(4, "little") + bytes((UTF8MB4,)) + bytes(23)


class Login:
    """One login: returns the response to each packet of the server until the server accepts it."""

    def __init__(self, url: MySQLUrl, greeting: Greeting) -> None:
        self._password = url.password.encode()
        self._user, self._database = url.user.encode(), url.database.encode()
        self._encrypted = url.tls is not None
        self._safe = self._encrypted or url.local
        self._nonce, self._plugin = greeting.nonce, greeting.plugin

    def first_packet(self) -> bytes:
        """Return the response to the greeting."""
        if self._plugin not in (NATIVE, CACHING):
            self._plugin = NATIVE  # the server asks for another plugin if the user needs one
        proof = self._proof()
        body = _capabilities(tls=self._encrypted) + self._user + b"\0" + bytes((len(proof),)) + proof
        body += self._database + b"\0" + self._plugin.encode() + b"\0"
        return packet(2 if self._encrypted else 1, body)

    def respond(self, number: int, body: bytes) -> bytes | None:
        """Return the response to a packet; None if the login succeeded. Raises ServerError, or ValueError."""
        kind = body[:1]
        if kind == b"\x00":
            return None
        if kind == b"\xff":
            raise read_error(body)
        if kind == b"\xfe":
            plugin, _, nonce = body[1:].partition(b"\0")
            self._plugin, self._nonce = plugin.decode(errors="replace"), nonce.rstrip(b"\0")[:20]
            return packet(number + 1, self._proof())
        if kind == b"\x01" and self._plugin == CACHING:
            return self._more(number, body[1:])
        raise ValueError("the server sent an unknown packet during the login")

    def _proof(self) -> bytes:
        if not self._password:
            return b""
        if self._plugin == NATIVE:
            once = sha1(self._password).digest()
            return _xor(once, sha1(self._nonce + sha1(once).digest()).digest())
        if self._plugin == CACHING:
            once = sha256(self._password).digest()
            return _xor(once, sha256(sha256(once).digest() + self._nonce).digest())
        if self._plugin == CLEAR and self._safe:
            return self._password + b"\0"
        raise ValueError(
            f"the user has to log in by {self._plugin}, which fencelock does not support"
            + (" without TLS" if self._plugin == CLEAR else "")
            + f"; it supports {NATIVE} and {CACHING}"
        )

    def _more(self, number: int, body: bytes) -> bytes:
        """Send the password itself: the server has not cached its hash. Without TLS, the server's key encrypts it."""
        if body == b"\x04":
            # 0x02 asks for the server's public key.
            return packet(number + 1, self._password + b"\0" if self._safe else b"\x02")
        return packet(number + 1, _encrypt(_xor(self._password + b"\0", self._nonce), body))


def _xor(data: bytes, key: bytes) -> bytes:
    return bytes(byte ^ key[index % len(key)] for index, byte in enumerate(data))


def _encrypt(secret: bytes, key: bytes) -> bytes:
    try:
        from cryptography.hazmat.primitives.asymmetric import padding, rsa
        from cryptography.hazmat.primitives.hashes import SHA1
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise ValueError(
            "a login by caching_sha2_password without TLS needs a package: pip install 'fencelock[mysql]'; or use TLS"
        ) from error
    public = load_pem_public_key(key)
    if not isinstance(public, rsa.RSAPublicKey):
        raise ValueError("the server's key is not an RSA key")
    return public.encrypt(secret, padding.OAEP(padding.MGF1(SHA1()), SHA1(), None))
