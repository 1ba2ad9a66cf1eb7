"""What a majority of the nodes says about a name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fencelock.model import Snapshot, StoredClaim


def snapshot_of(name: str, replies: Iterable[Any], majority: int, clock: float) -> Snapshot:
    """Return the holder and the waiters that a majority of the nodes has. `replies` are those of `inspect.lua`."""
    found: dict[tuple[bytes, int | None], list[tuple[float, int, bytes]]] = {}
    for holder, waiters in replies:
        if holder:
            id, proposal, ms_left, label = holder
            found.setdefault((id, int(proposal)), []).append((0.0, ms_left, label))
        for id, ticket, ms_left, label in waiters:
            found.setdefault((id, None), []).append((float(ticket), ms_left, label))
    claims: list[tuple[float, StoredClaim]] = []
    for (_, token), entries in found.items():
        if len(entries) >= majority:
            ticket, ms_left, label = sorted(entries, reverse=True)[majority - 1]  # a majority keeps it for that long
            owner, _, value = label.decode().partition("\n")
            claims.append((ticket, (owner, token, ms_left / 1000, False, None, value)))
    return Snapshot.of(name, [claim for _, claim in sorted(claims, key=lambda claim: claim[0])], clock)
