"""Every statement that the engine sends. Whatever users hand in is written in hexadecimal, so that none of it is ever SQL."""

from __future__ import annotations

from base64 import b32encode
from hashlib import blake2b
from importlib.resources import files
from math import ceil
from typing import NamedTuple

from fencelock.model import Claim

LAYOUT = 2
AHEAD = 1_000_000
"""Tokens that are reserved at a time: a second of the clock, in µs, by which they are begun after a restart."""
LABEL = "fencelock-waiter"
CLOCK = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"
"""The server's clock in µs; sessions are in UTC, as an hour that comes twice would make it go back."""

WHO = (
    "SELECT CONNECTION_ID(), DATABASE(), @@GLOBAL.read_only, @@GLOBAL.innodb_flush_log_at_trx_commit, @@GLOBAL.log_bin, "
    "@@GLOBAL.sync_binlog"
)
CLUSTER = (
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN "
    "('wsrep_on', 'group_replication_group_name', 'group_replication_single_primary_mode')"
)
VERSION = "SELECT version, reserved FROM fencelock_layout WHERE id = 1"
HERE = "CONCAT(@@hostname, ':', @@port, ':', @@server_id)"
"""Which server this is: one that was a replica has the lines of another, and perhaps not the last of them."""
FIRST = f"SELECT token FROM fencelock_holders WHERE connection = 0 AND owner = {HERE}"
COLUMNS = "(connection, lock_key, space, name, owner, ttl)"
HOST = "SELECT HOST FROM information_schema.PROCESSLIST WHERE ID = CONNECTION_ID()"
MYSQL_HOST = f"SELECT COALESCE((SELECT HOST FROM performance_schema.processlist WHERE ID = CONNECTION_ID()), ({HOST}))"
"""The same without going through all sessions, which MySQL does, unless the performance schema is switched off."""
UPTIME = "SHOW GLOBAL STATUS LIKE 'Uptime'"
RELEASE_ALL = "SELECT RELEASE_ALL_LOCKS()"

NO_SUCH_THREAD, NOT_THE_OWNER, NO_SUCH_TABLE, FULL = 1094, 1095, 1146, 1114
NO_MEMORY_TABLES = frozenset({1286, 1290, 3161})
"""The administrator allows other kinds of tables only (or, 1290, no tables at all)."""
INTERRUPTED = frozenset({1053, 1205, 1213, 1317, 1927, 1969, 3024})
"""A statement was broken off: by a KILL, a deadlock, a limit of time, the end of the server."""


def weakness(flush: bytes | None, log_bin: bytes | None, sync_binlog: bytes | None) -> str:
    """Return which setting lets the server forget a commit when its machine crashes, or "".

    With a binary log, InnoDB leaves the last sync of a commit to that log: a commit that the log has lost is rolled back.

    >>> weakness(b"1", b"0", b"0"), weakness(b"2", b"0", b"0")
    ('', 'innodb_flush_log_at_trx_commit is 2; set it to 1')
    >>> weakness(b"1", b"1", b"0")
    'log_bin is on and sync_binlog is 0; set sync_binlog to 1'
    """
    if flush != b"1":
        return f"innodb_flush_log_at_trx_commit is {(flush or b'NULL').decode()}; set it to 1"
    if log_bin not in (b"0", b"OFF") and sync_binlog != b"1":
        return f"log_bin is on and sync_binlog is {(sync_binlog or b'NULL').decode()}; set sync_binlog to 1"
    return ""


def script() -> str:
    """Return what makes the tables, with what is to be said of them."""
    return (files(__package__) / "schema.sql").read_text("utf-8")


def schema() -> list[str]:
    """Return what makes the tables, statement by statement."""
    plain = "\n".join(line for line in script().splitlines() if not line.startswith("--"))
    return [statement.strip() for statement in plain.split(";") if statement.strip()]


def settle(ttl: int, *, mariadb: bool) -> str:
    """Make the session what we need, whatever the server's settings or its init_connect have made of it.

    Its ttl, no limit to how long a statement waits, and statements that mean what they say.
    """
    limit = "max_statement_time = 0" if mariadb else "max_execution_time = 0"
    mode = "time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', sql_safe_updates = 0"
    return f"SET SESSION wait_timeout = {ttl}, autocommit = 1, {mode}, {limit}"


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
    """The statements that take one lock for one claim; the last of them says whether it is ours, and the token."""

    claim: Claim
    ttl: int
    key: str
    space: str

    def at_once(self) -> list[str]:
        """Take it if it is free."""
        return [self._mint(f"GET_LOCK('{self.key}', 0) = 1")]

    def in_line(self, seconds: int) -> list[str]:
        """Wait for it, and mint the token in a statement of its own.

        No table may be open while we wait: that would hold up whoever makes a backup, and all others behind it.
        """
        name, owner = self._hex()
        label = f"/* {LABEL} {self.space} {self.ttl} {name} {owner or '-'} */"
        mine = f"IS_USED_LOCK('{self.key}') = CONNECTION_ID()"
        return [f"SELECT GET_LOCK('{self.key}', {seconds}) {label}", self._mint(mine)]

    def _mint(self, condition: str) -> str:
        """Write down who has the lock, if the condition holds; the line's number is the token."""
        name, owner = self._hex()
        return (
            f"REPLACE INTO fencelock_holders {COLUMNS} SELECT CONNECTION_ID(), '{self.key}', '{self.space}', X'{name}', "
            f"X'{owner}', {self.ttl} FROM DUAL WHERE {condition}"
        )

    def _hex(self) -> tuple[str, str]:
        return self.claim.name.encode().hex(), self.claim.owner.encode().hex()


def begin(reserved: int) -> str:
    """Go on with tokens that are not below the clock, nor below what was ever granted; they never go back."""
    return (
        f"REPLACE INTO fencelock_holders (token, {COLUMNS[1:]} "
        f"VALUES (GREATEST({CLOCK}, {reserved}), 0, '', '', '', {HERE}, 0)"
    )


def reserve(token: int) -> str:
    """Promise, on disk, that nothing above was granted."""
    return f"UPDATE fencelock_layout SET reserved = GREATEST(reserved, {token}) WHERE id = 1"


SKIP = (
    f"REPLACE INTO fencelock_holders {COLUMNS} VALUES (CONNECTION_ID(), '-', '', '', '', 0)",
    "DELETE FROM fencelock_holders WHERE connection = CONNECTION_ID()",
)
"""Use up a token."""

SWEEP = "DELETE FROM fencelock_holders WHERE connection > 0 AND NOT (IS_USED_LOCK(lock_key) <=> connection)"
"""Forget those whose sessions ended without a release: a line is written after the lock was had, so none is too young."""


FORGET = f"DELETE FROM fencelock_records WHERE ends <= {CLOCK} ORDER BY ends LIMIT 2"
"""Make room: two for each that is written."""


def find_record(key: str) -> str:
    """Return a record, and the time."""
    return f"SELECT {CLOCK}, value, token, version, ends FROM fencelock_records WHERE record_key = '{key}'"


class Line(NamedTuple):
    """A record to be written."""

    key: str
    name: str
    value: bytes | None
    token: int
    version: int
    ttl: float

    def insert(self) -> str:
        """Write it where there is none."""
        return (
            "INSERT IGNORE INTO fencelock_records (record_key, name, value, token, version, ends) VALUES "
            f"('{self.key}', X'{self.name.encode().hex()}', {self._value}, {self.token}, {self.version}, {self._ends})"
        )

    def update(self, version: int, *, alive: bool) -> str:
        """Write it over a version, unless another has taken that's place or its time has come meanwhile."""
        return (
            f"UPDATE fencelock_records SET value = {self._value}, token = {self.token}, version = {self.version}, "
            f"ends = {self._ends} WHERE record_key = '{self.key}' AND version = {version} AND (ends > {CLOCK}) = {alive:d}"
        )

    @property
    def _value(self) -> str:
        return "NULL" if self.value is None else f"X'{self.value.hex()}'"

    @property
    def _ends(self) -> str:
        return f"{CLOCK} + {ceil(self.ttl * 1e6)}"


def is_mine(key: str) -> str:
    """Ask which session holds the lock: a sign of life, too."""
    return f"SELECT IS_USED_LOCK('{key}')"


def release(connection: int) -> str:
    """Give the lock back, and forget who held it. All that the session has: it has no other, and may have it twice."""
    return f"DELETE FROM fencelock_holders WHERE connection = {connection} AND RELEASE_ALL_LOCKS() > 0"


def session(connection: int, host: str) -> str:
    """Ask whether a session is still there: after a restart of the server its number may be somebody else's."""
    return f"SELECT ID FROM information_schema.PROCESSLIST WHERE ID = {connection} AND HOST = X'{host.encode().hex()}'"


def kill(connection: int) -> str:
    """End a session."""
    return f"KILL CONNECTION {connection}"


def holders(condition: str, *, mariadb: bool) -> str:
    """Return who holds what, the seconds since the session last sent something, and those since the lock was granted."""
    idle = "p.TIME_MS / 1000" if mariadb else "p.TIME"
    held = "TIMESTAMPDIFF(MICROSECOND, h.granted, NOW(6)) / 1000000"
    return (
        f"SELECT h.connection, h.name, h.owner, h.ttl, h.token, {idle}, {held} FROM fencelock_holders h "
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
