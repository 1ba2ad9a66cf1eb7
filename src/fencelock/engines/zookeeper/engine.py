"""ZooKeeper: a node for each claim, in ZooKeeper's own order; a waiter watches the claim ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kazoo.protocol.serialization import GetChildren

from fencelock.core.clock import Deadline
from fencelock.core.engine import MIN_REPLY_TIMEOUT, reply_timeout
from fencelock.core.rates import RecordRates
from fencelock.core.runtime import Runtime
from fencelock.engines.zookeeper.inspect import Inspector
from fencelock.engines.zookeeper.namespace import Namespace
from fencelock.engines.zookeeper.paths import Paths
from fencelock.engines.zookeeper.queue import SHORTEST, Queue, QueuedClaim
from fencelock.engines.zookeeper.records import ZooKeeperRecords
from fencelock.engines.zookeeper.session import ZooKeeperSession
from fencelock.engines.zookeeper.session_pool import SessionPool
from fencelock.engines.zookeeper.url import ZooKeeperUrl
from fencelock.errors import FencelockError, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, TokenGuarantee, Traits, Waiting

TRAITS = Traits(
    engine="zookeeper",
    guarantee=TokenGuarantee.CONSENSUS,
    fair=True,
    loss_pushed=True,
    session=True,
    ttl_min=0.5,
)


class ZooKeeperEngine:
    """`fencelock.core.engine.LossNotifier` on an ensemble."""

    traits = TRAITS

    def __init__(self, runtime: Runtime, url: ZooKeeperUrl, namespace: str) -> None:
        self.on_gone: Callable[[str], None] = lambda _: None
        self._runtime = runtime
        self._namespace = Namespace(Paths(url.chroot, namespace), url.name)
        self._queue = Queue(runtime, self._namespace, lambda id: self.on_gone(id))
        self._sessions = SessionPool(
            runtime, url, self._namespace, self._queue.session_ended, self._queue.remove_expired
        )
        inspector = Inspector(self._sessions, self._namespace.paths)
        self.inspect, self.names, self.force_release = inspector.inspect, inspector.names, inspector.force_release
        self.records = ZooKeeperRecords(self._sessions, self._namespace)
        self.rates = RecordRates(runtime, self.records, self.records.clock)

    # ------------------------------------------------------------------ acquiring

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Create the claim's node, or find it, and decide by the nodes ahead of it."""
        queue = self._queue
        queued = queue.claims.get(claim.id)
        if queued is not None and not queue.is_alive(queued):
            queue.forget(queued)
            queued = None
        is_new = queued is None
        if queued is None:
            queued = queue.add(claim, await self._sessions.get(claim.ttl, claim.name, deadline))
        timeout = deadline.at_most(queued.timeout)
        queue.attach(queued)
        queued.woken.clear()
        try:
            children = await (queue.enqueue if is_new else queue.find)(queued, timeout)
        except OutcomeUnknown:
            raise
        except FencelockError:
            if is_new:  # else an earlier attempt may have created a node: the next attempt, or `abandon`, finds it
                queue.forget(queued)
            raise
        if queued.gone or queue.claims.get(claim.id) is not queued:
            # An abandon of this claim, or the end of its session, overtook this attempt.
            if not queued.session.ended:
                await queue.remove(queued, timeout)
            raise OutcomeUnknown(f"{claim.name!r}: the claim was removed before the reply came")
        grant = await queue.decide(queued, children, watch=enqueue)
        if grant is not None:
            return grant
        if not enqueue:
            await queue.remove(queued, timeout)
        return Waiting(queued.claim, queued.session.since, engine_state=queued)

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Wait until a node ahead is gone, read the queue, and return the grant if the claim is admitted now."""
        queued: QueuedClaim = waiting.engine_state
        queue, until = self._queue, self._runtime.now() + timeout
        while await queued.woken.wait(max(0.0, until - self._runtime.now())):
            if not queue.is_alive(queued):
                return None
            queued.woken.clear()
            try:
                # Without a sync: this server has reported the change, and it knows all claims ahead of ours.
                left = until - self._runtime.now() + MIN_REPLY_TIMEOUT
                (children,) = await queued.session.request(GetChildren(queued.parent, None), timeout=left)
                found = [] if children.no_node else children.get()
                if queued.node not in found or not queue.is_alive(queued):
                    return None
                grant = await queue.decide(queued, found, watch=True)
            except BaseException:
                queued.woken.set()  # the change is not processed yet
                raise
            if grant is not None:
                return grant
        return None

    async def abandon(self, claim: Claim) -> None:
        """Remove the claim. If that fails, the next heartbeat of its session removes it, or the session ends with it."""
        queued = self._queue.claims.get(claim.id)
        timeout = min(MIN_REPLY_TIMEOUT, reply_timeout(claim.ttl, SHORTEST))
        if queued is not None and not queued.session.ended:
            queued.session.mark_expired(claim.id)
            queued.gone = True
            queued.woken.set()
            await self._queue.remove(queued, timeout)
        else:
            if queued is not None:
                self._queue.forget(queued)
            await self._queue.remove_by_id(claim, await self._sessions.any(MIN_REPLY_TIMEOUT), timeout)

    # ------------------------------------------------------------------ holding and releasing

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Send one sync for each session, however many claims it has."""
        sent = self._runtime.now()
        sessions = {grant.engine_state.session for grant in grants if _has_node(grant)}
        for grant in grants:
            self._queue.write_granted_at(grant.engine_state)
        renewed: dict[ZooKeeperSession, bool] = {}
        for session in sorted(sessions, key=lambda session: session.timeout):
            # A session that hangs must not cost the leases of another: the shortest comes first, and all share its time.
            shortest = min(other.ttl for other in sessions)
            timeout = session.timeout / 3 if len(sessions) == 1 else reply_timeout(shortest, SHORTEST) / len(sessions)
            session.watches.watch_held()  # replies to these come before the reply to the sync
            try:
                renewed[session] = await session.prove_alive(sent, timeout)
            except FencelockError:
                renewed[session] = False
        return [self._renewal(grant, sent, renewed) for grant in grants]

    def _renewal(self, grant: Grant, sent: float, renewed: dict[ZooKeeperSession, bool]) -> Renewal:
        if not _has_node(grant):
            return Renewal.LOST
        session = grant.engine_state.session
        if not renewed.get(session):
            return Renewal.UNKNOWN
        # LOST if it has expired by our clock: it is being removed then.
        return Renewal.RENEWED if session.extend(grant.claim.id, sent, grant.claim.ttl) else Renewal.LOST

    async def release(self, grant: Grant) -> bool:
        """Delete the claim's node: ZooKeeper wakes the next waiter."""
        queued: QueuedClaim = grant.engine_state
        if queued.session.ended or queued.claim.id != grant.claim.id:
            return False
        return await self._queue.remove(queued, queued.timeout)

    async def downgrade(self, grant: Grant) -> Grant:
        """Replace the exclusive node by a shared one; the readers behind it are woken and read the queue."""
        queued: QueuedClaim = grant.engine_state
        await self._queue.downgrade(queued)
        return grant.downgraded(queued.session.since)

    # ------------------------------------------------------------------ closing

    async def close(self) -> None:
        """End the sessions and wake all waits."""
        await self._sessions.close()
        for queued in list(self._queue.claims.values()):
            queued.woken.set()

    def after_fork(self) -> None:
        """Drop the parent's sessions; it opens its own."""
        self._queue.claims.clear()
        self._sessions.after_fork()


def _has_node(grant: Grant) -> bool:
    """Return whether the claim still has its node, as far as this client knows."""
    return not grant.engine_state.gone and bool(grant.engine_state.claim.id == grant.claim.id)
