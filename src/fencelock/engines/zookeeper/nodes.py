"""The nodes of claims: made in line, found again after an attempt without an answer, and taken away."""

from __future__ import annotations

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Delete, GetData, Sync

from fencelock.core.runtime import Runtime
from fencelock.engines.zookeeper import messages
from fencelock.engines.zookeeper.answers import translate
from fencelock.engines.zookeeper.driver import CONTAINER, CreateContainer
from fencelock.engines.zookeeper.layout import Node, Paths, in_order, prefix, tell
from fencelock.engines.zookeeper.link import Link
from fencelock.engines.zookeeper.place import Place
from fencelock.engines.zookeeper.sessions import Sessions
from fencelock.errors import EngineUnavailable

PATIENCE = 5.0
TRIES = 5
"""How often others may remove what a claim stands on before that is taken for a fault."""


async def queue_of(link: Link, parent: str, patience: float = PATIENCE) -> list[Node]:
    """Return the claims on a name, oldest first."""
    _, found = await link.request(Sync(parent), messages.children(parent), patience=patience)
    return [] if found.missing else in_order(found.get())


async def delete(link: Link, path: str, patience: float) -> bool:
    """Take a node away, for certain; return whether it was there."""
    (answer,) = await link.request(Delete(path, -1), patience=patience)
    return not answer.missing and bool(answer.get())


async def pass_on(link: Link, path: str, patience: float) -> bool:
    """Take away the node of a claim that held its name; return whether it was there.

    It is written to in the same step: whoever watches it hears of that rather than of its end, and so that all who stood
    before it are gone, too, as they would not be if it had only waited.
    """
    (answer,) = await link.request(messages.pass_on(path), patience=patience)
    error = answer.get()
    if error is None:
        return True
    if isinstance(error, NoNodeError):
        return False
    raise translate(error) from error


class Nodes:
    """How claims come by their nodes."""

    def __init__(self, runtime: Runtime, sessions: Sessions, paths: Paths) -> None:
        self._runtime = runtime
        self._sessions = sessions
        self._paths = paths

    async def enter(self, place: Place, patience: float) -> list[str]:
        """Make the claim's node and look who else is there, in one wait if the name was used lately."""
        link, claim = place.session.handle, place.claim
        told = tell(place.session.ttl, claim.owner)
        create = messages.line_up(f"{place.parent}/{prefix(claim)}", told, link.packed_acl)
        look = messages.children(place.parent)
        place.hush()  # what was heard was about an earlier node
        place.looked, place.first = self._runtime.now(), False
        made, found = await link.request(create, look, patience=patience)
        for _ in range(TRIES):
            if made.missing:
                # Another may find it empty and remove it again: not for a while yet, but we may have been stopped.
                parent = CreateContainer(place.parent, b"", link.acl, CONTAINER)
                there, made, found = await link.request(parent, create, look, patience=patience)
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
            made, found = await link.request(create, look, patience=patience)
        raise EngineUnavailable(f"{place.parent} cannot be used: somebody keeps removing it")

    async def find(self, place: Place, patience: float, anew: bool) -> list[str]:
        """Look again; find out first whether an attempt without an answer has made the node.

        `anew` counts the ttl from here, which takes the leader.
        """
        link = place.session.handle
        place.looked = self._runtime.now()
        if place.node is not None:
            sign = (Sync(place.parent),) if anew else ()
            *_, found = await link.request(*sign, messages.children(place.parent), patience=patience)
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
                found, under = await link.request(*asked, patience=patience)
                if found.missing:
                    continue
                stat = found.get()[1]
                if stat.ephemeralOwner == link.id:
                    place.node, place.zxid = node.name, stat.czxid
                    if not link.is_under(under, stat.czxid):
                        await self._reject(place, patience)
                        continue
                    place.token = link.layout.token(stat.czxid)
                    return await self.find(place, patience, anew)
                await delete(link, path, patience)  # of an earlier session of ours, which may live on for a while
        return await self.enter(place, patience)

    async def _reject(self, place: Place, patience: float) -> None:
        """Take a node away that was made under a layout that is gone, and learn the one that is there now."""
        await delete(place.session.handle, place.path, patience)
        place.node = None
        await self._sessions.settle(place.session.handle, patience)
