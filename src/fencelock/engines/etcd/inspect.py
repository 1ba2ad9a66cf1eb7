"""Looking at what is on etcd, for people: who holds a name and who waits, which names there are, how the members are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.engines.etcd.layout import data, read_about, spot
from fencelock.engines.etcd.link import Link, Refused
from fencelock.engines.etcd.messages import (
    EQUAL,
    RANGE,
    STATUS,
    TIME_TO_LIVE,
    TXN,
    Status,
    below,
    created,
    do_delete,
    do_range,
    find,
    of_lease,
    read_lease,
    read_range,
    read_status,
    read_txn,
    txn,
)
from fencelock.errors import EngineUnavailable, OutcomeUnknown
from fencelock.model import Admitted, Holder, Mode, Snapshot, Waiter, admit

if TYPE_CHECKING:
    from fencelock.engines.etcd.asking import Asking
    from fencelock.engines.etcd.layout import Layout
    from fencelock.engines.etcd.links import Links

PAGE = 1000
"""Keys that are asked for at once."""
FORCED_AT_ONCE = 60
"""Holders that are dropped in one transaction: etcd allows 128 steps."""


class Looks:
    """What `inspect`, `names`, `force_release` and `doctor` do on etcd."""

    def __init__(self, links: Links, layout: Layout, asking: Asking) -> None:
        self._links = links
        self._layout = layout
        self._asking = asking
        self._ask = asking.request

    async def inspect(self, name: str) -> Snapshot:
        """Look at the line, and ask how long each session has left."""
        steps = [do_range(find(self._layout.about)), do_range(below(self._layout.queue(name).encode()))]
        answer = read_txn(await self._ask(TXN, txn([], steps)))
        pairs = answer.found(1)
        if not pairs or not answer.found(0):
            return Snapshot(name)
        about = read_about(answer.found(0)[0], self._links.address)
        left = await self._left({pair.lease for pair in pairs})
        places = [spot(pair) for pair in pairs]
        holders, waiters = [], []
        for place in places:
            if isinstance(admit(places, place), Admitted):
                holders.append(
                    Holder(
                        place.owner,
                        about.token(place.created),
                        left[place.lease],
                        Mode.of(place.shared, place.limit),
                        place.limit,
                    )
                )
            else:
                waiters.append(Waiter(place.owner, left[place.lease], Mode.of(place.shared, place.limit), place.limit))
        return Snapshot(name, tuple(holders), tuple(waiters))

    async def _left(self, leases: set[int]) -> dict[int, float]:
        """Ask how many seconds each session has left, all at once; none if it is over by now."""

        async def work(link: Link, seconds: float) -> dict[int, float]:
            calls = {lease: link.start(TIME_TO_LIVE, of_lease(lease)) for lease in leases}
            return {
                lease: float(max(0, read_lease(await link.finish(call, seconds))[1])) for lease, call in calls.items()
            }

        try:
            return await self._links.run(work, MAX_REPLY_TIMEOUT)
        except Refused as refusal:
            raise refusal.told(self._links.address) from refusal

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what was in use at the time of the call, or came into use meanwhile."""
        start = root = self._layout.queue(prefix).encode()[:-1] if prefix else self._layout.claims.encode()
        found: set[str] = set()
        while True:
            _, page = read_range(await self._ask(RANGE, below(root, limit=PAGE, bare=True, start=start)))
            found.update(self._layout.name_of(pair.key) for pair in page.pairs)
            if not page.more or not page.pairs:
                break
            start = page.pairs[-1].key + b"\0"
        for name in sorted(found):
            if name.startswith(prefix):
                yield name

    async def force_release(self, name: str) -> int:
        """Delete the holders' claims; those behind came later, and so have higher tokens.

        Raise Unanswered if that was asked twice and the second time found other holders: the first time may have dropped
        them, and whoever holds the lock now may be the next.
        """
        while True:
            _, found = read_range(await self._ask(RANGE, below(self._layout.queue(name).encode())))
            places = [spot(pair) for pair in found.pairs]
            holders = [place for place in places if isinstance(admit(places, place), Admitted)][:FORCED_AT_ONCE]
            if not holders:
                return 0
            keys = [data(place.id) for place in holders]
            compares = [created(key, EQUAL, place.created) for key, place in zip(keys, holders, strict=True)]
            said, tries = await self._asking.ask_counted(TXN, txn(compares, [do_delete(key) for key in keys]))
            if read_txn(said).succeeded:
                return len(holders)
            if tries > 1:
                raise OutcomeUnknown(
                    f"etcd at {self._links.address}: no reply to a request that may have released {name!r} by force; "
                    "look who holds it before you repeat it",
                    name,
                )

    async def health(self) -> list[Status | EngineUnavailable]:
        """Ask every member how it is: versions, leader, alarms. What was noticed by the way is in `facts`."""
        answers: list[Status | EngineUnavailable] = []
        for member in range(self._links.members):
            try:
                link = await self._links.visit(member)
            except EngineUnavailable as error:
                answers.append(error)
                continue
            try:
                answers.append(read_status(await link.call(STATUS, b"", MAX_REPLY_TIMEOUT)))
            except EngineUnavailable as error:
                answers.append(error)
            except Refused as refusal:
                answers.append(EngineUnavailable(str(refusal.told(link.address))))
            finally:
                self._links.leave(link)
        return answers
