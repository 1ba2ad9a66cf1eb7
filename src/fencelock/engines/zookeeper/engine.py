"""ZooKeeper: a node for each claim, in ZooKeeper's own order; whoever waits watches the one ahead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from math import inf

from fencelock.core.clock import Deadline
from fencelock.core.engine import FIRST_CONNECT_TIMEOUT, MIN_REPLY_TIMEOUT, reply_timeout
from fencelock.core.runtime import Runtime
from fencelock.engines.zookeeper.address import Address
from fencelock.engines.zookeeper.layout import Node, in_order, paths
from fencelock.engines.zookeeper.link import Link
from fencelock.engines.zookeeper.looks import Looks
from fencelock.engines.zookeeper.nodes import Nodes, delete
from fencelock.engines.zookeeper.place import News, Place
from fencelock.engines.zookeeper.places import SHORTEST, Places
from fencelock.engines.zookeeper.records import ZooKeeperRecords
from fencelock.engines.zookeeper.sessions import Sessions
from fencelock.engines.zookeeper.signs import BEAT
from fencelock.errors import FencelockError, GuaranteeUnavailable, OutcomeUnknown
from fencelock.model import (
    Admitted,
    Claim,
    Grant,
    Renewal,
    Snapshot,
    TokenGuarantee,
    Traits,
    Waiting,
    admit,
)

TRAITS = Traits(
    engine="zookeeper",
    guarantee=TokenGuarantee.CONSENSUS,
    fair=True,
    loss_pushed=True,
    session=True,
    ttl_min=0.5,
)


class ZooKeeperEngine:
    """`fencelock.core.engine.Watchful` on an ensemble."""

    traits = TRAITS

    def __init__(self, runtime: Runtime, address: Address, namespace: str) -> None:
        self.on_gone: Callable[[str], None] = lambda _: None
        self._runtime = runtime
        self._paths = paths(address.chroot, namespace)
        self._places = Places(runtime, self._tell)
        self._sessions = Sessions(runtime, address, self._paths, self._places.ended, self._places.expire)
        self._nodes = Nodes(runtime, self._sessions, self._paths)
        self._looks = Looks(self._sessions, self._paths)
        self.records = ZooKeeperRecords(self._sessions, self._paths)

    # ------------------------------------------------------------------ taking it

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Take the lock or a place in line."""
        return await self._attempt(claim, enqueue, None if deadline.at is None else deadline.at_most(inf), anew=True)

    async def _attempt(self, claim: Claim, queue: bool, within: float | None, *, anew: bool) -> Grant | Waiting:
        place = self._places.get(claim.id)
        if place is not None and not self._places.stands(place):
            self._places.forget(place)
            place = None
        patience = reply_timeout(claim.ttl, SHORTEST)
        if within is not None:
            patience = min(patience, max(within, MIN_REPLY_TIMEOUT))
        if place is None:
            connecting = None if within is None else max(within, FIRST_CONNECT_TIMEOUT)
            session = await self._sessions.get(claim.ttl, claim.name, connecting)
            place = self._places[claim.id] = Place(claim, session, self._paths.of(claim.name))
            self._places.keep(place)
            try:
                children = await self._nodes.enter(place, patience)
            except OutcomeUnknown:
                raise
            except FencelockError:
                if place.node is not None:
                    await self._places.remove(place, patience)
                self._places.forget(place)
                raise
        else:
            self._places.keep(place)
            children = await self._nodes.find(place, patience, anew)
        if place.gone or self._places.get(claim.id) is not place:
            if not place.session.ended:
                await self._places.remove(place, patience)
            raise OutcomeUnknown(f"{claim.name!r}: the claim was over before it was answered")
        return await self._decide(place, children, queue)

    async def _decide(self, place: Place, children: list[str], queue: bool) -> Grant | Waiting:
        """Say whether the claim may hold the name, given the nodes that are there; only those before it count."""
        session, claim = place.session, place.claim
        nodes = in_order(children)
        ours = [node for node in nodes if node.id == claim.id]
        for node in ours:
            if node.name != place.node:
                # Of an earlier session of ours, which may live on for a while: the id is ours alone.
                await delete(session.handle, f"{place.parent}/{node.name}", reply_timeout(claim.ttl, SHORTEST))
                nodes.remove(node)
        mine = next((node for node in ours if node.name == place.node), None)
        if mine is None:
            raise OutcomeUnknown(f"{claim.name!r}: the claim was removed at once")
        del nodes[nodes.index(mine) + 1 :]
        answer = admit(nodes, claim)
        if isinstance(answer, Admitted):
            return self._places.granted(place)
        if queue:
            place.watch(self._runtime, {node.name: _news(nodes, node, claim) for node in nodes if node.id in answer.by})
        else:
            await self._places.remove(place, reply_timeout(claim.ttl, SHORTEST))
        return Waiting(place.kept, session.since, engine_state=place)

    # ------------------------------------------------------------------ waiting for it

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Wait until one ahead is gone."""
        outcome = await self._wait(waiting, timeout, timeout)
        return outcome if isinstance(outcome, Grant) else None

    async def downgrade(self, grant: Grant) -> Grant:
        """Refuse."""
        raise GuaranteeUnavailable("not built yet", grant.claim.name)

    async def _wait(self, waiting: Waiting, timeout: float, patience: float | None = None) -> Grant | Waiting:
        """Wait until one ahead is gone; look again in the end."""
        place: Place = waiting.engine_state
        until = None if patience is None else self._runtime.now() + patience
        if not place.gone and self._places.get(place.claim.id) is place:
            await place.listen(timeout)
            if place.called and self._places.stands(place):
                # Nobody can have come in between. That we are still there ourselves is as good as certain, as the server
                # would have ended the connection with the session: if our node was taken away by hand, we hear of it soon.
                # If it was there a moment ago, the next beat of the session's pulse is soon enough, as it is for any grant.
                link = place.session.handle
                if self._runtime.now() - place.looked > link.seconds * BEAT:
                    link.check(place.path, partial(self._places.lost_if, place))
                return self._places.granted(place)
        children = place.seen
        place.hush()
        try:
            if children is not None and place.node in children and self._places.stands(place):
                self._places.keep(place)
                return await self._decide(place, children, True)
            # Not anew: the session's pulse is the sign of life.
            return await self._attempt(
                place.claim, True, None if until is None else until - self._runtime.now(), anew=False
            )
        except BaseException:
            place.ring()  # what was to be seen has not been seen
            raise

    async def abandon(self, claim: Claim) -> None:
        """Leave nothing behind. What cannot be removed now goes with the next beat of its session, or with the session."""
        place = self._places.get(claim.id)
        patience = min(MIN_REPLY_TIMEOUT, reply_timeout(claim.ttl, SHORTEST))
        if place is None or place.session.ended:
            if place is not None:
                self._places.forget(place)
            place = Place(claim, await self._sessions.any(MIN_REPLY_TIMEOUT), self._paths.of(claim.name))
        else:
            place.session.expire_claim(claim.id)
        place.ring()
        await self._places.remove(place, patience)

    # ------------------------------------------------------------------ keeping it, giving it back

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """One sync for each session, however many claims hang on it."""
        sent = self._runtime.now()
        links: list[Link] = sorted(
            {grant.engine_state.session.handle for grant in grants if _is_held(grant)}, key=lambda link: link.seconds
        )
        renewed: dict[Link, bool] = {}
        for link in links:
            # One that hangs must not cost the leases of another: the shortest come first, and all have to share its time.
            patience = (
                link.seconds / 3 if len(links) == 1 else reply_timeout(links[0].session.ttl, SHORTEST) / len(links)
            )
            renewed[link] = await self._fresh(link, sent, patience)
        answers = []
        for grant in grants:
            place: Place = grant.engine_state
            if not _is_held(grant):
                answers.append(Renewal.LOST)
            elif renewed[place.session.handle]:
                # Not if it is over by our clock: it is being removed then.
                kept = place.session.extend(grant.claim.id, sent, grant.claim.ttl)
                answers.append(Renewal.RENEWED if kept else Renewal.LOST)
            else:
                answers.append(Renewal.UNKNOWN)
        return answers

    async def _fresh(self, link: Link, sent: float, patience: float) -> bool:
        link.rewatch()  # their answers come before the sync's
        try:
            return await link.fresh(sent, patience)
        except FencelockError:
            return False

    async def release(self, grant: Grant) -> bool:
        """Give back the lock: whoever is next is woken by ZooKeeper."""
        place: Place = grant.engine_state
        mine = self._places.get(grant.claim.id)
        if mine is None:
            if place.session.ended or place.claim.id != grant.claim.id:
                return False
            place, mine = Place(grant.claim, await self._sessions.any(), place.parent), place
            place.node = mine.node
        return await self._places.remove(place, reply_timeout(grant.claim.ttl, SHORTEST))

    def _tell(self, id: str) -> None:
        """Tell the client: it may have set `on_gone` at any time."""
        self.on_gone(id)

    # ------------------------------------------------------------------ looking, ending

    async def inspect(self, name: str) -> Snapshot:
        """Look."""
        return await self._looks.inspect(name)

    def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what was in use at the time of the call."""
        return self._looks.names(prefix)

    async def force_release(self, name: str) -> int:
        """Drop the holders."""
        return await self._looks.force_release(name)

    async def close(self) -> None:
        """End the sessions; whoever still waits learns of it."""
        await self._sessions.close()
        for place in list(self._places.values()):
            place.ring()

    def before_fork(self) -> None:
        """Nothing that must not be copied."""

    def after_fork(self, *, child: bool) -> None:
        """The child lets go of the parent's connections without a word, and makes its own."""
        if child:
            self._places.clear()
            self._sessions.forget()


def _news(nodes: list[Node], node: Node, claim: Claim) -> News:
    """Return what it would mean for the claim that this node is gone, and that it was passed on."""
    others = [other for other in nodes if other is not node]
    after = nodes[nodes.index(node) + 1 :]
    return News(isinstance(admit(others, claim), Admitted), isinstance(admit(after, claim), Admitted))


def _is_held(grant: Grant) -> bool:
    """Return whether the claim still has its node, as far as was heard."""
    return not grant.engine_state.gone and grant.engine_state.claim.id == grant.claim.id
