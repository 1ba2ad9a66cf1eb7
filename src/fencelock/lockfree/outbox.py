"""The transactional outbox: a message is written in the transaction that it reports.

So it is delivered if and only if that transaction is committed. A relay (`fencelock.lockfree.relay`) delivers it later,
at least once, and in order for each key: of two transactions that append under the same key, one waits for the other, so
that the order of the messages is the order of the commits.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any, Generic, NamedTuple, TypeVar

from fencelock.core.validation import check_name
from fencelock.errors import InvalidName
from fencelock.lockfree.canonical import Json, to_json
from fencelock.lockfree.schema import explain_missing_table
from fencelock.runtime.both_apis import Api, BlockingApi, both_apis
from fencelock.sqlio import MYSQL, POSTGRESQL, BlockingConnection, ConnectionAdapter, Result, adapt, require_transaction

__all__ = ["Message", "Outbox"]

OUTBOX_MAX_BYTES = 255
IDLE = 86400

# Advisory locks are local to their database; the table's oid separates its schemas.
PG_APPEND = """WITH key_lock AS MATERIALIZED (SELECT pg_advisory_xact_lock(
    CAST(:lock AS bigint) # CAST(CAST(CAST('fencelock_outbox' AS regclass) AS oid) AS bigint)))
INSERT INTO fencelock_outbox (outbox, name, payload)
SELECT CAST(:outbox AS text), CAST(:name AS text), CAST(:payload AS text) FROM key_lock"""
MYSQL_LOCK_KEY = """INSERT INTO fencelock_outbox_key (outbox, name, used) VALUES (:outbox, :name, UNIX_TIMESTAMP())
ON DUPLICATE KEY UPDATE used = UNIX_TIMESTAMP()"""
APPEND = "INSERT INTO fencelock_outbox (outbox, name, payload) VALUES (:outbox, :name, :payload)"
NEXT = "SELECT id, name, payload FROM fencelock_outbox WHERE outbox = :outbox{others} ORDER BY id LIMIT :limit"
DELETE = "DELETE FROM fencelock_outbox WHERE outbox = :outbox AND id IN ({ids})"
PENDING = "SELECT count(*) FROM fencelock_outbox WHERE outbox = :outbox"
MYSQL_IDLE_KEYS = """SELECT name FROM fencelock_outbox_key
WHERE outbox = :outbox AND used < UNIX_TIMESTAMP() - :idle LIMIT :limit"""
MYSQL_DELETE_KEY = """DELETE FROM fencelock_outbox_key
WHERE outbox = :outbox AND name = :name AND used < UNIX_TIMESTAMP() - :idle"""

C = TypeVar("C", contravariant=True)


class Message(NamedTuple):
    """A message that a relay delivers.

    It may be delivered more than once: `id` is always the same for the same message. `token` is the fencing token of the
    relay: a receiver that refuses tokens below the highest it has seen gets nothing from a relay that was replaced.

    >>> Message(1, "order:42", {"event": "paid"}, token=34).key
    'order:42'
    """

    id: int
    key: str
    payload: Json
    token: int


class InvalidPayload(NamedTuple):
    """Stands for a payload that another program has written, and that is no JSON: only its key waits."""

    why: str


class BaseOutbox(Api, Generic[C]):
    """What both APIs share."""

    def __init__(self, name: str = "outbox") -> None:
        self.name = check_name(name, "an outbox's name")
        if len(name.encode()) > OUTBOX_MAX_BYTES:
            raise InvalidName(
                f"an outbox's name may have at most {OUTBOX_MAX_BYTES} bytes in UTF-8: {name!r:.40}…", name
            )

    @both_apis
    async def append(self, connection: C, key: str, payload: Json) -> None:
        """Write a message in the caller's transaction. The messages of a key are delivered in the order of their commits.

        Another transaction that appends under the same key waits for this one to end. Transactions that append under several
        keys should do it in the same order, as with all locks.
        """
        adapter = self._adapt(connection)
        check_name(key, "a message's key")
        text = to_json(payload, f"the payload of a message of {key!r}")
        await require_transaction(adapter, f"a message of {key!r}", key)
        args = {"outbox": _name(adapter, self.name), "name": _name(adapter, key), "payload": text}
        if adapter.dialect == POSTGRESQL:
            number = sha256(json.dumps(["fencelock.outbox", self.name, key]).encode()).digest()[:8]
            await self._execute(adapter, PG_APPEND, {**args, "lock": int.from_bytes(number, signed=True)})
            return
        if adapter.dialect == MYSQL:
            await self._execute(adapter, MYSQL_LOCK_KEY, args)
        await self._execute(adapter, APPEND, args)

    @both_apis
    async def pending(self, connection: C) -> int:
        """Return the number of messages that wait to be delivered, for an alarm when it only grows."""
        adapter = self._adapt(connection)
        return int((await self._execute(adapter, PENDING, {"outbox": _name(adapter, self.name)})).rows[0][0])

    @both_apis
    async def prune(self, connection: C, idle: int = IDLE, limit: int = 1000) -> int:
        """On MySQL and MariaDB, remove at most `limit` keys that were not used for `idle` seconds; return their number.

        There the order needs a row for each key. Other databases need no such rows: nothing is done. It is part of your
        transaction: commit after each call, also if it returns 0.
        """
        adapter = self._adapt(connection)
        if adapter.dialect != MYSQL:
            return 0
        # One by one, by the primary key: a scan would lock every row that it passes.
        args = {"outbox": _name(adapter, self.name), "idle": idle}
        rows = (await self._execute(adapter, MYSQL_IDLE_KEYS, {**args, "limit": limit})).rows
        return sum(
            [(await self._execute(adapter, MYSQL_DELETE_KEY, {**args, "name": name})).rowcount for (name,) in rows]
        )

    async def _read_next(
        self, adapter: ConnectionAdapter, token: int, limit: int, except_keys: list[str]
    ) -> list[Message]:
        """Return the messages to deliver next, oldest first, without those of some keys. For the relay."""
        names = {f"except_{number}": _name(adapter, key) for number, key in enumerate(except_keys)}
        others = f" AND name NOT IN ({', '.join(f':{name}' for name in names)})" if names else ""
        args = {**names, "outbox": _name(adapter, self.name), "limit": limit}
        rows = (await self._execute(adapter, NEXT.format(others=others), args)).rows
        return [Message(id_, _text(name), _payload(payload), token) for id_, name, payload in rows]

    async def _delete(self, adapter: ConnectionAdapter, ids: list[int]) -> None:
        """Delete delivered messages. For the relay, which has passed the fence in this transaction."""
        named = {f"id_{number}": id_ for number, id_ in enumerate(ids)}
        statement = DELETE.format(ids=", ".join(f":{name}" for name in named))
        await self._execute(adapter, statement, {**named, "outbox": _name(adapter, self.name)})

    def _adapt(self, connection: C) -> ConnectionAdapter:
        return adapt(connection, "lockfree", awaited=self._awaited)

    async def _execute(self, adapter: ConnectionAdapter, statement: str, args: dict[str, Any]) -> Result:
        try:
            return await adapter.execute(statement, args)
        except Exception as error:
            explain_missing_table(error, self.name)
            raise


class Outbox(BaseOutbox[BlockingConnection], BlockingApi):
    """An outbox in the caller's database. Outboxes with different names are independent.

    >>> import sqlite3
    >>> from fencelock.lockfree.relay import Relay
    >>> from fencelock.lockfree.schema import create_tables
    >>> db = sqlite3.connect(":memory:", check_same_thread=False); create_tables(db)
    >>> _ = db.execute("CREATE TABLE paid (id INTEGER)")
    >>> outbox = Outbox("orders")
    >>> with db:                                               # one transaction for both
    ...     _ = db.execute("INSERT INTO paid VALUES (42)")
    ...     outbox.append(db, "order:42", {"event": "paid"})
    >>> with db:
    ...     outbox.pending(db), outbox.prune(db)
    (1, 0)
    >>> with fencelock.connect("memory://outbox") as locks:
    ...     Relay(outbox, lambda: db, lambda message: print(message.key, message.payload), locks).drain()
    order:42 {'event': 'paid'}
    1
    """


def _name(adapter: ConnectionAdapter, text: str) -> str | bytes:
    return text.encode() if adapter.dialect == MYSQL else text


def _payload(text: str) -> Json | InvalidPayload:
    try:
        return json.loads(text)
    except ValueError as error:
        return InvalidPayload(str(error))


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else bytes(name).decode()
