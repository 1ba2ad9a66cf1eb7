"""The token base: tokens follow the clock, although etcd's revisions rise by ones.

A claim's token is the base plus the claim's create revision. The transaction that creates a claim compares the revision at
which the base was last written, and stores the base in the claim itself. So every claim has the base that was valid at its
own revision, later claims have a base at least as high, and tokens rise strictly. A client that finds the tokens more than a
minute behind its clock raises the base. Nothing lowers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.core.clock import wall_us
from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.core.log import WARNING, log
from fencelock.engines.etcd.keyspace import Keyspace, Numbering, read_numbering
from fencelock.engines.etcd.messages import RANGE, TXN, do_put, get_key, is_modified_at, read_range, read_txn, txn

if TYPE_CHECKING:
    from fencelock.engines.etcd.client import EtcdClient

MAX_LAG = 60_000_000
"""µs by which tokens may be behind the clock."""
LARGE_RAISE = 86_400_000_000
"""µs: a raise of more than a day is logged. It may be a wrong clock, and nothing lowers the base again."""


def next_numbering(stored: Numbering | None, revision: int, clock: int, min_token: int) -> Numbering:
    """Decide what the key `about` should contain at a revision; return `stored` if it may stay as it is.

    Tokens start at the clock, and must lie above `min_token`, which is 0 unless etcd's history has changed.

    >>> next_numbering(Numbering(900, 0, 7), revision=100, clock=1000, min_token=0)
    Numbering(base=900, origin=0, mod_revision=7)
    >>> next_numbering(Numbering(900, 0, 7), revision=100, clock=1000 + MAX_LAG + 1, min_token=0).base
    60000901
    """
    token = max(clock, min_token + 1)
    new = max(token - revision, 0)
    if stored is None or stored.base + revision <= min_token:
        # Revisions of the old history may come again: record versions must not.
        return Numbering(new, clock, 0 if stored is None else stored.mod_revision)
    if stored.base + revision < clock - MAX_LAG:
        return stored._replace(base=new)
    return stored


class TokenBase:
    """The token base of a namespace, as far as this client knows it."""

    def __init__(self, client: EtcdClient, keyspace: Keyspace) -> None:
        self._client = client
        self._keyspace = keyspace
        self._known: Numbering | None = None
        self._min_token = 0

    async def get(self, timeout: float) -> Numbering:
        """Return the base for a new claim: the one that this client knows, unless its tokens are too old."""
        known = self._known
        if known is not None and known.base + self._client.revision >= wall_us() - MAX_LAG:
            return known
        return await self.read(timeout)

    async def read(self, timeout: float = MAX_REPLY_TIMEOUT) -> Numbering:
        """Read the key `about`; create it, or raise its base, if necessary."""
        key = self._keyspace.about
        while True:
            header, found = read_range(await self._client.request(RANGE, get_key(key), timeout))
            stored = read_numbering(found.pairs, self._client.address)
            wanted = next_numbering(stored, header.revision, wall_us(), self._min_token)
            if wanted is not stored:
                write = txn([is_modified_at(key, wanted.mod_revision)], [do_put(key, wanted.encode())])
                reply = read_txn(await self._client.request(TXN, write, timeout))
                if not reply.succeeded:
                    continue  # another client was faster
                if stored is not None and wanted.base - stored.base > LARGE_RAISE:
                    days = (wanted.base - stored.base) / LARGE_RAISE
                    message = (
                        f"etcd at {self._client.address}: raised the token base of {key.decode()!r} by {days:.1f} days"
                    )
                    log("etcd", WARNING, f"{message}; tokens never go back, so check the clocks if this is unexpected")
                wanted = wanted._replace(mod_revision=reply.header.revision)
            self._known = wanted
            return wanted

    def forget(self, outdated: Numbering) -> None:
        """Read again before the next claim: etcd has another base than this one by now."""
        if self._known is outdated:
            self._known = None

    def history_changed(self, revision: int) -> None:
        """Give no token again that this client may have seen up to this revision: etcd's history has changed."""
        if self._known is not None:
            self._min_token = max(self._min_token, self._known.base + revision)
            self._known = None
