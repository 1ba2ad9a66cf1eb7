"""The statements of the advisory engine, and how names and times are written in them."""

from __future__ import annotations

from hashlib import blake2b
from math import ceil

from fencelock.engines.postgres.connection import Statement

BEGIN_SESSION = Statement("fl_begin_session", "SELECT fencelock.begin_session()")
REGISTER = Statement("fl_register", "SELECT fencelock.register_session($1, $2, $3, $4, $5)")
# Plain SQL, which is faster than a function: this is half the cost of an uncontended lock. If the session gets the lock or is
# about to wait for it ($4), it ends from then on when it is idle for the ttl. If a token is far behind the clock, as after a
# restore, `fencelock.mint` draws another one.
TRY_LOCK = Statement(
    "fl_try_lock",
    "SELECT token, CASE WHEN token IS NOT NULL OR $4 THEN set_config('idle_session_timeout', $2, false) || "
    "set_config('application_name', 'fencelock ' || coalesce(token::text, '-') || ' ' || $2, false) END "
    "FROM (SELECT CASE WHEN drawn < date_part('epoch', clock_timestamp()) * 1000000 - 1000000 THEN fencelock.mint() "
    "ELSE drawn END AS token "
    "FROM (SELECT CASE WHEN CASE WHEN $3 THEN pg_try_advisory_lock_shared($1) ELSE pg_try_advisory_lock($1) END "
    "THEN nextval('fencelock.token') END AS drawn OFFSET 0) AS tried OFFSET 0) AS minted",
)
LOCK_WAIT = Statement("fl_lock_wait", "CALL fencelock.lock_wait($1, $2, $3, NULL)")
UNLOCK = Statement("fl_unlock", "SELECT pg_advisory_unlock_all(), set_config('idle_session_timeout', $1, false)")
DOWNGRADE = Statement("fl_downgrade", "SELECT fencelock.downgrade_session($1)")
PING = Statement("fl_ping", "SELECT")
CANCEL = Statement("fl_cancel", "SELECT pg_cancel_backend($1)")
TERMINATE = Statement(
    "fl_terminate",
    "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity WHERE pid = $1 AND application_name LIKE 'fencelock%'",
)
GRANTED = Statement("fl_granted", "SELECT bool_and(granted) FROM pg_locks WHERE pid = $1 AND locktype = 'advisory'")
INSPECT = Statement(
    "fl_sessions",
    "SELECT owner, token, expires_in, shared, NULL, value, date_part('epoch', clock_timestamp()) * 1000000 "
    "FROM fencelock.sessions($1)",
)
HELD_LOCKS = Statement(
    "fl_held_locks", "SELECT pid, key FROM fencelock.advisory_locks() WHERE granted AND pid = ANY ($1::integer[])"
)
NAMES = Statement("fl_locked_names", "SELECT fencelock.locked_names($1, $2)")
TERMINATE_HOLDERS = Statement("fl_terminate_holders", "SELECT fencelock.terminate_holders($1)")


def key(namespace: str, name: str) -> int:
    """Return the 64-bit key of a name. Neither part can contain a NUL."""
    digest = blake2b(f"{namespace}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def ms(ttl: float) -> str:
    """Return a ttl in the format of the server's settings."""
    return f"{ceil(ttl * 1000)}ms"
