"""Arguments from users: ttls, names, timeouts, owners, passwords. Every engine and runtime treats them the same."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import fencelock
from fencelock import InvalidName, InvalidTTL, InvalidURL
from tests.contract.factory import MakeClient
from tests.contract.runtimes import LocksView, connect, direct
from tests.contract.steps import is_free
from tests.support.waiting import SOON


@pytest.fixture
def factory(url: str, runtime_name: str) -> MakeClient:
    """Makes clients that do not scale ttls."""
    return MakeClient(url, runtime_name)


BAD_TTLS: list[Any] = [
    0,
    -1,
    -0.0,
    float("nan"),
    float("inf"),
    -float("inf"),
    0.0004,
    0.0999,
    1e12,
    86400.1,
    10**400,
    True,
    "30",
]


async def test_bad_ttl_is_refused(factory: MakeClient, locks: LocksView) -> None:
    """Creating a lock refuses a ttl that is no number of seconds within the engine's range, and the error names the range."""
    for ttl in BAD_TTLS:
        with pytest.raises(InvalidTTL) as caught:
            locks.lock("x", ttl=ttl)
        assert isinstance(caught.value, ValueError)
        assert caught.value.name == "x"
        if not isinstance(ttl, bool | str):
            assert f"{locks.traits.ttl_min:g}" in str(caught.value)
            assert f"{locks.traits.ttl_max:g}" in str(caught.value)
        with pytest.raises(InvalidTTL):
            connect(factory.runtime_name, direct, factory.url, ttl=ttl)
    assert [name async for name in locks.names()] == []


async def test_good_ttl_is_accepted(locks: LocksView) -> None:
    """Both ends of the ttl range and whole numbers are accepted; None means the client's ttl."""
    least = locks.traits.ttl_min
    for ttl in (least, locks.traits.ttl_max, 30, least * 1.23456789, None):
        lease = await locks.lock("x", ttl=ttl).acquire()
        asked = 30 if ttl is None else ttl
        assert lease.ttl == asked or (locks.traits.session and asked / 2 <= lease.ttl < asked)
        assert lease.remaining < asked
        await lease.release()


BAD_NAMES: list[Any] = [
    "",
    "\0",
    "a\0b",
    "a\nb",
    "\t",
    "\x1f",
    "\x7f",
    "\x85",
    "x" * 1025,
    "é" * 513,
    "x" * 10_000,
    "\ud800",
    "a\udfff",
    None,
    42,
    b"x",
]


@pytest.mark.client_side
async def test_bad_name_is_refused(locks: LocksView) -> None:
    """Every method refuses a name that is empty, too long, not text or has control characters, with one sentence."""
    for name in BAD_NAMES:
        with pytest.raises(InvalidName) as caught:
            locks.lock(name)
        assert isinstance(caught.value, ValueError)
        assert len(str(caught.value)) < 300
        with pytest.raises(InvalidName):
            await locks.inspect(name)
        with pytest.raises(InvalidName):
            await locks.force_release(name, reason="test")
        if name:
            with pytest.raises(InvalidName):
                [_ async for _ in locks.names(prefix=name)]


GOOD_NAMES = [
    *[
        "x",
        "X",
        "/",
        "..",
        "../..",
        "a/b",
        "{}",
        "{0}",
        "{{tag}}",
        "*",
        "%",
        "?",
        "#",
        "a b",
        " ",
        "  x ",
        "-",
        "--help",
    ],
    *[
        "'",
        '"',
        "`",
        ";",
        "\\",
        "é",
        "e\u0301",
        "ﬀ",
        "ff",
        "ｘ",
        "а",
        "a",
        "ı",
        "i",
        "I",
        "İ",
        "🔒",
        "👩‍👩‍👧",
        "日本語",
    ],
    *["\u202e", "\u2028", "\ufeff", "\xa0", "x" * 1024, "é" * 512, "🔒" * 256, "null", "None", "0", "NaN"],
    "'; DROP TABLE claim; --",
]


async def test_good_names_are_distinct(locks: LocksView) -> None:
    """All other names are used exactly as given: none is normalised, folded or confused with another."""
    assert len(set(GOOD_NAMES)) == len(GOOD_NAMES)
    leases = []
    for name in GOOD_NAMES:
        lease = await locks.lock(name).try_acquire()
        assert lease is not None, name
        assert lease.name == name
        leases.append(lease)
    assert {name async for name in locks.names()} == set(GOOD_NAMES)
    for name, lease in zip(GOOD_NAMES, leases, strict=True):
        assert (await locks.inspect(name)).token == lease.token
        assert await lease.release() is True


@pytest.mark.client_side
async def test_bad_timeout_is_refused(locks: LocksView) -> None:
    """A timeout or max_hold that is no duration raises ValueError before anything is locked."""
    bad: list[Any] = [-1, float("nan"), True, "5", -(10**400)]
    for timeout in bad:
        with pytest.raises(ValueError, match="timeout"):
            locks.lock("x", timeout=timeout)
        with pytest.raises(ValueError, match="timeout"):
            await locks.lock("x").acquire(timeout=timeout)
    for max_hold in (*bad, 0):
        with pytest.raises(ValueError, match="max_hold"):
            locks.lock("x", max_hold=max_hold)
    assert await is_free(locks, "x")


async def test_good_timeout_is_accepted(locks: LocksView) -> None:
    """None, infinity and very large timeouts wait for ever; 0 tries once."""
    for timeout in (None, float("inf"), 10**400, 1e300, 0, 0.0, 5):
        async with locks.lock("x", timeout=timeout, max_hold=None if timeout == 0 else timeout):
            pass
        await (await locks.lock("x").acquire(timeout=timeout)).release()


async def test_namespaces_are_separate(factory: MakeClient) -> None:
    """Locks of two namespaces on one engine do not exclude each other, however similar the names of the namespaces are."""
    spaces = ["one", "two", "One", "one ", "one:two", "é", "e\u0301"]
    clients = [factory.connect(namespace=space) for space in spaces]
    leases = [await locks.lock("two:x").acquire() for locks in clients]
    for locks in clients:
        assert [name async for name in locks.names()] == ["two:x"]
        assert (await locks.inspect("x")).holders == ()
    assert await clients[0].force_release("two:x", reason="test") == 1
    for lease, locks in zip(leases[1:], clients[1:], strict=True):
        assert (await locks.inspect("two:x")).token == lease.token
    for lease in leases:
        await lease.release()


@pytest.mark.client_side
async def test_bad_namespace_and_owner_are_refused(factory: MakeClient) -> None:
    """Namespaces and owners follow the rules for names."""
    values: list[Any] = ["", "a\nb", "x" * 1025, 3]
    for bad in values:
        for option in ("namespace", "owner"):
            with pytest.raises(InvalidName, match=option):
                connect(factory.runtime_name, direct, factory.url, **{option: bad})


async def test_owner_is_shown_unchanged(factory: MakeClient) -> None:
    """`inspect` shows an owner exactly as it was given."""
    locks = factory.connect(owner="<b>Ünï & '🔒'</b>")
    async with locks.lock("x"):
        assert (await locks.inspect("x")).holders[0].owner == "<b>Ünï & '🔒'</b>"


SECRET_URLS = [
    "{scheme}://user:s3cr3t@host/x",
    "{scheme}://:s3cr3t@host",
    "{scheme}://user:p@s3cr3t@host/x?y=1",
    "{scheme}://user:a?s3cr3t@host/x",
    "{scheme}://user:a/s3cr3t@host/x",
    "{scheme}://user:a#s3cr3t@host/x",
    "{scheme}://host/x?password=s3cr3t&y=1",
    "{scheme}://host/x?y=1&auth_token=s3cr3t",
    "{scheme}:user:s3cr3t@host",
]


def test_refused_url_does_not_show_its_password(url: str, runtime_name: str) -> None:
    """When an engine refuses a URL, the password is not in the error, its repr, its causes or its pickle."""
    for scheme in (url.partition(":")[0], "nosuchengine"):
        for shape in SECRET_URLS:
            shown = _everything_shown(runtime_name, shape.format(scheme=scheme))
            assert shown
            assert "s3cr3t" not in shown


def _everything_shown(runtime_name: str, url: str) -> str:
    try:
        return repr(connect(runtime_name, direct, url))
    except InvalidURL as refused:
        error: BaseException | None = refused
    shown = ""
    while error is not None:
        shown += f"{error} {error!r} {pickle.dumps(error)!r}"
        error = error.__cause__ or error.__context__
    return shown


@pytest.mark.client_side
async def test_client_lock_and_lease_cannot_be_pickled(locks: LocksView) -> None:
    """A client, a lock and a lease refuse to be pickled: another process would hold a lock that is not its own."""
    raw = locks.raw
    lease = await locks.lock("x").acquire()
    things = {"client": raw, "lock": raw.lock("x"), "lease": getattr(lease, "raw", lease)}
    for what, thing in things.items():
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(
                TypeError, match=rf"a fencelock {what} cannot be sent to another process; call connect\(\)"
            ):
                pickle.dumps([thing], protocol)
    await lease.release()


def test_unknown_scheme_is_refused(runtime_name: str) -> None:
    """A URL with an unknown scheme is refused, and the error lists the known schemes."""
    for url in ("nosuch://x", "", "x", "/var/lib/locks.db", "://", "sqlite"):
        with pytest.raises(InvalidURL, match="The engines are sqlite:, redis://"):
            connect(runtime_name, direct, url)
    with pytest.raises(InvalidURL, match="must be a str"):
        connect(runtime_name, direct, 42)  # type: ignore[arg-type]


def test_default_url_is_the_variable_or_the_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Without a URL the client uses $FENCELOCK_URL, or SQLite in the state folder, which only this user can read."""
    monkeypatch.setenv("FENCELOCK_URL", "memory://from-the-environment")
    with fencelock.connect() as locks:
        assert locks.traits.engine == "memory"
    monkeypatch.delenv("FENCELOCK_URL")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "state" / "fencelock"
    with fencelock.connect() as locks:
        assert locks.traits.engine == "sqlite"
        assert repr(locks) == f"<Locks sqlite:///{folder}/locks.db>"
        assert not folder.exists()
        with locks.lock("x"):
            pass
    assert (folder / "locks.db").exists()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_on_lost_must_be_callable(runtime_name: str) -> None:
    """`connect` refuses an `on_lost` that cannot be called or would have to be awaited."""

    async def on_lost(lease: object, reason: object) -> None: ...

    for bad, message in ((42, "not int"), ("print", "not str"), (on_lost, "async def")):
        with pytest.raises(TypeError, match=rf"on_lost .*{message}"):
            connect(runtime_name, direct, "memory://on-lost", on_lost=bad)


@pytest.mark.client_side
async def test_decorator_without_a_name_is_refused(locks: LocksView) -> None:
    """A bare `@locks.locked` raises an error that says what to write."""
    raw = locks.raw

    def report() -> None: ...

    with pytest.raises(TypeError, match=r"write @locks\.locked\('report'\)"):
        raw.locked(report)
    with pytest.raises(TypeError, match="a str, not int"):
        raw.locked(42)


@pytest.mark.client_side
async def test_bad_options_name_the_lock(locks: LocksView) -> None:
    """Every error about an option names the lock."""
    for options in ({"timeout": -1}, {"timeout": "5"}, {"max_hold": 0}, {"max_hold": "x"}, {"purpose": "safety"}):
        with pytest.raises(ValueError, match=r"^'order:42': "):
            locks.lock("order:42", **options)
    with pytest.raises(ValueError, match=r"^'order:42': timeout"):
        await locks.lock("order:42").acquire(timeout=-1)


@pytest.mark.client_side
async def test_lost_is_true_after_the_loss_and_shows_its_lease(locks: LocksView) -> None:
    """`lease.lost` is true once the lease is lost, and its repr shows the lease."""
    lease = await locks.lock("x", ttl=max(0.5, locks.traits.ttl_min), renew=False).acquire()
    lost = getattr(lease, "raw", lease).lost
    assert not lost
    assert repr(lost) == "<Lost 'x' not set>"
    await lease.lost.wait(SOON)
    assert lost
    assert repr(lost) == "<Lost 'x' set>"
    await lease.release()
