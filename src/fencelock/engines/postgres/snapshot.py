"""Decodes the rows that `inspect` of both PostgreSQL engines reads."""

from __future__ import annotations

from collections.abc import Sequence

from fencelock.engines.postgres.connection import Row
from fencelock.model import Snapshot


def encode_value(value: str) -> str:
    """Return a claim's value as a bytea parameter, which may contain any character."""
    return f"\\x{value.encode().hex()}"


def decode_text(value: bytes | None) -> str:
    """Return a text column."""
    return "" if value is None else value.decode(errors="replace")


def read_snapshot(name: str, rows: Sequence[Row]) -> Snapshot:
    """Return the snapshot for rows of owner, token, seconds left, shared, limit, value in hex, and the clock in µs."""
    claims = [
        (
            decode_text(owner),
            None if token is None else int(token),
            float(left or 0),
            shared == b"t",
            None if limit is None else int(limit),
            bytes.fromhex(decode_text(value)).decode(errors="replace"),
        )
        for owner, token, left, shared, limit, value, _ in rows
    ]
    return Snapshot.of(name, claims, float(rows[0][-1] or 0) if rows else 0.0)
