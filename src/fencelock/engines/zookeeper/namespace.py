"""The layout of a namespace, and the base of its tokens.

A token is the base plus the number (zxid) of the transaction that created the claim's node. The base is the name of the only
child of `layout`, and each claim is created in a transaction that fails unless this child exists: so the token of a claim is
above the tokens of all claims that were created before it, however often the base is raised, and by however many clients.
Raising deletes the child and creates one with a higher number, in one transaction.
"""

from __future__ import annotations

from kazoo.protocol.serialization import Create, Create2, Delete, Exists, GetChildren, GetData, SetData

from fencelock.core.clock import wall_us
from fencelock.core.log import WARNING, log
from fencelock.engines.zookeeper.paths import Paths, ancestors, token
from fencelock.engines.zookeeper.protocol import Multi, Reply
from fencelock.engines.zookeeper.session import ZooKeeperSession
from fencelock.errors import EngineUnavailable

VERSION = "2"
MAX_LAG_US = 60 * 10**6
"""A base that is further behind the clock is raised."""
NOTABLE_RAISE_US = 24 * 3600 * 10**6
MAX_LEAD_US = 2**50
"""How far ahead of the clock tokens may continue in a namespace that was removed: most of them are left."""
ATTEMPTS = 5
"""How often other clients may change the layout at the same time before that counts as a fault."""


class Namespace:
    """What a client knows of its namespace. Several sessions share it."""

    def __init__(self, paths: Paths, address: str) -> None:
        self.paths = paths
        self.base = 0
        self._address = address
        self._identity: tuple[int, int] | None = None
        """The layout's origin and the transaction that created it: if they change, the namespace was removed."""
        self._top = 0
        """The highest token that this client knows of."""

    def use_base(self, base: int) -> SetData:
        """Return the step of a transaction that fails (no node) unless this is still the base.

        It writes nothing new, but unlike a check it replies with the number of the transaction (`mzxid`). The caller reads
        `base` once, for this step and for its token: another thread may change it in between.
        """
        return SetData(self.paths.base(base), b"", -1)

    def token(self, base: int, czxid: int) -> int:
        """Return the token of a claim; raise EngineUnavailable if it does not fit into 53 bits."""
        found = token(base, czxid)
        self._top = max(self._top, found)
        return found

    async def refresh(self, session: ZooKeeperSession, timeout: float) -> None:
        """Raise the base if it is more than a minute behind the clock. Of several clients that do this, one succeeds.

        The others read the new base and look again: the clock of the one that succeeded may be behind theirs.
        """
        for _ in range(ATTEMPTS):
            clock = wall_us()
            if clock - (self.base + session.zxid) <= MAX_LAG_US:
                return
            old, base = self.base, clock - session.zxid
            steps = Delete(self.paths.base(old), -1), Create(self.paths.base(base), b"", session.acl, 0)
            (reply,) = await session.request(Multi(steps), timeout=timeout)
            if reply.no_node:
                await self.load(session, timeout)
                continue
            reply.get()
            self.base = base
            if base - old > NOTABLE_RAISE_US:
                days = (base - old) / 86400e6
                log(
                    "zookeeper",
                    WARNING,
                    f"{self._address}: the tokens were {days:.1f} days behind the clock, and were raised; "
                    "this is expected after a pause of that length, else check the clocks",
                )
            return

    async def load(self, session: ZooKeeperSession, timeout: float) -> None:
        """Read the layout and the base; create them if they are missing."""
        paths = self.paths
        for _ in range(ATTEMPTS):
            reads = GetData(paths.layout, None), GetChildren(paths.layout, None)
            folders = Exists(paths.locks, None), Exists(paths.records, None)
            layout, bases, *there = await session.request(*reads, *folders, timeout=timeout)
            found: list[int] = []
            if not layout.no_node and not bases.no_node:
                data, stat = layout.get()
                origin = read_origin(data, paths.layout)
                found = [int(child) for child in bases.get() if is_base(child)]
                if found and all(folder.get() is not None for folder in there):
                    identity = origin, stat.czxid
                    if self._identity not in (None, identity):
                        message = "the namespace was removed, or the ensemble has lost its data"
                        log("zookeeper", WARNING, f"{self._address}: {message}")
                    self._identity, self.base = identity, max(found)
                    return
            await self._create(session, None if found else layout, timeout)
        raise EngineUnavailable(f"{paths.layout} cannot be created: another client keeps removing it")

    async def _create(self, session: ZooKeeperSession, layout: Reply | None, timeout: float) -> None:
        """Create what is missing; `layout` is the reply with the layout if there is no base."""
        requests = [Create2(path, b"", session.acl, 0) for path in (*ancestors(self.paths.locks), self.paths.records)]
        if layout is not None:
            requests.append(self._new_base(session, layout))
        for reply in await session.request(*requests, timeout=timeout):
            if not reply.node_exists and not reply.no_node:
                reply.get()

    def _new_base(self, session: ZooKeeperSession, layout: Reply) -> Multi:
        clock = wall_us()
        # Above all tokens that this client knows of, also if its clock is behind the clock of the client that created them.
        start = clock
        if self._identity is not None:
            highest = max(self._top, self.base + session.zxid)
            start = max(clock, min(highest + 1, clock + MAX_LEAD_US))
        base = start - session.zxid
        if layout.no_node:
            first = Create(self.paths.layout, f"{VERSION} {base}".encode(), session.acl, 0)
        else:
            data, stat = layout.get()
            first = SetData(self.paths.layout, data, stat.version)  # the version: so that only one client adds a base
        return Multi([first, Create(self.paths.base(base), b"", session.acl, 0)])


def is_base(child: str) -> bool:
    """Return whether a child of the layout is a base. Others are not ours."""
    return child.removeprefix("-").isdecimal() and child.isascii()


def read_origin(data: bytes, path: str) -> int:
    """Return the origin of record versions from the layout's data; refuse another version of the layout."""
    version, _, origin = data.decode("utf-8", "replace").partition(" ")
    if version != VERSION or not is_base(origin) or len(origin) > 20:
        raise EngineUnavailable(
            f"{path} has layout {version!r:.20}, and this release of fencelock knows {VERSION!r} only; use one release for "
            "all clients of a namespace"
        )
    return int(origin)
