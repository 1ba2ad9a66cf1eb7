"""The login: what the server greets with, what we answer, and how a password is proved without being sent. No I/O."""

from __future__ import annotations

from hashlib import sha1, sha256
from typing import NamedTuple

from fencelock.engines.mysql.packets import packet, read_error
from fencelock.engines.mysql.place import Place

LONG_PASSWORD, WITH_DATABASE, PROTOCOL_41, TLS = 0x1, 0x8, 0x200, 0x800
TRANSACTIONS, SECURE, PLUGINS = 0x2000, 0x8000, 0x80000
WANTED = LONG_PASSWORD | WITH_DATABASE | PROTOCOL_41 | TRANSACTIONS | SECURE | PLUGINS
UTF8MB4 = 45
PACKET_MAX = 1 << 24

NATIVE, CACHING, CLEAR = "mysql_native_password", "caching_sha2_password", "mysql_clear_password"


class Greeting(NamedTuple):
    """What a server says first."""

    version: str
    abilities: int
    nonce: bytes
    plugin: str
    id: int = 0
    """The session's number, of which a greeting has the last 32 bits."""

    @property
    def mariadb(self) -> bool:
        """Whether it is MariaDB rather than MySQL."""
        return "mariadb" in self.version.lower()


def read_greeting(body: bytes) -> Greeting:
    """Read it; raise what the server says instead, or ValueError if it is none."""
    if body[:1] == b"\xff":
        raise read_error(body)
    if body[:1] != b"\x0a":
        raise ValueError("this is not a MySQL server, or one of before the year 2000")
    end = body.index(b"\0", 1)
    rest = body[end + 1 :]
    if len(rest) < 31:
        raise ValueError("the greeting is cut short")
    abilities = int.from_bytes(rest[13:15], "little") | int.from_bytes(rest[18:20], "little") << 16
    nonce = rest[4:12] + rest[31 : 31 + max(12, rest[20] - 9)]
    plugin = rest[31 + max(13, rest[20] - 8) :].partition(b"\0")[0].decode(errors="replace")
    return Greeting(
        body[1:end].decode(errors="replace"),
        abilities,
        nonce[:20],
        plugin or NATIVE,
        int.from_bytes(rest[:4], "little"),
    )


def ask_for_tls() -> bytes:
    """Return what is said in the clear before TLS begins."""
    return packet(1, _abilities(tls=True))


def _abilities(*, tls: bool) -> bytes:
    abilities = WANTED | TLS if tls else WANTED
    return abilities.to_bytes(4, "little") + PACKET_MAX.to_bytes(4, "little") + bytes((UTF8MB4,)) + bytes(23)


class Login:
    """One login, step by step: each packet from the server is answered, until it is content."""

    def __init__(self, place: Place, greeting: Greeting) -> None:
        self._password = place.password.encode()
        self._user, self._database = place.user.encode(), place.database.encode()
        self._encrypted = place.tls is not None
        self._safe = self._encrypted or place.local
        self._nonce, self._plugin = greeting.nonce, greeting.plugin

    def begin(self) -> bytes:
        """Return the answer to the greeting."""
        if self._plugin not in (NATIVE, CACHING):
            self._plugin = NATIVE  # the server will ask for another, if it has to
        proof = self._proof()
        body = _abilities(tls=self._encrypted) + self._user + b"\0" + bytes((len(proof),)) + proof
        body += self._database + b"\0" + self._plugin.encode() + b"\0"
        return packet(2 if self._encrypted else 1, body)

    def answer(self, number: int, body: bytes) -> bytes | None:
        """Return what to say to a packet, None if we are in. Raise what the server refuses with."""
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
        raise ValueError("the server says something that no login knows")

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
            f"the user is to log in by {self._plugin}, which fencelock does not know"
            + (" without TLS" if self._plugin == CLEAR else "")
            + f"; it knows {NATIVE} and {CACHING}"
        )

    def _more(self, number: int, body: bytes) -> bytes:
        """Go on with a password that the server does not remember: it has to have it as it is."""
        if body == b"\x04":
            # Without TLS, under the server's own key: that is asked for first.
            return packet(number + 1, self._password + b"\0" if self._safe else b"\x02")
        return packet(number + 1, _sealed(_xor(self._password + b"\0", self._nonce), body))


def _xor(data: bytes, key: bytes) -> bytes:
    return bytes(byte ^ key[place % len(key)] for place, byte in enumerate(data))


def _sealed(secret: bytes, key: bytes) -> bytes:
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
