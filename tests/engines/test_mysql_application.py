"""An application's own PyMySQL, SQLAlchemy or Django objects instead of a URL, and Unix sockets."""

from __future__ import annotations

import asyncio
import getpass
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pymysql
import pytest
import sqlalchemy
from django.db import ConnectionHandler

import fencelock
from fencelock import EngineUnavailable, InvalidURL
from fencelock.engines.mysql.adopted_client import url_from_arguments
from tests import django_app
from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.mysql_server import holder_of, kill
from tests.servers.mariadb import MariaDB, MariaDBTls, unpacked
from tests.support.waiting import SOON

PASSWORD = "s3cr3t ';--%40/"
DATABASE = "its own; --"

# PyMySQL replaces mysqlclient, as for Django users without a compiler. Its submodules are registered, too: imported a second
# time under the other name, `pymysql.err` would have other classes than those that PyMySQL's connections raise.
sys.modules |= {f"MySQLdb{name[7:]}": module for name, module in sys.modules.items() if name.startswith("pymysql")}


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDBTls]:
    """A server on which the application has a password and a database with special characters."""
    with MariaDBTls() as server:
        escaped = PASSWORD.replace("'", "''")
        server.query(f"CREATE USER app IDENTIFIED BY '{escaped}'; CREATE DATABASE `{DATABASE}`")
        server.query(f"GRANT ALL ON `{DATABASE}`.* TO app; CREATE USER tls IDENTIFIED BY '{escaped}' REQUIRE SSL")
        server.query(f"GRANT ALL ON `{DATABASE}`.* TO tls")
        yield server


def arguments(server: MariaDB, user: str = "app") -> dict[str, Any]:
    """Return the arguments for PyMySQL."""
    return {"host": server.host, "port": server.port, "user": user, "password": PASSWORD, "database": DATABASE}


def engine(server: MariaDB, driver: str = "pymysql", **options: Any) -> Any:
    url = sqlalchemy.URL.create(f"mysql+{driver}", "app", PASSWORD, server.host, server.port, DATABASE)
    return sqlalchemy.create_engine(url, **options)


def django(server: MariaDB) -> Any:
    django_app.ready()
    given = arguments(server)
    database = {name.upper(): value for name, value in given.items() if name != "database"}
    return ConnectionHandler(
        {"default": {"ENGINE": "django.db.backends.mysql", "NAME": DATABASE, **database, "PORT": str(server.port)}}
    )["default"]


MADE: dict[str, Callable[[MariaDBTls], Any]] = {
    "connection": lambda server: pymysql.connect(**arguments(server)),
    "connection with TLS": lambda server: pymysql.connect(**arguments(server, "tls"), ssl_ca=str(server.certificate)),
    "engine": engine,
    "engine with connect_args": lambda server: sqlalchemy.create_engine(
        "mariadb+pymysql://", connect_args={**arguments(server, "tls"), "ssl": {"ca": str(server.certificate)}}
    ),
    "engine with another driver": lambda server: engine(server, "mysqldb"),
    "django": django,
}


@pytest.mark.engine("mariadb", own=True)
@pytest.mark.filterwarnings("ignore:'(db|passwd)' is deprecated:DeprecationWarning")  # PyMySQL replaces mysqlclient
@pytest.mark.parametrize("kind", MADE)
async def test_application(kind: str, server: MariaDBTls, clients: Clients) -> None:
    """The engine connects like the application, with TLS, over its own connections; no repr shows the password."""
    theirs = MADE[kind](server)
    locks = clients.connect(theirs)
    async with locks.lock("x"):
        users = server.query(f"SELECT DISTINCT USER FROM information_schema.PROCESSLIST WHERE DB = '{DATABASE}'")
        assert users == ("tls" if "TLS" in kind or "connect_args" in kind else "app")
    assert PASSWORD not in f"{locks!r} {locks.raw!r}"
    await locks.close()
    if hasattr(theirs, "dispose"):
        theirs.dispose()
    elif kind != "django":  # Django has not connected
        theirs.close()


@pytest.mark.engine("mariadb", own=True)
async def test_engine_whose_connections_are_all_in_use(server: MariaDBTls, clients: Clients) -> None:
    """An application that uses all connections of its pool can acquire locks; SQLAlchemy opens one connection, once."""
    theirs = engine(server, pool_size=1, max_overflow=0, pool_timeout=0.1)
    made: list[object] = []
    sqlalchemy.event.listen(theirs, "connect", lambda *_: made.append(None))
    with theirs.connect():
        made.clear()
        locks = clients.connect(theirs)
        leases = [await locks.lock(f"n{number}").acquire(SOON) for number in range(3)]
        assert len(made) == 1
        assert all([await lease.release() for lease in leases])
    await locks.close()
    theirs.dispose()


@pytest.mark.engine("mariadb", own=True)
async def test_password_that_changes_under_an_engine(server: MariaDBTls, clients: Clients) -> None:
    """After a refused login, the engine reads the application's new password and connects."""
    server.query(f"CREATE USER rotated IDENTIFIED BY 'first'; GRANT ALL ON `{DATABASE}`.* TO rotated")
    now = {"password": "first"}
    theirs = engine(server, creator=lambda: pymysql.connect(**{**arguments(server, "rotated"), **now}))
    locks = clients.connect(theirs)
    lease = await locks.lock("x").acquire(SOON)
    server.query("ALTER USER rotated IDENTIFIED BY 'second'")
    with pytest.raises(EngineUnavailable, match="Access denied"):
        await locks.lock("y").acquire(SOON)
    now["password"] = "second"
    assert await take(locks, "y")
    assert await lease.release() is True
    await locks.close()
    theirs.dispose()
    server.query("DROP USER rotated")


@pytest.mark.engine("mariadb", own=True)
def test_engine_that_hides_its_encryption(server: MariaDBTls) -> None:
    """An SQLAlchemy engine that encrypts and does not tell how is refused; fencelock does not connect without TLS."""

    class Mute:
        """A connection of a driver that does not tell its arguments."""

        def __init__(self, connection: Any) -> None:
            self._connection = connection

        def __getattr__(self, name: str) -> Any:
            if name == "ctx":
                raise AttributeError(name)
            return getattr(self._connection, name)

    hidden = engine(server, creator=lambda: Mute(pymysql.connect(**arguments(server), ssl_ca=str(server.certificate))))
    with fencelock.connect(hidden) as locks, pytest.raises(EngineUnavailable, match="encrypted, and only PyMySQL's"):
        locks.lock("x").try_acquire()
    hidden.dispose()


def test_connection_arguments() -> None:
    """The argument names of all drivers are understood."""
    url = url_from_arguments({"db": b"d", "passwd": "p", "unix_socket": "/s", "ssl": {"ca": "nowhere"}})
    assert url[:6] == ("/s", 3306, "", "p", "d", None)
    url = url_from_arguments({"database": "d", "ssl_mode": "required"})
    assert url.host == "localhost"
    assert url.tls is not None
    assert url.tls.verify_mode == ssl.CERT_NONE
    assert url_from_arguments({"db": "d", "ssl_mode": "DISABLED"}).tls is None
    with pytest.raises(EngineUnavailable, match="no database"):
        url_from_arguments({"host": "h"})


def test_connection_of_another_driver() -> None:
    """connect() refuses a driver whose connections do not tell their arguments, and the error names the alternative."""
    stranger = type("Connection", (), {"__module__": "MySQLdb.connections"})()
    with pytest.raises(TypeError, match=r"does not say how it was connected; give its URL as mysql://"):
        fencelock.connect(stranger)
    with pytest.raises(InvalidURL, match="must be a str"):
        fencelock.connect(object())  # type: ignore[arg-type]


def _local(server: MariaDB, user: str, database: str = "fencelock") -> str:
    return f"mysql://{user}@/{database}?unix_socket={server.folder / 'socket'}"


async def test_unix_socket(mariadb: MariaDB, clients: Clients) -> None:
    """Locks work over a Unix socket; a timed-out wait leaves nothing."""
    url = _local(mariadb, "root")
    locks, other = clients.connect(url), clients.connect(url)
    lease = await locks.lock("local", ttl=9).acquire()
    async with background(other.lock("local", ttl=9).acquire(4)) as (task,):
        await waiting(locks, "local")
        with pytest.raises(TimeoutError):
            await task
    lease.check()
    assert (await locks.inspect("local")).waiters == ()
    kill(mariadb, holder_of(mariadb, "mysql://h/fencelock", "local"))
    assert await lease.lost.wait(SOON)
    assert await take(other, "local") > lease.token


async def test_unix_socket_of_a_server_that_was_restarted(
    own_mariadb: Callable[..., MariaDB], clients: Clients
) -> None:
    """A restarted server reuses session ids; the clean-up of earlier leases does not kill the new sessions."""
    server = own_mariadb()
    url = _local(server, "root")
    locks, other = clients.connect(url), clients.connect(url)
    old = [await locks.lock(f"old {number}", ttl=60).acquire() for number in range(3)]
    await asyncio.sleep(2.5)
    server.kill()
    server.start()
    new = [await other.lock(f"new {number}", ttl=60).acquire() for number in range(6)]
    for lease in old:
        assert await lease.release() is False
    for lease in new:
        assert await lease.release() is True


async def test_user_of_the_machine(mariadb: MariaDB, clients: Clients) -> None:
    """A user whom the server authenticates by the operating system's account needs no password."""
    user = getpass.getuser()
    if unpacked():
        mariadb.query("INSTALL PLUGIN auth_socket SONAME 'auth_socket.so'")
        mariadb.query(f"CREATE USER local IDENTIFIED WITH auth_socket AS '{user}'; GRANT ALL ON fencelock.* TO local")
        assert await take(clients.connect(_local(mariadb, "local")), "socket")
        mariadb.query("DROP USER local; UNINSTALL PLUGIN auth_socket")
        return
    account = f"{user}@localhost"
    mariadb.query(f"CREATE USER IF NOT EXISTS {account}; GRANT ALL ON *.* TO {account}")
    mariadb.query(f"ALTER USER {account} IDENTIFIED VIA unix_socket")
    try:
        assert await take(clients.connect(_local(mariadb, user)), "socket")
    finally:
        mariadb.query(f"ALTER USER {account} IDENTIFIED BY ''")


@pytest.mark.parametrize(
    "url",
    ["mysql://u@h/d?unix_socket=/s", "mysql://u@/d?unix_socket=s", "mysql://u@/d?unix_socket=/s&ssl-mode=required"],
)
def test_invalid_unix_sockets(url: str) -> None:
    """A socket with a host, a relative path, and TLS over a socket are refused."""
    with pytest.raises(InvalidURL):
        fencelock.connect(url)
