"""Decodes the rows that `inspect` of both PostgreSQL engines reads."""

from __future__ import annotations

from collections.abc import Sequence

from fencelock.engines.postgres.connection import Row
from fencelock.model import Holder, Mode, Snapshot, Waiter, held_for


def encode_value(value: str) -> str:
    """Return a claim's value as a bytea parameter, which may contain any character."""
    return f"\\x{value.encode().hex()}"


def decode_text(value: bytes | None) -> str:
    """Return a text column."""
    return "" if value is None else value.decode(errors="replace")


def read_snapshot(name: str, rows: Sequence[Row]) -> Snapshot:
    """Return the snapshot for rows of owner, token, seconds left, shared, limit, value in hex, and the clock in µs."""
    holders: list[Holder] = []
    waiters: list[Waiter] = []
    for owner, token, left, shared, permits, content, clock in rows:
        label, expires_in = decode_text(owner), float(left or 0)
        limit = None if permits is None else int(permits)
        mode = Mode.of(shared == b"t", limit)
        value = bytes.fromhex(decode_text(content)).decode(errors="replace")
        if token is None:
            waiters.append(Waiter(label, expires_in, mode, limit, value))
        else:
            since = held_for(int(token), float(clock or 0))
            holders.append(Holder(label, int(token), expires_in, mode, limit, since, value))
    return Snapshot(name, tuple(holders), tuple(waiters))
