"""Where things are kept: one key for what is true of the namespace, one for each claim, and tombstones.

    <prefix>/<namespace>/about                   layout and base of the tokens, written once
    <prefix>/<namespace>/claims/<name>/<ending>  a claim, under its session's lease: mode and owner, and then its id
    <prefix>/<namespace>/tombs/<claim id>        a claim that was abandoned while it may still have been on its way
    <prefix>/<namespace>/records/<key>           a record, under a lease of its own: its token and value

Names are percent-encoded, so a slash ends them. An ending is used again for later claims: see `keys.py`.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote, unquote

from fencelock.engines.etcd.messages import Pair
from fencelock.errors import EngineUnavailable
from fencelock.model import TOKEN_MAX, Claim

LAYOUT = 1
"""The version of all of it; releases that disagree about it must not share a namespace."""


class About(NamedTuple):
    """What is true of a namespace: where its tokens begin, and when that was written down."""

    base: int
    revision: int

    def token(self, created: int) -> int:
        """Return the token of a claim: it has it from when it lines up, so the order of tokens is that of service."""
        return self.base + created


class Spot(NamedTuple):
    """A claim as etcd has it: as much as `admit` wants to know, and what `inspect` shows."""

    id: str
    shared: bool
    limit: int | None
    owner: str
    created: int
    lease: int


class Layout:
    """The keys of one namespace."""

    def __init__(self, prefix: str, namespace: str) -> None:
        self.root = f"{prefix}/{quote(namespace, safe='')}"
        self.about = f"{self.root}/about".encode()
        self.claims = f"{self.root}/claims/"

    def queue(self, name: str) -> str:
        """Return the beginning of the keys of all claims on a name."""
        return f"{self.claims}{quote(name, safe='')}/"

    def queue_of(self, key: str) -> str:
        """Return the beginning of the keys of all claims on the name of this one."""
        return key[: key.rindex("/") + 1]

    def tomb(self, id: str) -> str:
        """Return where the tombstone of a claim stands."""
        return f"{self.root}/tombs/{id}"

    def record(self, key: str) -> bytes:
        """Return where a record stands."""
        return f"{self.root}/records/{quote(key, safe='')}".encode()

    def name_of(self, key: bytes) -> str:
        """Return the name that a claim's key is about."""
        return unquote(key.decode(errors="replace").removeprefix(self.claims).rpartition("/")[0])


def text(key: bytes) -> str:
    """Return a key as text, whoever wrote it: `data` makes the same bytes of it."""
    return key.decode(errors="surrogateescape")


def data(key: str) -> bytes:
    """Return the bytes of a key that was read."""
    return key.encode(errors="surrogateescape")


def value(claim: Claim) -> bytes:
    """Return what is written down of a claim."""
    mode = "x" if not claim.shared else "s" if claim.limit is None else str(claim.limit)
    return f"{mode} {claim.owner}\n{claim.id}".encode()


def is_of(pair: Pair, claim: Claim) -> bool:
    """Return whether it is this claim that has the key."""
    return pair.value.endswith(b"\n" + claim.id.encode())


def spot(pair: Pair) -> Spot:
    """Read a claim; one whose value was not asked for counts as exclusive."""
    mode, _, rest = pair.value.decode(errors="replace").partition(" ")
    before, line, last = rest.rpartition("\n")
    owner = before if line else last
    shared = mode not in ("", "x")
    return Spot(text(pair.key), shared, int(mode) if mode.isdecimal() else None, owner, pair.created, pair.lease)


def about(base: int) -> bytes:
    """Return what is written down of a namespace."""
    return f"{LAYOUT} {base}".encode()


def read_about(pair: Pair, address: str) -> About:
    """Read what was written down of a namespace; refuse what another release has written."""
    layout, _, base = pair.value.decode(errors="replace").partition(" ")
    if layout != str(LAYOUT) or not base.isdecimal() or int(base) > TOKEN_MAX:
        raise EngineUnavailable(
            f"etcd at {address}: {pair.key.decode(errors='replace')!r} was written by another release of fencelock (layout "
            f"{layout[:20]!r}, this one has {LAYOUT}); use another namespace, or upgrade"
        )
    return About(int(base), pair.created)
