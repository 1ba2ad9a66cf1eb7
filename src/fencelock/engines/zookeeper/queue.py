"""The queue of a name: one node for each claim, in ZooKeeper's order. Creates, finds, watches and removes claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kazoo.protocol.serialization import Create, Delete, GetChildren, GetData, SetData, Sync

from fencelock.core.clock import wall_us
from fencelock.core.engine import reply_timeout
from fencelock.core.runtime import Event, Runtime
from fencelock.engines.zookeeper.namespace import Namespace
from fencelock.engines.zookeeper.paths import UNREADABLE, ClaimData, QueueNode, decode_claim, in_order, node_prefix
from fencelock.engines.zookeeper.protocol import (
    CONTAINER,
    EPHEMERAL,
    EPHEMERAL_SEQUENTIAL,
    CreateContainer,
    Multi,
    Reply,
)
from fencelock.engines.zookeeper.session import ZooKeeperSession
from fencelock.errors import EngineUnavailable, NotHeld, OutcomeUnknown
from fencelock.model import Claim, Grant, Mode, blockers

SHORTEST = 0.2
"""Seconds that a reply is waited for at least."""
ATTEMPTS = 5
"""How often others may remove what a claim needs before that counts as a fault."""


class QueuedClaim:
    """A claim of this client in the queue of its name, waiting or holding: its session, its node, and what it waits for."""

    def __init__(self, claim: Claim, session: ZooKeeperSession, parent: str, woken: Event) -> None:
        self.claim = claim._replace(ttl=session.ttl)
        """The claim as the engine keeps it: its ttl is that of its session."""
        self.session = session
        self.parent = parent
        self.woken = woken
        """Set when something that the claim waits for has changed."""
        self.node: str | None = None
        """The node's name; None until ZooKeeper has replied."""
        self.replacing = False
        """Whether a downgrade has no reply so far: the node may have its old name or the new one."""
        self.data = ClaimData(0.0, "")
        self.token = 0
        self.gone = False
        """Whether the node is known to be gone: removed, or expired with its session."""
        self.waited = False
        """Whether the claim had to wait."""
        self.granted_at = 0
        """When the claim was granted, by the wall clock in µs, if it had to wait. The node's data gets it with a renewal."""
        self._watched: str | None = None

    @property
    def path(self) -> str:
        """The path of the node."""
        return f"{self.parent}/{self.node}"

    @property
    def timeout(self) -> float:
        """Seconds to wait for a reply."""
        return reply_timeout(self.session.timeout, SHORTEST)

    def watch(self, blocked_by: tuple[str, ...], queue: list[QueueNode], children: list[str]) -> None:
        """Set `woken` when a node ahead that blocks the claim is gone or changes."""
        self.waited = True
        several = len(blocked_by) > 1
        path = self.parent if several else next(f"{self.parent}/{n.name}" for n in queue if n.id in blocked_by)
        if path == self._watched:
            return
        self.unwatch()
        self._watched = path
        if several:
            # Any departure ahead may admit a permit, so it watches the list itself.
            self.session.watches.watch_children(path, self, self._changed, children)
        else:
            self.session.watches.watch(path, self, self._changed)

    def _changed(self, gone: bool) -> None:  # noqa: ARG002
        self._watched = None
        self.woken.set()

    def unwatch(self) -> None:
        """Stop watching."""
        path, self._watched = self._watched, None
        if path is not None:
            self.session.watches.unwatch(path, self)


class Queue:
    """All claims of this client, by id, and their nodes.

    `on_gone` is called, in any thread, with the id of a claim whose node is gone.
    """

    def __init__(self, runtime: Runtime, namespace: Namespace, on_gone: Callable[[str], None]) -> None:
        self.claims: dict[str, QueuedClaim] = {}
        self._runtime = runtime
        self._namespace = namespace
        self._on_gone = on_gone

    def add(self, claim: Claim, session: ZooKeeperSession) -> QueuedClaim:
        """Register a claim that is about to be enqueued."""
        queued = QueuedClaim(claim, session, self._namespace.paths.of(claim.name), self._runtime.event())
        self.claims[claim.id] = queued
        return queued

    def attach(self, queued: QueuedClaim) -> None:
        """Extend the claim for as long as its session lives from now on."""
        queued.session.attach(queued.claim.id, self._runtime.now(), queued.session.ttl)

    def is_alive(self, queued: QueuedClaim) -> bool:
        """Return whether the claim must still have its node, unless another client removed it."""
        return (
            not queued.gone and self.claims.get(queued.claim.id) is queued and queued.session.alive(self._runtime.now())
        )

    # ------------------------------------------------------------------ creating and finding

    async def enqueue(self, queued: QueuedClaim, timeout: float) -> list[str]:
        """Create the claim's node and return the children of the name, in one round trip if the name was used recently."""
        session, claim, namespace = queued.session, queued.claim, self._namespace
        look = GetChildren(queued.parent, None)
        prepare: list[Any] = []
        for _ in range(ATTEMPTS):
            await namespace.refresh(session, timeout)
            base = namespace.base
            data = ClaimData(session.ttl, claim.owner, claim.value, base, wall_us())
            create = Create(f"{queued.parent}/{node_prefix(claim)}", data.encode(), session.acl, EPHEMERAL_SEQUENTIAL)
            *prepared, created, children = await session.request(
                *prepare, Multi([namespace.use_base(base), create]), look, timeout=timeout
            )
            if not created.no_node:
                stat, path = created.get()
                queued.node, queued.data = path.rpartition("/")[2], data
                queued.token = namespace.token(base, stat.mzxid)
                return children.get()  # type: ignore[no-any-return]
            if created.failed_step == 0 or any(reply.no_node for reply in prepared):
                # The base was raised, or the namespace was removed.
                await namespace.load(session, timeout)
            for reply in prepared:
                if not reply.node_exists and not reply.no_node:
                    reply.get()
            prepare = [CreateContainer(queued.parent, b"", session.acl, CONTAINER)] if created.failed_step else []
        raise EngineUnavailable(f"{queued.parent} cannot be used: another client keeps removing it")

    async def find(self, queued: QueuedClaim, timeout: float) -> list[str]:
        """Return the children of the name, after a sync; enqueue the claim again if its node is gone.

        An attempt without a reply may have created the node.
        """
        session = queued.session
        _, found = await session.request(Sync(queued.parent), GetChildren(queued.parent, None), timeout=timeout)
        children: list[str] = [] if found.no_node else found.get()
        if queued.node is not None and queued.node in children:
            return children
        queued.node = None
        # After the sync the server has seen all requests of this session: they are carried out in order, also over a new
        # connection.
        for node in in_order(children):
            if node.id == queued.claim.id:
                (reply,) = await session.request(GetData(f"{queued.parent}/{node.name}", None), timeout=timeout)
                if reply.no_node:
                    continue
                content, stat = reply.get()
                data = decode_claim(content)
                if stat.ephemeralOwner == session.id and data is not UNREADABLE:
                    queued.node, queued.data, queued.token = node.name, data, data.token_of(stat.czxid)
                    return children
                # Else it belongs to an earlier session, or was overwritten and has no token: `decide` deletes it.
        return await self.enqueue(queued, timeout)

    async def decide(self, queued: QueuedClaim, children: list[str], *, watch: bool) -> Grant | None:
        """Return the grant if the claim may hold the name, given its children; else watch what is ahead of it."""
        nodes = in_order(children)
        mine = next((node for node in nodes if node.name == queued.node), None)
        if mine is None:
            raise OutcomeUnknown(f"{queued.claim.name!r}: the claim was removed immediately")
        ahead = []
        for node in nodes[: nodes.index(mine)]:
            if node.id == mine.id:
                # An earlier node of this claim, which may outlive its session for a while: the id is ours alone.
                await delete(queued.session, f"{queued.parent}/{node.name}", queued.timeout)
            else:
                ahead.append(node)
        blocked_by = blockers(ahead, mine)
        if not blocked_by:
            return self._granted(queued)
        if watch:
            queued.watch(blocked_by, ahead, children)
        return None

    def _granted(self, queued: QueuedClaim) -> Grant:
        queued.unwatch()
        if queued.waited and not queued.granted_at:
            queued.granted_at = queued.data.granted_at or wall_us()
        self._hold(queued)
        self.attach(queued)
        return Grant(queued.claim, queued.token, queued.session.since, queued)

    def _hold(self, queued: QueuedClaim) -> None:
        queued.session.watches.add_held(queued.path, lambda gone: self._lost(queued) if gone else None)

    def _lost(self, queued: QueuedClaim) -> None:
        queued.gone = True
        self._on_gone(queued.claim.id)

    # ------------------------------------------------------------------ what holders do

    def write_granted_at(self, queued: QueuedClaim) -> None:
        """Send the time of the grant of a claim that had to wait, for `inspect`, unless its node has it.

        A failure has no effect on the lease: the watch reports a node that is gone, and the next renewal repeats the write.
        """
        granted_at = queued.granted_at
        if granted_at in (0, queued.data.granted_at) or queued.gone or queued.replacing:
            return

        def written(reply: Reply) -> None:
            if reply.error is None:
                queued.data = queued.data._replace(granted_at=granted_at)

        data = queued.data._replace(granted_at=granted_at)
        queued.session.send(SetData(queued.path, data.encode(), -1), written)

    async def downgrade(self, queued: QueuedClaim) -> None:
        """Replace the exclusive node by a shared one with the same number, in one transaction; raise NotHeld."""
        session, name = queued.session, queued.claim.name
        if queued.gone or queued.node is None:
            raise NotHeld(f"the engine no longer has the lock on {name!r}", name)
        shared = queued.claim._replace(mode=Mode.SHARED)
        node = f"{node_prefix(shared)}{queued.node.split('-', 2)[2]}"
        path = f"{queued.parent}/{node}"
        if node != queued.node:
            data = queued.data._replace(token=queued.token, granted_at=queued.granted_at)
            steps = Delete(queued.path, -1), Create(path, data.encode(), session.acl, EPHEMERAL)
            session.watches.remove_held(queued.path)  # its deletion is not a loss
            queued.replacing = True
            replaced, there = await session.request(Multi(steps), GetData(path, None), timeout=queued.timeout)
            queued.replacing = False
            # After a failure: an earlier request, whose reply was lost, may have replaced the node.
            if there.no_node or there.get()[1].ephemeralOwner != session.id:
                if not replaced.no_node:
                    replaced.get()
                raise NotHeld(f"the engine no longer has the lock on {name!r}", name)
            queued.node, queued.data = node, data
            self._hold(queued)
        queued.claim = shared

    # ------------------------------------------------------------------ removing

    async def remove(self, queued: QueuedClaim, timeout: float) -> bool:
        """Delete the claim's node and forget the claim; return whether the node existed."""
        if queued.node is None or queued.replacing:
            existed = await self.remove_by_id(queued.claim, queued.session, timeout)
        else:
            existed = await delete(queued.session, queued.path, timeout)
        self.forget(queued)
        return existed

    async def remove_by_id(self, claim: Claim, session: ZooKeeperSession, timeout: float) -> bool:
        """Delete the nodes of a claim whose names are not known; return whether there were any."""
        existed = False
        parent = self._namespace.paths.of(claim.name)
        for node in await read_queue(session, parent, timeout):
            if node.id == claim.id:
                existed |= await delete(session, f"{parent}/{node.name}", timeout)
        return existed

    def forget(self, queued: QueuedClaim) -> None:
        """Forget a claim whose node is gone, or goes with its session; its waiting caller is woken."""
        queued.gone = True
        queued.unwatch()
        if queued.node is not None:
            queued.session.watches.remove_held(queued.path)
        queued.session.remove(queued.claim.id)
        if self.claims.get(queued.claim.id) is queued:
            self.claims.pop(queued.claim.id, None)
        queued.woken.set()

    async def remove_expired(self, session: ZooKeeperSession, id: str) -> None:
        """Remove a claim that its lease no longer renews, or whose removal was not answered."""
        queued = self.claims.get(id)
        if queued is None or queued.session is not session:
            session.remove(id)
            return
        queued.gone = True  # first: a waiter that slept past its expiry must not be granted the lock meanwhile
        await self.remove(queued, reply_timeout(session.ttl, SHORTEST))
        self._on_gone(id)

    def session_ended(self, session: ZooKeeperSession) -> None:
        """Report all claims of a session as gone."""
        for queued in list(self.claims.values()):
            if queued.session is session:
                self.forget(queued)
                self._on_gone(queued.claim.id)


async def read_queue(session: ZooKeeperSession, parent: str, timeout: float) -> list[QueueNode]:
    """Return the claims on a name, oldest first, as the leader knows them."""
    _, children = await session.request(Sync(parent), GetChildren(parent, None), timeout=timeout)
    return [] if children.no_node else in_order(children.get())


async def delete(session: ZooKeeperSession, path: str, timeout: float) -> bool:
    """Delete a node; return whether it existed."""
    (reply,) = await session.request(Delete(path, -1), timeout=timeout)
    return not reply.no_node and bool(reply.get())
