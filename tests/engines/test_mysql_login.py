"""Logins with and without TLS, and the parser of the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from hashlib import sha1, sha256

import pytest
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA1
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fencelock import EngineUnavailable
from fencelock.cli import database
from fencelock.core.runtime import NO_REPLY
from fencelock.engines.mysql.login import CACHING, CLEAR, NATIVE, Greeting, Login, read_greeting
from fencelock.engines.mysql.packets import Ok, ReplyParser, Rows, ServerError, packet, read_row
from fencelock.engines.mysql.url import parse
from tests.contract.steps import background, is_free, renewed, take, waiting
from tests.engines.conftest import Clients
from tests.servers.mariadb import MariaDB, MariaDBTls

NONCE = bytes(range(1, 21))


@pytest.fixture(scope="module")
def tls_server() -> Iterator[MariaDBTls]:
    """A server with TLS, for all tests of this file."""
    with MariaDBTls() as server:
        yield server


async def test_tls(tls_server: MariaDBTls, clients: Clients) -> None:
    """Locks work over TLS, and the server counts the handshakes."""
    before = _handshakes(tls_server)
    locks, other = clients.connect(tls_server.tls_url), clients.connect(f"{tls_server.url}?ssl-mode=required")
    lease = await locks.lock("x", ttl=6).acquire()
    async with background(other.lock("x", ttl=6).acquire(30)) as (task,):
        await waiting(locks, "x")
        await renewed(lease)
        assert await lease.release()
        got = await task
        assert got.token > lease.token
        assert await got.release()
    assert _handshakes(tls_server) >= before + 2


def test_schema_command_connects_with_tls(tls_server: MariaDBTls) -> None:
    """`fencelock schema --fence` and `--lockfree` connect with the TLS that the URL asks for, or not at all."""
    with database.connect(tls_server.tls_url) as connection:
        cursor = connection.cursor()
        cursor.execute("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
        assert cursor.fetchone()[1]
    refused = database.connect(f"{tls_server.url}?ssl-mode=verify_identity")
    with pytest.raises(EngineUnavailable, match="certificate verify failed"), refused:
        pass


def _handshakes(server: MariaDBTls) -> int:
    return int(server.query("SHOW GLOBAL STATUS LIKE 'Ssl_finished_accepts'").split()[1])


async def test_tls_only_user(tls_server: MariaDBTls, clients: Clients) -> None:
    """A user who requires TLS can log in with it only; the error does not show the password."""
    user = f"tls_{clients.runtime_name}"
    tls_server.query(f"CREATE USER {user} IDENTIFIED BY 's3cr3t' REQUIRE SSL; GRANT ALL ON fencelock.* TO {user}")
    url = tls_server.tls_url.replace("root@", f"{user}:s3cr3t@")
    assert await take(clients.connect(url), "y")
    with pytest.raises(
        EngineUnavailable, match=r"cannot log in to MySQL at .*: .*Access denied.*ssl-mode=REQUIRED"
    ) as caught:
        await take(clients.connect(url.partition("?")[0]), "y")
    assert "s3cr3t" not in repr(caught.value)


async def test_untrusted_certificate(tls_server: MariaDBTls, clients: Clients) -> None:
    """A certificate of an unknown authority, or for another host, is refused before the login."""
    with pytest.raises(EngineUnavailable, match=r"cannot log in to MySQL at .*: .*certificate"):
        await take(clients.connect(f"{tls_server.url}?ssl-mode=verify_identity"), "y")
    with pytest.raises(EngineUnavailable, match="certificate"):
        await take(clients.connect(tls_server.tls_url.replace("127.0.0.1:", "localhost:", 1)), "y")


async def test_server_without_tls(mariadb: MariaDB, clients: Clients) -> None:
    """The engine does not log in without encryption if the URL requires TLS."""
    with pytest.raises(EngineUnavailable, match="does not support TLS"):
        await take(clients.connect(f"{mariadb.url}?ssl-mode=required"), "y")


async def test_unreachable_server(clients: Clients) -> None:
    """The error for a missing server, or one of another protocol, names the address."""

    async def before_tls(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP\r\n")
        writer.close()

    async with await asyncio.start_server(before_tls, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for options in ("", "?ssl-mode=required&connect_timeout=2"):
            with pytest.raises(EngineUnavailable, match=f"cannot reach MySQL at 127.0.0.1:{port}"):
                await take(clients.connect(f"mysql://u@127.0.0.1:{port}/d{options}"), "y")
    with pytest.raises(EngineUnavailable, match=r"cannot reach MySQL at 127\.0\.0\.1:1"):
        await is_free(clients.connect("mysql://u@127.0.0.1:1/d"), "y")


def _login(plugin: str, *, tls: bool = False) -> Login:
    url = parse("mysql://u:s3cr3t@h/d" + ("?ssl-mode=required" if tls else ""))
    return Login(url, Greeting("8.4.0", 0, NONCE, plugin))


def _proof(login: Login) -> bytes:
    """Return the proof of the password in the response to the greeting."""
    said = login.first_packet()[4:]
    after_user = said[32:].partition(b"\0")[2]
    return after_user[1 : 1 + after_user[0]]


def test_native_password() -> None:
    """A server that knows only the double hash of the password can check the proof."""
    stored = sha1(sha1(b"s3cr3t").digest()).digest()
    mask = sha1(NONCE + stored).digest()
    once = bytes(a ^ b for a, b in zip(_proof(_login(NATIVE)), mask, strict=True))
    assert sha1(once).digest() == stored


def test_caching_password() -> None:
    """caching_sha2_password: the proof first; then the password itself, encrypted with the server's key or sent over TLS."""
    stored = sha256(sha256(b"s3cr3t").digest()).digest()
    login = _login(CACHING)
    mask = sha256(stored + NONCE).digest()
    once = bytes(a ^ b for a, b in zip(_proof(login), mask, strict=True))
    assert sha256(once).digest() == stored
    assert login.respond(2, b"\x01\x04") == packet(3, b"\x02")
    key = rsa.generate_private_key(65537, 2048)
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    sealed = login.respond(4, b"\x01" + pem)
    assert sealed is not None
    plain = key.decrypt(sealed[4:], padding.OAEP(padding.MGF1(SHA1()), SHA1(), None))
    assert bytes(a ^ NONCE[n % 20] for n, a in enumerate(plain)) == b"s3cr3t\0"
    assert login.respond(6, b"\0\0\0\2\0\0\0") is None
    assert _login(CACHING, tls=True).respond(3, b"\x01\x04") == packet(4, b"s3cr3t\0")


def test_cached_password() -> None:
    """The parser skips the packet that accepts a cached password and returns the OK packet that follows."""
    stream = packet(2, b"\x01\x03") + packet(3, b"\0\0\0\2\0\0\0")
    for size in (1, 5, 6, len(stream)):
        parser = ReplyParser()
        found = []
        for start in range(0, len(stream), size):
            parser.feed(stream[start : start + size])
            while (reply := parser.gets()) is not NO_REPLY:
                found.append(reply)
        assert found == [(3, b"\0\0\0\2\0\0\0")]


def test_other_login_plugins() -> None:
    """The error names an unsupported plugin, and a clear-text password is never sent without TLS."""
    login = _login("client_ed25519")
    login.first_packet()
    with pytest.raises(ValueError, match="client_ed25519"):
        login.respond(2, b"\xfeclient_ed25519\0" + NONCE)
    with pytest.raises(ValueError, match="without TLS"):
        _login(NATIVE).respond(2, b"\xfe" + CLEAR.encode() + b"\0")
    assert _login(NATIVE, tls=True).respond(2, b"\xfe" + CLEAR.encode() + b"\0") == packet(3, b"s3cr3t\0")
    with pytest.raises(ServerError, match="no"):
        _login(NATIVE).respond(2, b"\xff\x15\x04#28000no")


@pytest.mark.parametrize("greeting", [b"", b"\x09", b"\x0aversion", b"\x0aversion\0short", b"220 ESMTP"])
def test_invalid_greetings(greeting: bytes) -> None:
    """Anything but a greeting is refused."""
    with pytest.raises(ValueError):
        read_greeting(greeting)


def test_replies_in_any_pieces() -> None:
    """The parser returns the same replies however the network splits them."""
    row = bytes((1,)) + b"7" + b"\xfb" + b"\xfc\x2c\x01" + b"n" * 300
    stream = b"".join(
        (
            packet(1, b"\x00\xfc\x10\x27\xfe" + (1 << 52).to_bytes(8, "little") + b"\x02\0\0\0"),
            packet(1, b"\x03"), packet(2, b"c1"), packet(3, b"c2"), packet(4, b"c3"), packet(5, b"\xfe\0\0\2\0"),
            packet(6, row), packet(7, b"\xfe\0\0\2\0"),
            packet(1, b"\xff\x25\x05#70100broken off"),
        )
    )  # fmt: skip
    for size in (1, 2, 5, 7, len(stream)):
        parser = ReplyParser()
        parser.logged_in = True
        found = []
        for start in range(0, len(stream), size):
            parser.feed(stream[start : start + size])
            while (reply := parser.gets()) is not NO_REPLY:
                found.append(reply)
        assert found[:2] == [Ok(10000, 1 << 52), Rows([(b"7", None, b"n" * 300)])]
        assert (found[2].code, found[2].message) == (1317, "broken off")


@pytest.mark.parametrize("body", [b"", b"\0", b"\0\xfc\x10", b"\xfb/etc/passwd", b"\xfe"])
def test_malformed_replies(body: bytes) -> None:
    """A malformed reply raises ValueError, which closes the connection in both runtimes."""
    parser = ReplyParser()
    parser.logged_in = True
    parser.feed(packet(1, body))
    with pytest.raises(ValueError):
        parser.gets()


@pytest.mark.parametrize("row", [b"\x05abc", b"\xfc\x10", b"\xff\x01"])
def test_malformed_rows(row: bytes) -> None:
    """A value that is longer than its packet, and one without a valid length, raise ValueError."""
    with pytest.raises(ValueError):
        read_row(row)
