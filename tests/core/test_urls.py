"""URLs: what is meant by one, and what is said about one that means nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fencelock
from fencelock import EngineUnavailable, InvalidURL, aio

CONNECT = pytest.mark.parametrize("connect", [fencelock.connect, aio.connect], ids=["blocking", "asyncio"])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("locks.db", "Did you mean sqlite:locks.db?"),
        ("./locks.db", "Did you mean sqlite:./locks.db?"),
        ("~/locks.db", "Did you mean sqlite:~/locks.db?"),
        ("/tmp/x.db", "Did you mean sqlite:////tmp/x.db?"),
        ("/tmp/100%?.db", "Did you mean sqlite:////tmp/100%25%3F.db?"),
        ("sqlite", "Did you mean sqlite://?"),
        ("sqllite:///x.db", "Did you mean sqlite:///x.db?"),
        ("sqlite3:x.db", "Did you mean sqlite:x.db?"),
        ("memroy://x", "Did you mean memory://x?"),
        ("redsi://x", "Did you mean redis://x?"),
        ("redlok://a,b,c", "Did you mean redlock://a,b,c?"),
        ("etdc://h", "Did you mean etcd://h?"),
        ("postgrsql://h", "Did you mean postgresql://h?"),
        ("redlock://", "takes the addresses of its nodes"),
        ("redlock://a,,b", "takes the addresses of its nodes"),
        ("redlock://a:1,b:1,a:1", "names a:1 twice"),
        ("redis://h:port", "the port must be a number"),
        ("redis://h?nosuch=1", "there is no option 'nosuch'; the options are redis-py's, such as db, socket_timeout"),
        ("redis+sentinel://h/s?nosuch=1", "there is no option 'nosuch'"),
        ("redlock://a,b,c?nosuch=1", "there is no option 'nosuch'"),
        ("redis+sentinel://h", "redis+sentinel://host:port,host:port/service/db"),
        ("etcd://h:port", "an etcd URL is etcd://"),
        ("zookeeper://", "names no host"),
        ("zookeper://h", "Did you mean zookeeper://h?"),
        ("mysql://h", "name the database that fencelock's tables are in"),
        (
            "nosuch://x",
            "'nosuch://x' names no engine. The engines are sqlite:, redis://, redlock://, etcd://, zookeeper://, "
            "postgresql://, mysql:// and memory://",
        ),
        ("localhost:6379", "Did you mean redis://localhost:6379?"),
        ("redis:localhost", "write redis://host:6379/0"),
        (Path("locks.db"), "Did you mean sqlite:locks.db?"),
        ("redis:6379/0", "Did you mean redis://redis:6379/0?"),
        ("127.0.0.1:2379", "Did you mean etcd://127.0.0.1:2379?"),
        ("db:5432", "Did you mean postgresql://db:5432?"),
        ("redis+cluster://h1,h2", "does not support Redis Cluster; use redis:// with"),
        ("sqlite:///:memory:", "use memory://name"),
        ("sqlite::memory:", "use memory://name"),
        ("sqlite://:memory:", "use memory://name"),
        ("sqlite:///~/h.db", "write sqlite:~/h.db"),
        ("sqlite://~/h.db", "write sqlite:~/h.db"),
        ("sqlite://locks.db", "sqlite:locks.db"),
        ("sqlite:~nobody-of-this-name/h.db", "no such home folder"),
    ],
)
@CONNECT
def test_refused_url_error_suggests_the_fix(
    connect: Callable[[str | Path], object], url: str | Path, message: str
) -> None:
    """A URL without an engine or a file is refused when the client is made, and the error suggests a fix."""
    with pytest.raises(InvalidURL) as caught:
        connect(url)
    assert message in str(caught.value)


def test_error_of_a_url_from_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a URL names $FENCELOCK_URL only if the URL came from there."""
    for url in ("sqllite:x.db", "mysql://h", "sqlite::memory:", "memory://a/b", "x.db"):
        monkeypatch.setenv("FENCELOCK_URL", url)
        with pytest.raises(InvalidURL, match=r"^\$FENCELOCK_URL: ") as caught:
            fencelock.connect()
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
        with pytest.raises(InvalidURL, match=r"^[^$]*$"):
            fencelock.connect(url)


@pytest.mark.parametrize("empty", ["", " "])
def test_empty_variable_is_refused(monkeypatch: pytest.MonkeyPatch, empty: str) -> None:
    """An empty $FENCELOCK_URL is refused instead of meaning the local default."""
    monkeypatch.setenv("FENCELOCK_URL", empty)
    for connect in (fencelock.connect, fencelock.aio.connect):
        with pytest.raises(InvalidURL, match=r"^\$FENCELOCK_URL is empty"):
            connect()


@pytest.mark.parametrize(
    "prefix", ["", "sqllite://", "sqlite://", "sqlite:///~/", "redis://", "nosuch://", "memory://", "/"]
)
@pytest.mark.parametrize("rest", ["me:s3cr3t@h/x", ":s3cr3t@h", "h/x?password=s3cr3t", "password=s3cr3t"])
def test_passwords_are_not_shown(monkeypatch: pytest.MonkeyPatch, prefix: str, rest: str) -> None:
    """No error about a URL shows its password."""
    url = prefix + rest
    monkeypatch.setenv("FENCELOCK_URL", url)
    for given in (url, None):
        try:
            shown = repr(fencelock.connect(given))
        except InvalidURL as error:
            shown = f"{error} {error!r} {error.__cause__!r} {error.__context__!r}"
        assert "s3cr3t" not in shown


def test_schemes_ignore_case(tmp_path: Path) -> None:
    """The scheme of a URL may be written in capitals."""
    with fencelock.connect(f"SQLite:///{tmp_path}/locks.db") as locks, locks.lock("x"):
        assert locks.traits.engine == "sqlite"
    with (
        fencelock.connect("MEMORY://capitals") as locks,
        fencelock.connect("memory://capitals") as other,
        locks.lock("x"),
    ):
        assert list(other.names()) == ["x"]


def test_default_folder_that_cannot_be_made_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the default folder cannot be made, the first use raises an error that says what to do."""
    (tmp_path / "file").touch()
    monkeypatch.delenv("FENCELOCK_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with fencelock.connect() as locks, pytest.raises(EngineUnavailable, match="FENCELOCK_URL"):
        locks.inspect("x")


def test_given_folder_is_not_made(tmp_path: Path) -> None:
    """The folder of a given path is not made: the path may be misspelt."""
    with (
        fencelock.connect(f"sqlite:///{tmp_path}/new/locks.db") as locks,
        pytest.raises(EngineUnavailable, match="create"),
    ):
        locks.inspect("x")
    assert list(tmp_path.iterdir()) == []


def test_relative_state_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative $XDG_STATE_HOME is ignored, as its specification requires."""
    monkeypatch.delenv("FENCELOCK_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", "/home/me")
    with fencelock.connect() as locks:
        assert repr(locks) == "<Locks sqlite:////home/me/.local/state/fencelock/locks.db>"
