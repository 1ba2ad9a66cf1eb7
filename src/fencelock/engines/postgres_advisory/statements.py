"""Every statement of the advisory locks, and how names and times are written in them."""

from __future__ import annotations

from hashlib import blake2b
from math import ceil

from fencelock.engines.postgres.link import Statement

BEGIN = Statement("fl_begin", "SELECT fencelock.begin_session()")
INTRODUCE = Statement("fl_introduce", "SELECT fencelock.introduce($1, $2, $3, $4)")
# Plain SQL, not a function: it is half of what an uncontended lock costs. From now on the session ends when it is idle for
# the ttl, if it has the lock or is about to wait for it. A token that is far behind the clock, as after a restore, is
# drawn again by a function that sees to that.
SEIZE = Statement(
    "fl_seize",
    "SELECT token, CASE WHEN token IS NOT NULL OR $4 THEN set_config('idle_session_timeout', $2, false) || "
    "set_config('application_name', 'fencelock ' || coalesce(token::text, '-') || ' ' || $2, false) END "
    "FROM (SELECT CASE WHEN drawn < date_part('epoch', clock_timestamp()) * 1000000 - 1000000 THEN fencelock.mint() "
    "ELSE drawn END AS token "
    "FROM (SELECT CASE WHEN CASE WHEN $3 THEN pg_try_advisory_lock_shared($1) ELSE pg_try_advisory_lock($1) END "
    "THEN nextval('fencelock.token') END AS drawn OFFSET 0) AS tried OFFSET 0) AS minted",
)
LINE_UP = Statement("fl_line_up", "CALL fencelock.line_up($1, $2, $3, NULL, NULL)")
_FORGET = "set_config('idle_session_timeout', $2, false)"
UNLOCK = Statement("fl_unlock", f"SELECT pg_advisory_unlock($1), {_FORGET}")
UNLOCK_SHARED = Statement("fl_unlock_shared", f"SELECT pg_advisory_unlock_shared($1), {_FORGET}")
UNLOCK_ALL = Statement("fl_unlock_all", f"SELECT $1::bigint, pg_advisory_unlock_all(), {_FORGET}")
ALIVE = Statement("fl_alive", "SELECT")
CANCEL = Statement("fl_cancel", "SELECT pg_cancel_backend($1)")
END = Statement(
    "fl_end",
    "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity WHERE pid = $1 AND application_name LIKE 'fencelock%'",
)
GRANTED = Statement("fl_granted", "SELECT bool_and(granted) FROM pg_locks WHERE pid = $1 AND locktype = 'advisory'")
INSPECT = Statement(
    "fl_sessions",
    "SELECT owner, token, expires_in, shared, date_part('epoch', clock_timestamp()) * 1000000 FROM fencelock.sessions($1)",
)
HELD = Statement(
    "fl_held",
    "SELECT pid, (classid::bigint << 32) | objid::bigint FROM pg_locks "
    "WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND pid = ANY ($1::integer[])",
)
NAMES = Statement("fl_locked_names", "SELECT fencelock.locked_names($1, $2)")
EVICT = Statement("fl_evict", "SELECT fencelock.evict($1)")


def key(namespace: str, name: str) -> int:
    """Return a name's 64 bits. Neither part can contain a NUL."""
    digest = blake2b(f"{namespace}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def ms(ttl: float) -> str:
    """Return a ttl as the server's settings have it."""
    return f"{ceil(ttl * 1000)}ms"
