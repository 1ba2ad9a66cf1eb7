"""Every statement that the engine sends. Names, owners and values are in hexadecimal, so none is parsed as SQL."""

from __future__ import annotations

from base64 import b32encode
from hashlib import blake2b
from importlib.resources import files
from math import ceil
from typing import NamedTuple

from fencelock.model import Claim

LAYOUT = 3
RESERVED_AHEAD = 1_000_000
"""Tokens that are reserved at a time: one second of the clock (in µs), at which the counter starts after a restart."""
LABEL = "fencelock-waiter"
CLOCK = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"
"""The server's clock in µs. Sessions run in UTC: the end of daylight saving time would set the clock back."""

SESSION_INFO = (
    "SELECT CONNECTION_ID(), DATABASE(), @@GLOBAL.read_only, @@GLOBAL.innodb_flush_log_at_trx_commit, @@GLOBAL.log_bin, "
    "@@GLOBAL.sync_binlog"
)
CLUSTER_VARIABLES = (
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN "
    "('wsrep_on', 'group_replication_group_name', 'group_replication_single_primary_mode')"
)
VERSION = "SELECT version, reserved FROM fencelock_layout WHERE id = 1"
SERVER_ID = "CONCAT(@@hostname, ':', @@port, ':', @@server_id)"
"""Identifies the server: a promoted replica has the rows of its former primary, perhaps not the last ones."""
FIRST_TOKEN = f"SELECT token FROM fencelock_holders WHERE connection = 0 AND owner = {SERVER_ID}"
COLUMNS = "(connection, lock_key, space, name, owner, value, ttl)"
HOST = "SELECT HOST FROM information_schema.PROCESSLIST WHERE ID = CONNECTION_ID()"
MYSQL_HOST = f"SELECT COALESCE((SELECT HOST FROM performance_schema.processlist WHERE ID = CONNECTION_ID()), ({HOST}))"
"""The same from the performance schema, if that is on: MySQL's PROCESSLIST reads all sessions to find one."""
UPTIME = "SHOW GLOBAL STATUS LIKE 'Uptime'"
RELEASE_ALL = "SELECT RELEASE_ALL_LOCKS()"

NO_SUCH_THREAD, NOT_THE_OWNER, NO_SUCH_TABLE, TABLE_FULL = 1094, 1095, 1146, 1114
NO_MEMORY_TABLES = frozenset({1286, 1290, 3161})
"""The server is configured to refuse MEMORY tables (1290 may also mean that it is read-only)."""
INTERRUPTED = frozenset({1053, 1205, 1213, 1317, 1927, 1969, 3024})
"""The server interrupted a statement: a KILL, a deadlock, a time limit, or its own shutdown."""


def weakness(flush: bytes | None, log_bin: bytes | None, sync_binlog: bytes | None) -> str:
    """Return the setting that lets the server lose a commit when its machine crashes, or "".

    With a binary log, InnoDB leaves the sync of a commit to that log, and rolls back commits that the log has lost.

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
    """Return the statements that create the tables, with comments."""
    return (files(__package__) / "schema.sql").read_text("utf-8")


def schema() -> list[str]:
    """Return the statements that create the tables, one by one."""
    plain = "\n".join(line for line in script().splitlines() if not line.startswith("--"))
    return [statement.strip() for statement in plain.split(";") if statement.strip()]


def configure_session(ttl: int, *, mariadb: bool) -> str:
    """Set every variable that the statements depend on: server settings or init_connect may have changed it.

    The session gets its ttl and no limit on the time of a statement.
    """
    time_limit = "max_statement_time = 0" if mariadb else "max_execution_time = 0"
    mode = "time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', sql_safe_updates = 0"
    return f"SET SESSION wait_timeout = {ttl}, autocommit = 1, {mode}, {time_limit}"


def set_ttl(ttl: int) -> str:
    """Let the server end the session after so many seconds without a statement."""
    return f"SET SESSION wait_timeout = {ttl}"


class Names(NamedTuple):
    """Maps the lock names of one namespace in one database to names of user-level locks."""

    database: str
    namespace: str

    @property
    def space(self) -> str:
        """The namespace's identifier on the whole server."""
        return _hash(8, self.database, self.namespace).hex()

    def key(self, name: str) -> str:
        """Return the name of the user-level lock. Such names ignore case, have at most 64 characters, and are server-wide."""
        return "fencelock:" + b32encode(_hash(20, self.database, self.namespace, name)).decode().lower()


def _hash(size: int, *words: str) -> bytes:
    digest = blake2b(digest_size=size)
    for word in words:
        data = word.encode()
        digest.update(len(data).to_bytes(4, "big") + data)
    return digest.digest()


class LockStatements(NamedTuple):
    """The statements that acquire one lock for one claim. The last reply tells whether it was granted, and the token."""

    claim: Claim
    """With its ttl in whole seconds."""
    key: str
    space: str

    def try_lock(self) -> list[str]:
        """Acquire the lock if it is free."""
        return [self._mint(f"GET_LOCK('{self.key}', 0) = 1")]

    def wait_for_lock(self, seconds: int) -> list[str]:
        """Wait for the lock, then mint the token in a second statement.

        A statement that waits must not open a table: it would block a backup, and every writer behind that.
        """
        texts = " ".join(text or "-" for text in self._hex())
        label = f"/* {LABEL} {self.space} {self.claim.ttl:.0f} {texts} */"
        held = f"IS_USED_LOCK('{self.key}') = CONNECTION_ID()"
        return [f"SELECT GET_LOCK('{self.key}', {seconds}) {label}", self._mint(held)]

    def _mint(self, condition: str) -> str:
        """Insert the holder's row if the condition holds; its AUTO_INCREMENT number is the token."""
        texts = ", ".join(f"X'{text}'" for text in self._hex())
        return (
            f"REPLACE INTO fencelock_holders {COLUMNS} SELECT CONNECTION_ID(), '{self.key}', '{self.space}', {texts}, "
            f"{self.claim.ttl:.0f} FROM DUAL WHERE {condition}"
        )

    def _hex(self) -> list[str]:
        """Return name, owner and value in hexadecimal, so that no character of them is parsed."""
        return [text.encode().hex() for text in (self.claim.name, self.claim.owner, self.claim.value)]


def start_tokens(reserved: int) -> str:
    """Raise the token counter to the clock and above every reserved token; it never goes back."""
    return (
        f"REPLACE INTO fencelock_holders (token, {COLUMNS[1:]} "
        f"VALUES (GREATEST({CLOCK}, {reserved}), 0, '', '', '', {SERVER_ID}, '', 0)"
    )


def reserve_tokens(token: int) -> str:
    """Record on disk that tokens up to this one may have been granted."""
    return f"UPDATE fencelock_layout SET reserved = GREATEST(reserved, {token}) WHERE id = 1"


SKIP_TOKEN = (
    f"REPLACE INTO fencelock_holders {COLUMNS} VALUES (CONNECTION_ID(), '-', '', '', '', '', 0)",
    "DELETE FROM fencelock_holders WHERE connection = CONNECTION_ID()",
)
"""Mint a token that nobody gets."""

DELETE_STALE_HOLDERS = (
    "DELETE FROM fencelock_holders WHERE connection > 0 AND NOT (IS_USED_LOCK(lock_key) <=> connection)"
)
"""Delete the rows of sessions that ended without a release. A row is inserted after the grant, so none is too young."""


PRUNE_RECORDS = f"DELETE FROM fencelock_records WHERE ends <= {CLOCK} ORDER BY ends LIMIT 2"
"""Delete expired records: at most two after each write."""


def find_record(key: str) -> str:
    """Read a record and the server's time."""
    return f"SELECT {CLOCK}, value, token, version, ends FROM fencelock_records WHERE record_key = '{key}'"


class RecordRow(NamedTuple):
    """A record to write."""

    key: str
    name: str
    value: bytes | None
    token: int
    version: int
    ttl: float

    def insert(self) -> str:
        """Insert the record unless there is one."""
        return (
            "INSERT IGNORE INTO fencelock_records (record_key, name, value, token, version, ends) VALUES "
            f"('{self.key}', X'{self.name.encode().hex()}', {self._value}, {self.token}, {self.version}, {self._ends})"
        )

    def update(self, version: int, *, alive: bool) -> str:
        """Replace this version of the record, unless it was replaced or has expired in between."""
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


def lock_holder(key: str) -> str:
    """Return the id of the session that holds the lock. On the holder's own session, this also restarts its ttl."""
    return f"SELECT IS_USED_LOCK('{key}')"


def release(connection: int) -> str:
    """Release every lock of the session and delete its row. The session has only one lock, perhaps acquired twice."""
    return f"DELETE FROM fencelock_holders WHERE connection = {connection} AND RELEASE_ALL_LOCKS() > 0"


def session(connection: int, host: str) -> str:
    """Find a session. The host is compared because a restarted server assigns the same ids to other sessions."""
    return f"SELECT ID FROM information_schema.PROCESSLIST WHERE ID = {connection} AND HOST = X'{host.encode().hex()}'"


def kill(connection: int) -> str:
    """End a session."""
    return f"KILL CONNECTION {connection}"


def holders(condition: str, *, mariadb: bool) -> str:
    """Find holders, with the seconds since the session's last statement and since the grant."""
    idle = "p.TIME_MS / 1000" if mariadb else "p.TIME"
    held = "TIMESTAMPDIFF(MICROSECOND, h.granted, NOW(6)) / 1000000"
    return (
        f"SELECT h.name, h.owner, h.value, h.ttl, h.token, {idle}, {held} FROM fencelock_holders h "
        "LEFT JOIN information_schema.PROCESSLIST p ON p.ID = h.connection "
        f"WHERE {condition} AND IS_USED_LOCK(h.lock_key) = h.connection"
    )


def waiters(key: str | None, *, mariadb: bool) -> str:
    """Find the statements of waiters, oldest first; a comment in each contains namespace, ttl, name, owner and value."""
    order = "QUERY_ID" if mariadb else "TIME DESC, ID"
    wanted = f"SELECT GET_LOCK('{key or ''}%".replace("'", "''").replace("_", "\\_")
    return (
        "SELECT INFO FROM information_schema.PROCESSLIST WHERE STATE = 'User lock' "
        f"AND INFO LIKE '{wanted}' ORDER BY {order}"
    )
