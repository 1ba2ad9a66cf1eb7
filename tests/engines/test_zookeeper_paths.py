"""Names and order of nodes, data of claims, and tokens: what needs no server."""

from __future__ import annotations

import random
from urllib.parse import unquote

import pytest

from fencelock import EngineUnavailable
from fencelock.engines.zookeeper.namespace import read_origin
from fencelock.engines.zookeeper.paths import (
    UNREADABLE,
    ClaimData,
    ancestors,
    decode_claim,
    escape,
    in_order,
    node_prefix,
    token,
)
from fencelock.model import TOKEN_MAX, Claim, Mode

TOP = 2**31


@pytest.mark.parametrize("first", [0, 17, TOP - 3, -TOP, -3, TOP - 1])
def test_order_over_the_wrap(first: int) -> None:
    """Claims are in the order of ZooKeeper's numbers, also where its 32 bits wrap."""
    numbers = [(first + step + TOP) % 2**32 - TOP for step in range(6)]
    claims = [Claim("x", 30) for _ in numbers]
    children = [f"{node_prefix(claim)}{number:010d}" for claim, number in zip(claims, numbers, strict=True)]
    shuffled = random.Random(first).sample(children, len(children))
    assert [node.id for node in in_order(shuffled)] == [claim.id for claim in claims]


def test_node_names_have_mode_and_limit() -> None:
    """A node's name has all that admission needs; children that are not claims are ignored."""
    claims = [Claim("x", 30), Claim("x", 30, mode=Mode.SHARED), Claim("x", 30, mode=Mode.PERMIT, limit=12)]
    children = [f"{node_prefix(claim)}{number:010d}" for number, claim in enumerate(claims)]
    found = in_order([*children, "strange", "y-z-notanumber", "q-z-1"])
    assert [(node.id, node.mode, node.limit) for node in found] == [(c.id, c.mode, c.limit) for c in claims]


@pytest.mark.parametrize("name", [".", "..", "...", "a/b", "%2E", "%", "a b", "ünï", "🔒", "zookeeper", "%2e%2E"])
def test_names_are_escaped(name: str) -> None:
    """A name becomes one valid step of a path, and can be decoded."""
    step = escape(name)
    assert "/" not in step
    assert step not in (".", "..")
    assert unquote(step) == name


def test_different_names_stay_different() -> None:
    """Names that look like each other's escapes stay different."""
    names = [".", "%2E", "%2e", "%252E", "..", "a", "A", "a/", "a%2F", "a%2f"]
    assert len({escape(name) for name in names}) == len(names)


def test_ancestors() -> None:
    """Ancestors are listed from the top down."""
    assert ancestors("/a/b/c") == ["/a", "/a/b", "/a/b/c"]


def test_tokens_rise_with_transactions() -> None:
    """A token is the base plus the transaction's number, also across a change of the leader."""
    assert token(1_700_000_000_000_000, 4) == 1_700_000_000_000_004
    assert token(-5, 0x600000000) > token(-5, 0x5FFFFFFFF)


def test_tokens_that_do_not_fit_are_refused() -> None:
    """An ensemble whose numbers pass 2^53 is refused with the reason: JSON would round such tokens."""
    base = 1_700_000_000_000_000
    last = TOKEN_MAX - base
    assert token(base, last) == TOKEN_MAX
    for czxid in (last + 1, 2**21 << 32, -base):
        with pytest.raises(EngineUnavailable, match="2\\^53"):
            token(base, czxid)


def test_layout_of_another_version_is_refused() -> None:
    """A client refuses a layout that it does not know, and data that is no layout."""
    assert read_origin(b"2 5", "/ns/layout") == 5
    assert read_origin(b"2 -5", "/ns/layout") == -5
    for content in (b"1 5", b"", b"2", b"2 x", "2 ²".encode(), b"2 " + b"9" * 5000, b"\xff\xfe"):
        with pytest.raises(EngineUnavailable, match="/ns/layout"):
            read_origin(content, "/ns/layout")


def test_claim_data_round_trip() -> None:
    """The data of a claim's node is decoded as it was encoded, whatever characters it has."""
    data = ClaimData(2.5, "me & you \udc80", "http://ü\n", -7, 11, 12, 13)
    assert decode_claim(data.encode()) == data


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"20 me", b"[]", b"{}", b"[1,2]", b'["x","","",0,0,0,0]', b"[1,1,1,1,1,1,1e999]"]
)
def test_data_that_is_not_a_claims(content: bytes) -> None:
    """Anybody may write into a claim's node: `inspect` shows such a claim without a ttl and an owner."""
    assert decode_claim(content) == UNREADABLE


def test_held_for_counts_from_the_grant_and_is_never_negative() -> None:
    """`held_for` counts from the grant if it was written, else from the creation; clocks may disagree."""
    data = ClaimData(20, "", queued_at=5_000_000)
    assert data.held_for(7_500_000) == 2.5
    assert data._replace(granted_at=7_000_000).held_for(7_500_000) == 0.5
    assert data.held_for(1) == 0
