"""Paths, the names of claims' nodes and their order, and the data of claims.

<chroot>/<namespace>/layout                      the version of the layout, and the fixed origin of record versions
<chroot>/<namespace>/layout/<base>               the base of tokens: the only child, replaced when the base is raised
<chroot>/<namespace>/locks/<name>/x-<id>-<n>     one claim: its mode, its id, and ZooKeeper's sequence number
<chroot>/<namespace>/records/<key>               one record
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from fencelock.errors import EngineUnavailable
from fencelock.model import TOKEN_MAX, Claim, Mode


class Paths:
    """The permanent nodes of a namespace."""

    def __init__(self, chroot: str, namespace: str) -> None:
        self.root = f"{chroot}/{escape(namespace)}"
        self.layout = f"{self.root}/layout"
        self.locks = f"{self.root}/locks"
        self.records = f"{self.root}/records"

    def of(self, name: str) -> str:
        """Return the parent of the claims on a name."""
        return f"{self.locks}/{escape(name)}"

    def base(self, base: int) -> str:
        """Return the node that exists while this is the base of tokens."""
        return f"{self.layout}/{base}"


def ancestors(path: str) -> list[str]:
    """Return the path with all its ancestors, topmost first.

    >>> ancestors("/a/b")
    ['/a', '/a/b']
    """
    parts = path.split("/")[1:]
    return ["/" + "/".join(parts[:number]) for number in range(1, len(parts) + 1)]


@lru_cache(1024)
def escape(name: str) -> str:
    """Return the name as one step of a path; different names stay different, and `unquote` returns the name.

    >>> escape("a/b"), escape(".."), escape("a.b")
    ('a%2Fb', '%2E%2E', 'a.b')
    """
    return name.replace(".", "%2E") if name in (".", "..") else quote(name, safe="")


class QueueNode(NamedTuple):
    """A claim as its node's name describes it: all that `blockers` needs, so that one list of children decides who holds."""

    number: int
    name: str
    id: str
    mode: Mode
    limit: int | None

    @property
    def shared(self) -> bool:
        """Whether it is not exclusive."""
        return self.mode is not Mode.EXCLUSIVE


MODES = {Mode.EXCLUSIVE: "x", Mode.SHARED: "s"}


def node_prefix(claim: Claim) -> str:
    """Return the name of a claim's node without the sequence number, which ZooKeeper appends."""
    return f"{MODES.get(claim.mode, claim.limit)}-{claim.id}-"


def parse_node(name: str) -> QueueNode:
    """Parse the name of a claim's node; raise ValueError if it is not one."""
    mode, id, number = name.split("-", 2)
    if mode == "x":
        return QueueNode(int(number), name, id, Mode.EXCLUSIVE, None)
    if mode == "s":
        return QueueNode(int(number), name, id, Mode.SHARED, None)
    return QueueNode(int(number), name, id, Mode.PERMIT, int(mode))


def in_order(children: Iterable[str]) -> list[QueueNode]:
    """Return the claims of one name, oldest first.

    ZooKeeper counts the children that a node ever had in 32 bits with a sign, and starts again when the node itself was
    removed, which it can be only without children. So two numbers that exist side by side are of one count, and if they are
    further apart than half of it, the count has wrapped: the negative ones are the later ones.
    """
    nodes = []
    for child in children:
        try:
            nodes.append(parse_node(child))
        except ValueError:
            pass  # not a claim
    nodes.sort()
    if nodes and nodes[-1].number - nodes[0].number >= 2**31:
        nodes.sort(key=lambda node: node.number % 2**32)
    return nodes


class ClaimData(NamedTuple):
    """The data of a claim's node."""

    ttl: float
    owner: str
    value: str = ""
    base: int = 0
    """The base of tokens in the transaction that created the node: the claim's token is computed from this copy only."""
    queued_at: int = 0
    """The client's wall clock, in µs, when it created the claim."""
    granted_at: int = 0
    """The same when the claim was granted, if it had to wait; its holder adds it with its first renewal."""
    token: int = 0
    """The token, if a downgrade has replaced the claim's first node."""

    def encode(self) -> bytes:
        """Return the bytes for the node."""
        return json.dumps(self).encode()

    def token_of(self, czxid: int) -> int:
        """Return the claim's token, given the transaction that created its node."""
        return self.token or token(self.base, czxid)

    def held_for(self, now_us: int) -> float:
        """Return the seconds since the grant; until the first renewal of a claim that had to wait, since it queued."""
        return max(0.0, (now_us - (self.granted_at or self.queued_at)) / 1e6)


UNREADABLE = ClaimData(0.0, "")


def decode_claim(data: bytes) -> ClaimData:
    """Return the data of a claim's node. Anybody may write there, so data that is not ours has no ttl and no owner."""
    try:
        ttl, owner, value, *numbers = json.loads(data)
        base, queued_at, granted_at, token = map(int, numbers)
        return ClaimData(float(ttl), str(owner), str(value), base, queued_at, granted_at, token)
    except (ValueError, TypeError, OverflowError):
        return UNREADABLE


def token(base: int, czxid: int) -> int:
    """Return the token of a node that was created under a base.

    Transaction numbers (zxids) rise across the whole ensemble. Each change of its leader adds 2^32, as much as 72 minutes of
    the clock in µs; the base is lowered by no one, so two million changes of the leader would use up all tokens.
    """
    found = base + czxid
    if not 0 < found <= TOKEN_MAX:
        raise EngineUnavailable(
            f"the ensemble's transaction numbers no longer fit into tokens below 2^53 (base {base}, transaction {czxid:#x}); "
            "use a new namespace, and rebase the fences"
        )
    return found
