"""PostgreSQL over TLS, with a server that has to prove who it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fencelock
from fencelock import EngineUnavailable
from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.postgres_server import OURS, advisory, ask, empty
from tests.servers.postgres import Postgres, PostgresTls
from tests.support.waiting import SOON

pytestmark = pytest.mark.engine("postgres", own=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[PostgresTls]:
    """A server with TLS, for all tests of this file."""
    with PostgresTls() as server:
        yield server


@pytest.fixture
def tls(shared: PostgresTls) -> PostgresTls:
    """The server with TLS, empty."""
    empty(shared)
    return shared


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+advisory"])
async def test_verified(tls: PostgresTls, scheme: str, clients: Clients) -> None:
    """Locks are had, waited for, renewed and handed over, and no byte of it goes in the clear."""
    url = tls.tls_url.replace("postgresql", scheme, 1)
    locks, other = clients.connect(url, ttl=9), clients.connect(url, ttl=9)
    lease = await locks.lock("x").acquire()
    async with background(*(take(other, "x", 2 * SOON) for _ in range(10))) as tasks:
        await waiting(locks, "x", 10)
        await lease.renew()
        rows = ask(
            tls, f"SELECT bool_and(ssl), count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE {OURS}"
        )
        assert rows[0][0] is True
        assert await lease.release() is True
        tokens = [await task for task in tasks]
    assert sorted({lease.token, *tokens})[0] == lease.token
    assert len(set(tokens)) == 10


def test_other_host(tls: PostgresTls) -> None:
    """A certificate for another host is refused."""
    url = tls.tls_url.replace(tls.host, "localhost")
    with fencelock.connect(url) as locks, pytest.raises(EngineUnavailable, match="certificate"):
        locks.lock("x").try_acquire()


def test_other_authority(tls: PostgresTls, tmp_path: Path) -> None:
    """A certificate that nobody vouches for is refused; so is a file of authorities that is not there."""
    for url in (
        f"{tls.url}?sslmode=verify-full&sslrootcert={tmp_path / 'nothing.pem'}",
        f"{tls.url}?sslmode=verify-full&sslrootcert=system",
    ):
        with fencelock.connect(url) as locks, pytest.raises(EngineUnavailable, match="certificate"):
            locks.lock("x").try_acquire()


def test_server_without_tls(own_postgres: Callable[..., Postgres], tls: PostgresTls) -> None:
    """A server that speaks no TLS is refused where it is asked for: nothing is said in the clear."""
    url = advisory(own_postgres()) + "?sslmode=require"
    with fencelock.connect(url) as locks, pytest.raises(EngineUnavailable, match="SSL"):
        locks.lock("x").try_acquire()


def test_wrong_password(tls: PostgresTls) -> None:
    """A wrong password is said once, although libpq tries it with and without TLS, and with what to look at."""
    rules = tls.data / "pg_hba.conf"
    rules.write_text(f"host all stranger 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
    ask(tls, "SELECT pg_reload_conf()")
    ask(tls, "CREATE ROLE stranger LOGIN PASSWORD 's3cr3t'")
    url = tls.url.replace("postgres@", "stranger:guess@")
    with fencelock.connect(url) as locks, pytest.raises(EngineUnavailable) as caught:
        locks.lock("x").try_acquire()
    assert str(caught.value).count("password authentication failed") == 1
    assert "PGPASSWORD" in str(caught.value)
    assert "guess" not in str(caught.value)
