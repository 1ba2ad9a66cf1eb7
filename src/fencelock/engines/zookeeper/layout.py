"""What stands where in ZooKeeper: paths, the names of claims' nodes and their order, and where the tokens start.

<chroot>/<namespace>/layout                      the layout's version, and the clock in µs when it was made
<chroot>/<namespace>/locks/<name>/x-<id>-<n>     one claim: its mode, its id, and ZooKeeper's number
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

from fencelock.errors import EngineUnavailable
from fencelock.model import TOKEN_MAX, Claim

VERSION = "1"
UNLIMITED = ("x", "s")
"""The modes of claims that are not one of a number of permits."""


class Paths(NamedTuple):
    """The nodes of a namespace that stay."""

    root: str
    layout: str
    locks: str

    def of(self, name: str) -> str:
        """Return the node below which the claims on a name stand."""
        return f"{self.locks}/{escape(name)}"


def paths(chroot: str, namespace: str) -> Paths:
    """Return where a namespace is."""
    root = f"{chroot}/{escape(namespace)}"
    return Paths(root, f"{root}/layout", f"{root}/locks")


def ancestors(path: str) -> list[str]:
    """Return the nodes that have to be there before this one, and itself, the topmost first.

    >>> ancestors("/a/b")
    ['/a', '/a/b']
    """
    parts = path.split("/")[1:]
    return ["/" + "/".join(parts[:number]) for number in range(1, len(parts) + 1)]


@lru_cache(1024)
def escape(name: str) -> str:
    """Return a name that ZooKeeper takes for one step of a path; different names never become the same.

    >>> escape("a/b"), escape(".."), escape("a.b")
    ('a%2Fb', '%2E%2E', 'a.b')
    """
    return name.replace(".", "%2E") if name in (".", "..") else quote(name, safe="")


def unescape(step: str) -> str:
    """Return the name that a step of a path stands for."""
    return unquote(step)


def tell(ttl: float, owner: str) -> bytes:
    """Return what a claim's node says to whoever looks."""
    return f"{ttl:g} {owner}".encode()


def said(content: bytes) -> tuple[float, str]:
    """Return the ttl and the owner that a claim's node tells; 0 for a ttl that cannot be read, as anybody may write there."""
    ttl, _, owner = content.decode("utf-8", "replace").partition(" ")
    try:
        return float(ttl), owner
    except ValueError:
        return 0.0, owner


class Node(NamedTuple):
    """A claim as its node's name tells it: all that `admit` looks at, so that a list of names decides who holds."""

    number: int
    name: str
    id: str
    shared: bool
    limit: int | None


def prefix(claim: Claim) -> str:
    """Return the beginning of a claim's node; ZooKeeper adds its number."""
    return f"{'x' if not claim.shared else 's' if claim.limit is None else claim.limit}-{claim.id}-"


def in_order(children: Iterable[str]) -> list[Node]:
    """Return the claims of one name, oldest first.

    ZooKeeper counts the children that a node ever had in 32 bits with a sign, and begins again when the node itself was
    removed; it has to be empty for that. So two numbers that stand side by side are of one count, and if they lie further
    apart than half of it, the count has gone over its end: the negative ones are the later.
    """
    nodes = []
    for child in children:
        try:
            mode, id, number = child.split("-", 2)
            nodes.append(Node(int(number), child, id, mode != "x", None if mode in UNLIMITED else int(mode)))
        except ValueError:
            pass  # not ours
    nodes.sort()
    if nodes and nodes[-1].number - nodes[0].number >= 2**31:
        nodes.sort(key=lambda node: node.number % 2**32)
    return nodes


class Layout(NamedTuple):
    """What the node `layout` says: where the tokens start. It is written once, and never changes."""

    base: int
    czxid: int

    def token(self, czxid: int) -> int:
        """Return the token of a claim: ZooKeeper's number of the change that made its node, on the scale of all engines.

        Numbers of changes rise all over the ensemble, over every change of its leader too: by 2^32 each time, which is as
        much as 72 minutes of the clock. Two million changes of the leader use the tokens up.
        """
        token = self.base + czxid - self.czxid
        if not 0 < token <= TOKEN_MAX:
            raise EngineUnavailable(
                f"the ensemble's transaction numbers no longer fit into tokens below 2^53 ({czxid:#x}, after {self.czxid:#x} "
                "when this namespace was made); use a new namespace, and rebase the fences"
            )
        return token


def written(base: int) -> bytes:
    """Return the content of a new node `layout`."""
    return f"{VERSION} {base}".encode()


def read(content: bytes, czxid: int, path: str) -> Layout:
    """Return what a node `layout` says; refuse one of another version."""
    version, _, base = content.decode("utf-8", "replace").partition(" ")
    if version != VERSION or not base.isdecimal() or len(base) > len(str(TOKEN_MAX)):
        raise EngineUnavailable(
            f"{path} is of layout {version!r:.20}, and this release of fencelock knows {VERSION!r} only; use one release for "
            "all clients of a namespace"
        )
    return Layout(int(base), czxid)
