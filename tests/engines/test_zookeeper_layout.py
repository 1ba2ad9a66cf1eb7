"""What needs no server: order, names, tokens, signs of life, URLs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fencelock import EngineUnavailable, InvalidURL
from fencelock.engines.zookeeper.address import parse
from fencelock.engines.zookeeper.layout import (
    Layout,
    ancestors,
    escape,
    in_order,
    prefix,
    read,
    said,
    tell,
    unescape,
    written,
)
from fencelock.engines.zookeeper.signs import BEAT, SHARE, Signs
from fencelock.model import TOKEN_MAX, Claim

TOP = 2**31


@pytest.mark.parametrize("first", [0, 17, TOP - 3, -TOP, -3, TOP - 1])
def test_order_over_the_wrap(first: int) -> None:
    """Claims stand in the order in which ZooKeeper numbered them, also where its 32 bits go over."""
    numbers = [(first + step + TOP) % 2**32 - TOP for step in range(6)]
    claims = [Claim("x", 30) for _ in numbers]
    children = [f"{prefix(claim)}{number:010d}" for claim, number in zip(claims, numbers, strict=True)]
    shuffled = random.Random(first).sample(children, len(children))
    assert [node.id for node in in_order(shuffled)] == [claim.id for claim in claims]


def test_nodes_tell_the_mode() -> None:
    """A node's name says what admission has to know; what is not ours is left out."""
    claims = [Claim("x", 30), Claim("x", 30, shared=True), Claim("x", 30, shared=True, limit=12)]
    children = [f"{prefix(claim)}{number:010d}" for number, claim in enumerate(claims)]
    found = in_order([*children, "strange", "y-z-notanumber", "q-z-1"])
    assert [(node.id, node.shared, node.limit) for node in found] == [(c.id, c.shared, c.limit) for c in claims]


@pytest.mark.parametrize("name", [".", "..", "...", "a/b", "%2E", "%", "a b", "ünï", "🔒", "zookeeper", "%2e%2E"])
def test_names_are_escaped(name: str) -> None:
    """A name becomes one harmless step of a path, and comes back."""
    step = escape(name)
    assert "/" not in step
    assert step not in (".", "..")
    assert unescape(step) == name


def test_different_names_stay_different() -> None:
    """Names that look like each other's escapes do not meet."""
    names = [".", "%2E", "%2e", "%252E", "..", "a", "A", "a/", "a%2F", "a%2f"]
    assert len({escape(name) for name in names}) == len(names)


def test_ancestors() -> None:
    """Parents are made from the top down."""
    assert ancestors("/a/b/c") == ["/a", "/a/b", "/a/b/c"]


def test_tokens_count_from_the_clock() -> None:
    """Tokens start at the clock at which the namespace was made, and rise with the ensemble's own numbers."""
    layout = Layout(1_700_000_000_000_000, 0x500000003)
    assert layout.token(0x500000004) == 1_700_000_000_000_001
    assert layout.token(0x600000000) > layout.token(0x5FFFFFFFF)


def test_tokens_that_no_longer_fit_are_refused() -> None:
    """An ensemble whose numbers went beyond 2^53 is refused in words, rather than giving tokens that JSON would round."""
    layout = Layout(1_700_000_000_000_000, 1)
    last = TOKEN_MAX - 1_700_000_000_000_000 + 1
    assert layout.token(last) == TOKEN_MAX
    for czxid in (last + 1, 2**21 << 32, 1 - 1_700_000_000_000_000):
        with pytest.raises(EngineUnavailable, match="2\\^53"):
            layout.token(czxid)


def test_layout_of_another_version_is_refused() -> None:
    """Two releases in one fleet never disagree."""
    assert read(written(5), 7, "/ns/layout") == Layout(5, 7)
    for content in (b"2 5", b"", b"1", b"1 x", "1 ²".encode(), b"1 " + b"9" * 5000, b"\xff\xfe"):
        with pytest.raises(EngineUnavailable, match="/ns/layout"):
            read(content, 7, "/ns/layout")


def test_nodes_that_somebody_else_wrote() -> None:
    """Whatever stands in a claim's node, whoever looks is told what can be read of it."""
    assert said(tell(2.5, "me & you")) == (2.5, "me & you")
    assert said(b"") == (0.0, "")
    assert said(b"\xff you") == (0.0, "you")


# ---------------------------------------------------------------------- signs of life

TIMEOUT = 16.0
TTL = TIMEOUT * SHARE


def test_new_session_counts_at_once() -> None:
    """A session that was just made is good from its first request on."""
    signs = Signs(TIMEOUT, 100.0)
    assert signs.answered(100.5, 100.6, True) == 100.5


def test_steady_beats_count_in_full() -> None:
    """With a beat every sixteenth, every answer of the leader counts from when it was asked for."""
    signs = Signs(TIMEOUT, 0.0)
    for beat in range(1, 200):
        sent = beat * TIMEOUT * BEAT
        assert signs.answered(sent, sent + 0.1, True) == sent


def test_sign_after_a_silence_counts_only_when_it_was_reported() -> None:
    """After a silence the leader may know the old signs only: until a quarter of the timeout later, only those count."""
    signs = Signs(TIMEOUT, 0.0)
    assert signs.answered(9.0, 9.1, True) == pytest.approx(0.0 + TIMEOUT - TTL)
    assert signs.answered(13.0, 13.05, True) == pytest.approx(0.0 + TIMEOUT - TTL)
    assert signs.answered(13.1, 13.2, True) == 13.1  # the one of 9.0 was heard by 9.1, and reported by 13.1


def test_reads_alone_prove_nothing() -> None:
    """A follower that is cut off answers reads: they count only once the leader has answered something later."""
    signs = Signs(TIMEOUT, 0.0)
    for step in range(1, 9):
        assert signs.answered(float(step), step + 0.1, False) is None
    assert signs.answered(9.0, 9.1, True) == 9.0


def test_reconnecting_counts_at_once_and_forgets_the_server_before() -> None:
    """What another server was told may never have been reported; making a connection is done with the leader."""
    signs = Signs(TIMEOUT, 0.0)
    signs.answered(4.0, 4.1, False)
    signs.connected(6.0)
    signs.answered(5.9, 6.1, False)  # came from the server before
    assert signs.answered(12.0, 12.1, True) == pytest.approx(6.0 + TIMEOUT - TTL)


def test_never_more_than_the_leader_can_know() -> None:
    """On random histories no lease outlives what a leader with half a tick of a quarter of the timeout must still keep."""
    for seed in range(300):
        chance = random.Random(seed)
        half_tick = chance.uniform(0.05, TIMEOUT / 4)
        report = chance.uniform(0, half_tick)
        signs, touched, unreported, now = Signs(TIMEOUT, 0.0), 0.0, False, 0.0
        while now < 200:
            now += chance.choice([0.2, 1.0, 1.0, 3.0, 9.0]) * chance.random()
            sent = now
            now += chance.random() * 0.3
            while report <= now:  # the follower reports to its leader
                if unreported:
                    touched, unreported = report, False
                report += half_tick
            unreported = True  # the follower hears of us, just too late for that report
            if touched + TIMEOUT <= now:
                break  # the leader has ended the session, and says so
            since = signs.answered(sent, now, chance.random() < 0.7)
            if since is not None:
                assert since <= sent
                assert since + TTL <= touched + TIMEOUT + 1e-9, seed


# ---------------------------------------------------------------------- URLs


def test_url() -> None:
    """Hosts, chroot and login are what they say."""
    address = parse("zookeeper://me:p%40ss@h1:2181,h2,[::1]:99/a/b/")
    assert address.hosts == ("h1:2181", "h2:2181", "[::1]:99")
    assert (address.chroot, address.login, address.tls) == ("/a/b", "me:p@ss", False)
    assert parse("zk://h").chroot == parse("zookeeper://h/").chroot == ""
    assert "p@ss" not in repr(address)
    assert "p@ss" not in address.name


def test_tls_url(tmp_path: Path) -> None:
    """TLS has its own scheme, its own port, and files that have to be there."""
    for name in ("ca", "cert", "key"):
        (tmp_path / name).touch()
    address = parse(f"zookeepers://h?ca={tmp_path}/ca&cert={tmp_path}/cert&key={tmp_path}/key")
    assert (address.hosts, address.tls, address.ca) == (("h:2281",), True, f"{tmp_path}/ca")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("zookeeper://", "names no host"),
        ("zookeeper:///chroot", "names no host"),
        ("zookeeper://a,,b", "lacks a host"),
        ("zookeeper://a:1,a:1", "twice"),
        ("zookeeper://a:0", "port"),
        ("zookeeper://a:port", "port"),
        ("zookeeper://a:1:2", "colons"),
        ("zookeeper://me@a", "a user and a password"),
        ("zookeeper://:pw@a", "a user and a password"),
        ("zookeeper://a/../b", "chroot"),
        ("zookeeper://a/b//c", "chroot"),
        ("zookeeper://a?nosuch=1", "an option that is not known"),
        ("zookeeper://me:1234?s3cr3t@h:1", "an option that is not known"),
        ("zookeeper://me:1234?s3cr3t=@h:1", "an option that is not known"),
        ("zookeeper://a?ca=x", "zookeepers://"),
        ("zookeepers://a?ca=/no/such/file", "names no file"),
        ("zookeepers://a?cert=/dev/null", "names no file"),
    ],
)
def test_url_that_is_refused(url: str, message: str) -> None:
    """A URL that cannot be meant is refused with what is wrong, without its password."""
    with pytest.raises(InvalidURL) as caught:
        parse(url.replace("://", "://me:s3cr3t@") if "@" not in url and "me" not in url else url)
    assert message in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
