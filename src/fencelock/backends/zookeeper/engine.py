"""ZooKeeper: a node for each claim, in ZooKeeper's own order; whoever waits watches the one ahead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from kazoo.protocol.serialization import GetData, Sync

from fencelock.backends.zookeeper import messages
from fencelock.backends.zookeeper.address import Address
from fencelock.backends.zookeeper.driver import CONTAINER, CreateContainer
from fencelock.backends.zookeeper.layout import Node, in_order, paths, prefix, tell
from fencelock.backends.zookeeper.link import Link
from fencelock.backends.zookeeper.looks import Looks, delete, pass_on, queue_of
from fencelock.backends.zookeeper.place import News, Place
from fencelock.backends.zookeeper.records import ZooKeeperRecords
from fencelock.backends.zookeeper.sessions import Sessions
from fencelock.backends.zookeeper.signs import BEAT
from fencelock.core.backend import GRACE, answer_time
from fencelock.core.session import Session
from fencelock.core.world import World
from fencelock.errors import EngineUnavailable, FencelockError, LimitMismatch, Unanswered
from fencelock.model import (
    Admitted,
    Busy,
    Claim,
    Grant,
    Renewal,
    Snapshot,
    Strength,
    Traits,
    admit,
    contradiction,
)

TRAITS = Traits(
    engine="zookeeper", strength=Strength.CONSENSUS, fair=True, push=True, loss_pushed=True, session=True, ttl_min=0.5
)

TRIES = 5
"""How often others may remove what a claim stands on before that is taken for a fault."""
SHORTEST = 0.2
"""Seconds that an answer is waited for at the least."""


class ZooKeeperBackend:
    """`fencelock.core.backend.Watchful` on an ensemble."""

    traits = TRAITS

    def __init__(self, world: World, address: Address, namespace: str) -> None:
        self.on_gone: Callable[[str], None] = lambda _: None
        self._world = world
        self._paths = paths(address.chroot, namespace)
        self._places: dict[str, Place] = {}
        self._sessions = Sessions(world, address, self._paths, self._ended, self._clear)
        self._looks = Looks(self._sessions, self._paths)
        self.records = ZooKeeperRecords(self._sessions, self._paths)

    # ------------------------------------------------------------------ the protocol

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Busy:
        """Take the lock or a place in line."""
        return await self._attempt(claim, queue, patience, anew=True)

    async def _attempt(self, claim: Claim, queue: bool, within: float | None, *, anew: bool) -> Grant | Busy:
        place = self._places.get(claim.id)
        if place is not None and not self._stands(place):
            self._forget(place)
            place = None
        patience = answer_time(claim.ttl, SHORTEST)
        if within is not None:
            patience = min(patience, max(within, GRACE))
        if place is None:
            session = await self._sessions.get(claim.ttl, claim.name, None if within is None else max(within, GRACE))
            place = self._places[claim.id] = Place(claim, session, self._paths.of(claim.name))
            self._keep(place)
            try:
                children = await self._enter(place, patience)
            except Unanswered:
                raise
            except FencelockError:
                if place.node is not None:
                    await self._remove(place, patience)
                self._forget(place)
                raise
        else:
            self._keep(place)
            children = await self._find(place, patience, anew)
        if place.gone or self._places.get(claim.id) is not place:
            if not place.session.ended:
                await self._remove(place, patience)
            raise Unanswered(f"{claim.name!r}: the claim was over before it was answered")
        return await self._decide(place, children, queue)

    async def wait(self, busy: Busy, timeout: float) -> Grant | Busy:
        """Wait until one ahead is gone; look again in the end."""
        place: Place = busy.handle
        if not place.gone and self._places.get(place.claim.id) is place:
            await place.listen(timeout)
            if place.called and self._stands(place):
                # Nobody can have come in between. That we are still there ourselves is as good as certain, as the server
                # would have ended the connection with the session: if our node was taken away by hand, we hear of it soon.
                # If it was there a moment ago, the next beat of the session's pulse is soon enough, as it is for any grant.
                link = place.session.handle
                if self._world.now() - place.looked > link.seconds * BEAT:
                    link.check(place.path, partial(self._lost_if, place))
                return self._granted(place)
        children = place.seen
        place.hush()
        try:
            if children is not None and place.node in children and self._stands(place):
                self._keep(place)
                return await self._decide(place, children, True)
            return await self._attempt(
                place.claim, True, timeout, anew=False
            )  # the session's pulse is the sign of life
        except BaseException:
            place.ring()  # what was to be seen has not been seen
            raise

    async def abandon(self, claim: Claim) -> None:
        """Leave nothing behind. What cannot be removed now goes with the next beat of its session, or with the session."""
        place = self._places.get(claim.id)
        patience = min(GRACE, answer_time(claim.ttl, SHORTEST))
        if place is None or place.session.ended:
            if place is not None:
                self._forget(place)
            place = Place(claim, await self._sessions.any(GRACE), self._paths.of(claim.name))
        else:
            place.session.give_up(claim.id)
        place.ring()
        await self._remove(place, patience)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """One sync for each session, however many claims hang on it."""
        sent = self._world.now()
        links: list[Link] = sorted(
            {grant.handle.session.handle for grant in grants if _is_held(grant)}, key=lambda link: link.seconds
        )
        renewed: dict[Link, bool] = {}
        for link in links:
            # One that hangs must not cost the leases of another: the shortest come first, and all have to share its time.
            patience = link.seconds / 3 if len(links) == 1 else answer_time(links[0].session.ttl, SHORTEST) / len(links)
            renewed[link] = await self._fresh(link, sent, patience)
        answers = []
        for grant in grants:
            place: Place = grant.handle
            if not _is_held(grant):
                answers.append(Renewal.LOST)
            elif renewed[place.session.handle]:
                place.session.keep(grant.claim.id, sent, grant.claim.ttl)
                answers.append(Renewal.RENEWED)
            else:
                answers.append(Renewal.UNKNOWN)
        return answers

    async def release(self, grant: Grant) -> bool:
        """Give back the lock: whoever is next is woken by ZooKeeper."""
        place: Place = grant.handle
        mine = self._places.get(grant.claim.id)
        if mine is None:
            if place.session.ended or place.claim.id != grant.claim.id:
                return False
            place, mine = Place(grant.claim, await self._sessions.any(), place.parent), place
            place.node = mine.node
        return await self._remove(place, answer_time(grant.claim.ttl, SHORTEST))

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

    # ------------------------------------------------------------------ a claim's node

    async def _enter(self, place: Place, patience: float) -> list[str]:
        """Make the claim's node and look who else is there, in one wait if the name was used lately."""
        link, claim = place.session.handle, place.claim
        told = tell(place.session.ttl, claim.owner)
        create = messages.line_up(f"{place.parent}/{prefix(claim)}", told, link.packed_acl)
        look = messages.children(place.parent)
        place.hush()  # what was heard was about an earlier node
        place.looked, place.first = self._world.now(), False
        made, found = await link.ask(create, look, patience=patience)
        for _ in range(TRIES):
            if made.missing:
                # Another may find it empty and remove it again: not for a while yet, but we may have been stopped.
                parent = CreateContainer(place.parent, b"", link.acl, CONTAINER)
                there, made, found = await link.ask(parent, create, look, patience=patience)
                if there.missing:
                    await self._sessions.settle(link, patience)
                elif not there.existed:
                    there.get()
                continue
            place.node, place.zxid = made.get()
            if link.doubts:
                await self._sessions.settle(link, patience)
            if link.layout.czxid < place.zxid:
                place.token = link.layout.token(place.zxid)
                return found.get()  # type: ignore[no-any-return]
            # Somebody has removed the namespace, and others may have begun anew, with tokens above what ours would be.
            await self._reject(place, patience)
            made, found = await link.ask(create, look, patience=patience)
        raise EngineUnavailable(f"{place.parent} cannot be used: somebody keeps removing it")

    async def _reject(self, place: Place, patience: float) -> None:
        """Take a node away that was made under a layout that is gone, and learn the one that is there now."""
        await delete(place.session.handle, place.path, patience)
        place.node = None
        await self._sessions.settle(place.session.handle, patience)

    async def _find(self, place: Place, patience: float, anew: bool) -> list[str]:
        """Look again; find out first whether an attempt without an answer has made the node.

        `anew` counts the ttl from here, which takes the leader.
        """
        link = place.session.handle
        place.looked = self._world.now()
        if place.node is not None:
            sign = (Sync(place.parent),) if anew else ()
            *_, found = await link.ask(*sign, messages.children(place.parent), patience=patience)
            children: list[str] = [] if found.missing else found.get()
            if place.node in children:
                return children
            place.node = None
        # After the sync the server has seen all that we ever asked for: one session's requests are carried out in order,
        # over a new connection too.
        for node in await queue_of(link, place.parent, patience):
            if node.id == place.claim.id:
                path = f"{place.parent}/{node.name}"
                asked = GetData(path, None), GetData(self._paths.layout, None)
                found, under = await link.ask(*asked, patience=patience)
                if found.missing:
                    continue
                stat = found.get()[1]
                if stat.ephemeralOwner == link.id:
                    place.node, place.zxid = node.name, stat.czxid
                    if not link.is_under(under, stat.czxid):
                        await self._reject(place, patience)
                        continue
                    place.token = link.layout.token(stat.czxid)
                    return await self._find(place, patience, anew)
                await delete(link, path, patience)  # of an earlier session of ours, which may live on for a while
        return await self._enter(place, patience)

    async def _decide(self, place: Place, children: list[str], queue: bool) -> Grant | Busy:
        """Say whether the claim may hold the name, given the nodes that are there; only those before it count."""
        session, claim = place.session, place.claim
        nodes = in_order(children)
        ours = [node for node in nodes if node.id == claim.id]
        for node in ours:
            if node.name != place.node:
                # Of an earlier session of ours, which may live on for a while: the id is ours alone.
                await delete(session.handle, f"{place.parent}/{node.name}", answer_time(claim.ttl, SHORTEST))
                nodes.remove(node)
        mine = next((node for node in ours if node.name == place.node), None)
        if mine is None:
            raise Unanswered(f"{claim.name!r}: the claim was removed at once")
        del nodes[nodes.index(mine) + 1 :]
        if (problem := contradiction(nodes, claim)) is not None:
            await self._remove(place, answer_time(claim.ttl, SHORTEST))
            raise LimitMismatch(f"{claim.name!r}: {problem}", claim.name)
        answer = admit(nodes, claim)
        if isinstance(answer, Admitted):
            return self._granted(place)
        if queue:
            place.watch(self._world, {node.name: _news(nodes, node, claim) for node in nodes if node.id in answer.by})
        else:
            await self._remove(place, answer_time(claim.ttl, SHORTEST))
        return Busy(place.kept, session.since, handle=place)

    def _granted(self, place: Place) -> Grant:
        place.leave()
        session = place.session
        place.first = not place.claim.shared
        session.handle.hold(place.path, partial(self._lost_if, place))
        self._keep(place)
        return Grant(place.kept, place.token, session.since, place)

    async def _remove(self, place: Place, patience: float) -> bool:
        """Take the claim's node away, for certain; return whether it was there."""
        link = place.session.handle
        there = False
        if place.node is not None:
            there = await (pass_on if place.first else delete)(link, place.path, patience)
        else:
            for node in await queue_of(link, place.parent, patience):
                if node.id == place.claim.id:
                    there |= await delete(link, f"{place.parent}/{node.name}", patience)
        self._forget(place)
        return there

    # ------------------------------------------------------------------ claims and their sessions

    def _keep(self, place: Place) -> None:
        place.session.keep(place.claim.id, self._world.now(), place.session.ttl)

    def _stands(self, place: Place) -> bool:
        """Return whether the claim must still have its node, unless somebody took it away unheard."""
        return not place.gone and place.session.alive(self._world.now())

    def _forget(self, place: Place) -> None:
        """Forget a claim whose node is gone, or goes with its session."""
        place.leave()
        if place.node is not None:
            place.session.handle.let_go(place.path)
        place.session.let_go(place.claim.id)
        place.gone = True
        if self._places.get(place.claim.id) is place:
            self._places.pop(place.claim.id, None)
        place.ring()  # another thread may wait with it, which a close() ends

    async def _clear(self, session: Session[Link], id: str) -> None:
        """Take away a claim that is over: nobody has renewed it, or its removal was not answered."""
        place = self._places.get(id)
        if place is None or place.session is not session:
            session.let_go(id)
        else:
            place.gone = True  # first: whoever waits, and has slept past its end, is not let in meanwhile
            await self._remove(place, answer_time(session.ttl, SHORTEST))
            self.on_gone(id)  # unless it was a moment before

    async def _fresh(self, link: Link, sent: float, patience: float) -> bool:
        link.rewatch()  # their answers come before the sync's
        try:
            return await link.fresh(sent, patience)
        except FencelockError:
            return False

    def _lost_if(self, place: Place, gone: bool | None) -> None:
        """Take in what became of a node that was held. kazoo's thread calls this.

        That it was written to is as good as gone: whoever is next has taken that for its being passed on.
        """
        if gone is not None:
            place.gone = True
            self.on_gone(place.claim.id)

    def _ended(self, session: Session[Link]) -> None:
        """Take in that a session is over, and all its claims with it."""
        for id, place in list(self._places.items()):
            if place.session is session:
                place.gone = True
                self._places.pop(id, None)
                place.ring()
                self.on_gone(id)


def _news(nodes: list[Node], node: Node, claim: Claim) -> News:
    """Return what it would mean for the claim that this node is gone, and that it was passed on."""
    others = [other for other in nodes if other is not node]
    after = nodes[nodes.index(node) + 1 :]
    return News(isinstance(admit(others, claim), Admitted), isinstance(admit(after, claim), Admitted))


def _is_held(grant: Grant) -> bool:
    """Return whether the claim still has its node, as far as was heard."""
    return not grant.handle.gone and grant.handle.claim.id == grant.claim.id
