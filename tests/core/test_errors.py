"""Errors: one root, the right builtin beside it, a name, and they survive a pickle."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import fencelock
from fencelock import FencelockError, aio
from fencelock.core import urls

BUILTINS: dict[str, type[BaseException]] = {
    "LockTimeout": TimeoutError,
    "EngineUnavailable": ConnectionError,
    "OutcomeUnknown": ConnectionError,
    "ReleaseFailed": ConnectionError,
    "InvalidArgument": ValueError,
    "InvalidType": TypeError,
    "InvalidName": ValueError,
    "InvalidTTL": ValueError,
    "InvalidURL": ValueError,
    "MissingDependency": ImportError,
    "ClientClosed": RuntimeError,
    "DifferentLoop": RuntimeError,
    "GuaranteeUnavailable": Exception,
    "LeaseLost": Exception,
    "NotHeld": Exception,
    "WouldDeadlock": RuntimeError,
    "RateLimited": Exception,
    "BuildFailed": Exception,
    "StaleToken": Exception,
    "KeyInProgress": Exception,
    "KeyReused": ValueError,
    "VersionConflict": Exception,
    "FencelockError": Exception,
}

ERRORS: list[Any] = [getattr(fencelock, name) for name in BUILTINS]


def named(kind: Any, message: str) -> str:
    """Return what an error of a lock says that is not named in it: those of an engine as a whole are given it."""
    return f"'order:42': {message}" if issubclass(kind, fencelock.EngineUnavailable) else message


@pytest.mark.parametrize("kind", ERRORS)
def test_error_has_message_name_and_builtin_base(kind: Any) -> None:
    """Each error is a FencelockError and a builtin error, and has its message and the lock's name."""
    error = kind("what happened, and what to do next", "order:42")
    assert isinstance(error, FencelockError)
    assert isinstance(error, BUILTINS.get(kind.__name__, ConnectionError))
    assert str(error) == named(kind, "what happened, and what to do next")
    assert error.name == "order:42"
    assert kind("about the engine as a whole").name is None
    assert kind.__doc__


@pytest.mark.parametrize("kind", ERRORS)
def test_error_survives_a_pickle(kind: Any) -> None:
    """A pickled error keeps its message, name and reason."""
    error = kind("message", "order:42")
    if kind is fencelock.LeaseLost:
        error = kind("message", "order:42", fencelock.LossReason.EXPIRED)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == named(kind, "message")
    assert again.name == "order:42"
    assert getattr(again, "reason", None) == getattr(error, "reason", None)


def test_all_errors_are_listed() -> None:
    """The table of these tests has every public error."""
    public = {name for name in fencelock.__all__ if _is_error(getattr(fencelock, name))}
    assert public == set(BUILTINS)


def _is_error(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException)


def test_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """An engine whose driver is not installed names the extra to install, and hides the password of the URL."""
    (tmp_path / "engine_without_driver.py").write_text("import a_driver_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(urls.ENGINES, "nodriver", urls.EngineModule("engine_without_driver", "the-extra"))
    for connect in (fencelock.connect, aio.connect):
        with pytest.raises(fencelock.MissingDependency) as caught:
            connect("nodriver://user:s3cr3t@host")
        assert "pip install 'fencelock[the-extra]'" in str(caught.value)
        assert "a_driver_that_nobody_has" in str(caught.value)
        assert "s3cr3t" not in repr(caught.value)
        assert isinstance(caught.value.__cause__, ImportError)


def test_broken_engine_is_not_a_missing_dependency(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """An ImportError inside an engine that needs no driver comes out as it is, not as MissingDependency."""
    (tmp_path / "engine_that_is_broken.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(urls.ENGINES, "broken", urls.EngineModule("engine_that_is_broken"))
    with pytest.raises(ModuleNotFoundError):
        fencelock.connect("broken://")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://app@db:6379/0", "redis://app@db:6379/0"),
        ("redis://app:s3cr3t@db:6379/0", "redis://app:***@db:6379/0"),
        ("redis://:s3cr3t@db", "redis://:***@db"),
        ("rediss://app:s3%40cr3t@db/0?ssl_password=s3cr3t&db=1", "rediss://app:***@db/0?ssl_password=***&db=1"),
        ("postgresql://app:s3@cr3t@db/x", "postgresql://app:***@db/x"),
        ("postgresql://app:s3/cr3t@db/x", "postgresql://app:***@db/x"),
        ("postgresql://app:s3?cr3t@db/x", "postgresql://app:***@db/x"),
        ("postgresql://app:s3#cr3t@db/x", "postgresql://app:***@db/x"),
        ("postgresql://app:s3:cr3t@db/x", "postgresql://app:***@db/x"),
        ("postgresql://db/x?user=app&password=s3cr3t", "postgresql://db/x?user=app&password=***"),
        ("postgresql+advisory://app:s3cr3t@[::1]:5432/x", "postgresql+advisory://app:***@[::1]:5432/x"),
        ("mysql://app:s3cr3t@db/x?PASSWD=s3cr3t", "mysql://app:***@db/x?PASSWD=***"),
        ("unix://:s3cr3t@/run/redis.sock", "unix://:***@/run/redis.sock"),
        ("redlock://:s3cr3t@h1,:s3cr3t2@h2", "redlock://:***@h2"),
        ("etcd://h1:2379,h2:2379?token=s3cr3t", "etcd://h1:2379,h2:2379?token=***"),
        ("host=db password=s3cr3t user=app", "host=db password=*** user=app"),
        ("host=db password='s3 cr3t' user=app", "host=db password=*** user=app"),
        ("app:s3cr3t@db", "app:***@db"),
        ("redis:///app:s3cr3t@db", "redis:///app:***@db"),
        ("redis:/app:s3cr3t@db", "redis:***@db"),
        ("sqlite:///var/lib/app/locks.db", "sqlite:///var/lib/app/locks.db"),
        ("", ""),
    ],
)
def test_redact_hides_passwords(url: str, shown: str) -> None:
    """`redact` hides the password in every form of URL, and shows the rest unchanged."""
    assert urls.redact(url) == shown
