"""Every statement that the engine sends. Whatever users hand in is written in hexadecimal, so that none of it is ever SQL."""

from __future__ import annotations

from base64 import b32encode
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import NamedTuple

from fencelock.model import Claim

LAYOUT = 1
COUNTERS = 16
"""Rows that the names are spread over where tokens come from counters."""
LABEL = "fencelock-waiter"
CLOCK = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)"
"""The server's clock in µs."""

WHO = f"SELECT CONNECTION_ID(), DATABASE(), {CLOCK}, @@GLOBAL.innodb_flush_log_at_trx_commit, @@GLOBAL.read_only"
CLUSTER = (
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN "
    "('wsrep_on', 'group_replication_group_name', 'group_replication_single_primary_mode')"
)
VERSION = "SELECT version FROM fencelock_layout"
HOST = "SELECT HOST FROM information_schema.PROCESSLIST WHERE ID = CONNECTION_ID()"
SESSIONS = "SELECT ID FROM information_schema.PROCESSLIST"
RELEASE_ALL = "SELECT RELEASE_ALL_LOCKS()"

NO_SUCH_THREAD, NOT_THE_OWNER = 1094, 1095
MISSING = frozenset({1146, 4091})
"""There is no such table, no such sequence."""
INTERRUPTED = frozenset({1053, 1205, 1213, 1317, 1927, 1969, 3024})
"""A statement was broken off: by a KILL, a deadlock, a limit of time, the end of the server."""


@cache
def ddl(file: str) -> tuple[str, ...]:
    """Return the statements of a file."""
    text = (files(__package__) / f"{file}.sql").read_text("utf-8")
    plain = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    return tuple(statement.strip() for statement in plain.split(";") if statement.strip())


def settle(ttl: int, *, mariadb: bool) -> str:
    """Make the session what we need: its ttl, and no limit of the server's to how long a statement waits."""
    limit = "max_statement_time = 0" if mariadb else "max_execution_time = 0"
    return f"SET SESSION wait_timeout = {ttl}, autocommit = 1, {limit}"


def keep_for(ttl: int) -> str:
    """Have the server end the session when nothing was heard of it for so many seconds."""
    return f"SET SESSION wait_timeout = {ttl}"


class Names(NamedTuple):
    """How the names of one namespace in one database are written."""

    database: str
    namespace: str

    @property
    def space(self) -> str:
        """What tells this namespace from others, on the whole server."""
        return _hash(8, self.database, self.namespace).hex()

    def key(self, name: str) -> str:
        """Return the name of the user-level lock: these ignore case, may have 64 characters, and are the whole server's."""
        return "fencelock:" + b32encode(_hash(20, self.database, self.namespace, name)).decode().lower()


def _hash(size: int, *words: str) -> bytes:
    digest = blake2b(digest_size=size)
    for word in words:
        data = word.encode()
        digest.update(len(data).to_bytes(4, "big") + data)
    return digest.digest()


class Taking(NamedTuple):
    """The statements that take one lock for one claim; the last of them says whether it was granted, and the token."""

    claim: Claim
    ttl: int
    key: str
    space: str
    counter: bool

    def at_once(self) -> list[str]:
        """Take it if it is free."""
        if self.counter:
            return [f"SELECT GET_LOCK('{self.key}', 0)", *self._mint()]
        return [self._insert(f"LAST_INSERT_ID(NEXTVAL({SEQUENCE}))", f"GET_LOCK('{self.key}', 0) = 1")]

    def in_line(self, seconds: int) -> list[str]:
        """Wait for it, then mint the token: in a statement of its own, for one that waits must not have tables open."""
        name, owner = self.claim.name.encode().hex(), self.claim.owner.encode().hex()
        label = f"/* {LABEL} {self.space} {self.ttl} {name} {owner or '-'} */"
        return [f"SELECT GET_LOCK('{self.key}', {seconds}) {label}", *self._mint()]

    def _mint(self) -> list[str]:
        """Mint a token and write down who holds the lock, if this session does."""
        mine = f"IS_USED_LOCK('{self.key}') = CONNECTION_ID()"
        if not self.counter:
            return [self._insert(f"LAST_INSERT_ID(NEXTVAL({SEQUENCE}))", mine)]
        raised = f"UPDATE fencelock_counters SET token = LAST_INSERT_ID(GREATEST(token + 1, {CLOCK})) WHERE bucket = "
        return [
            f"{raised}{bucket(self.key)} AND {mine}",
            # Without the first the second must not be: its token would be an earlier one of this session's.
            self._insert("LAST_INSERT_ID(LAST_INSERT_ID())", f"ROW_COUNT() = 1 AND {mine}"),
        ]

    def _insert(self, token: str, condition: str) -> str:
        name, owner = self.claim.name.encode().hex(), self.claim.owner.encode().hex()
        return (
            "REPLACE INTO fencelock_holders (connection, lock_key, space, name, owner, ttl, token) "
            f"SELECT CONNECTION_ID(), '{self.key}', '{self.space}', X'{name}', X'{owner}', {self.ttl}, {token} "
            f"FROM DUAL WHERE {condition}"
        )


SEQUENCE = "fencelock_tokens"


def bucket(key: str) -> int:
    """Return which counter a lock's tokens come from."""
    return ord(key[-1]) % COUNTERS


def counters() -> str:
    """Make the counters, unless they are there."""
    rows = ", ".join(f"({number}, {CLOCK})" for number in range(COUNTERS))
    return f"INSERT IGNORE INTO fencelock_counters (bucket, token) VALUES {rows}"


def catch_up(clock: int) -> str:
    """Move the sequence up to the clock; it never goes back. Data that were restored from a copy would else repeat tokens."""
    return f"SELECT SETVAL({SEQUENCE}, {clock}, 0)"


def skip(key: str, *, counter: bool) -> str:
    """Use up a token."""
    if counter:
        return f"UPDATE fencelock_counters SET token = GREATEST(token + 1, {CLOCK}) WHERE bucket = {bucket(key)}"
    return f"SELECT NEXTVAL({SEQUENCE})"


def is_mine(key: str) -> str:
    """Ask which session holds the lock: a sign of life, too."""
    return f"SELECT IS_USED_LOCK('{key}')"


def release(key: str, connection: int) -> str:
    """Give the lock back, and forget who held it."""
    return f"DELETE FROM fencelock_holders WHERE connection = {connection} AND RELEASE_LOCK('{key}') = 1"


def session(connection: int, host: str) -> str:
    """Ask whether a session is still there: after a restart of the server its number may be somebody else's."""
    return f"SELECT ID FROM information_schema.PROCESSLIST WHERE ID = {connection} AND HOST = X'{host.encode().hex()}'"


def kill(connection: int) -> str:
    """End a session."""
    return f"KILL CONNECTION {connection}"


def holders(condition: str, *, mariadb: bool) -> str:
    """Return who holds what; the time is the seconds since the session was last heard of."""
    idle = "p.TIME_MS / 1000" if mariadb else "p.TIME"
    return (
        f"SELECT h.connection, h.name, h.owner, h.ttl, h.token, {idle} FROM fencelock_holders h "
        "LEFT JOIN information_schema.PROCESSLIST p ON p.ID = h.connection "
        f"WHERE {condition} AND IS_USED_LOCK(h.lock_key) = h.connection"
    )


def waiters(key: str | None, *, mariadb: bool) -> str:
    """Return what those who wait have asked, first come first: their statement says who they are."""
    order = "QUERY_ID" if mariadb else "TIME DESC, ID"
    wanted = f"SELECT GET_LOCK('{key or ''}%".replace("'", "''").replace("_", "\\_")
    return (
        "SELECT INFO FROM information_schema.PROCESSLIST WHERE STATE = 'User lock' "
        f"AND INFO LIKE '{wanted}' ORDER BY {order}"
    )
