"""The transactional outbox: what is to be told to others is written in the transaction that it is about.

Then it is told if and only if that transaction is committed. A relay (`fencelock.lockfree.relay`) tells it later, at least
once, and in order for each key: of two transactions that append under the same key, one waits for the other, so that the
order of the messages is the order of the commits.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
from hashlib import sha256
from typing import Any, NamedTuple, overload

from fencelock.core.validation import check_name
from fencelock.errors import FencelockError, InvalidName
from fencelock.lockfree.canonical import Json, written
from fencelock.lockfree.schema import explain
from fencelock.sqlio import MYSQL, POSTGRESQL, Answer, Awaited, Blocking, Link, link, run

__all__ = ["Message", "Outbox"]

OUTBOX_MAX_BYTES = 255
IDLE = 86400

# The table's oid keeps apart schemas; advisory locks are already local to their database.
PG_APPEND = """WITH turn AS MATERIALIZED (SELECT pg_advisory_xact_lock(
    CAST(:turn AS bigint) # CAST(CAST(CAST('fencelock_outbox' AS regclass) AS oid) AS bigint)))
INSERT INTO fencelock_outbox (outbox, name, payload)
SELECT CAST(:outbox AS text), CAST(:name AS text), CAST(:payload AS text) FROM turn"""
MY_TURN = """INSERT INTO fencelock_outbox_turn (outbox, name, used) VALUES (:outbox, :name, UNIX_TIMESTAMP())
ON DUPLICATE KEY UPDATE used = UNIX_TIMESTAMP()"""
APPEND = "INSERT INTO fencelock_outbox (outbox, name, payload) VALUES (:outbox, :name, :payload)"
NEXT = "SELECT id, name, payload FROM fencelock_outbox WHERE outbox = :outbox{others} ORDER BY id LIMIT :limit"
FORGET = "DELETE FROM fencelock_outbox WHERE outbox = :outbox AND id IN ({ids})"
PENDING = "SELECT count(*) FROM fencelock_outbox WHERE outbox = :outbox"
MY_IDLE = """SELECT name FROM fencelock_outbox_turn
WHERE outbox = :outbox AND used < UNIX_TIMESTAMP() - :idle LIMIT :limit"""
MY_FORGET = """DELETE FROM fencelock_outbox_turn
WHERE outbox = :outbox AND name = :name AND used < UNIX_TIMESTAMP() - :idle"""


class Message(NamedTuple):
    """What a relay delivers.

    It may come more than once: `id` is always the same for the same message. `token` is the fencing token of the relay: a
    receiver that refuses tokens below the highest it has seen hears nothing from a relay that was replaced.

    >>> Message(1, "order:42", {"event": "paid"}, token=34).key
    'order:42'
    """

    id: int
    key: str
    payload: Json
    token: int


class Unreadable(NamedTuple):
    """What stands for a payload that somebody else has written, and that is no JSON: its key waits, and others go on."""

    why: str


class Outbox:
    """An outbox in the caller's database. Several have nothing to do with each other.

    >>> import sqlite3
    >>> from fencelock.lockfree.relay import Relay
    >>> from fencelock.lockfree.schema import create_tables
    >>> db = sqlite3.connect(":memory:", check_same_thread=False); create_tables(db)
    >>> _ = db.execute("CREATE TABLE paid (id INTEGER)")
    >>> outbox = Outbox("orders")
    >>> with db:                                               # one transaction for both
    ...     _ = db.execute("INSERT INTO paid VALUES (42)")
    ...     outbox.append(db, "order:42", {"event": "paid"})
    >>> with fencelock.connect("memory://outbox") as locks:
    ...     Relay(outbox, lambda: db, lambda message: print(message.key, message.payload), locks).drain()
    order:42 {'event': 'paid'}
    1
    """

    def __init__(self, name: str = "outbox") -> None:
        self.name = check_name(name, "an outbox's name")
        if len(name.encode()) > OUTBOX_MAX_BYTES:
            raise InvalidName(
                f"an outbox's name may have at most {OUTBOX_MAX_BYTES} bytes in UTF-8: {name!r:.40}…", name
            )

    @overload
    def append(self, connection: Blocking, key: str, payload: Json) -> None: ...
    @overload
    def append(self, connection: Awaited, key: str, payload: Json) -> Coroutine[Any, Any, None]: ...

    def append(self, connection: Any, key: str, payload: Json) -> Any:
        """Write a message in the caller's transaction. The messages of a key are delivered in the order of their commits.

        Who appends under the same key waits for this transaction to end; keys that are appended in one transaction should
        come in one order everywhere, as with all locks.

        >>> import sqlite3
        >>> from fencelock.lockfree.schema import create_tables
        >>> with sqlite3.connect(":memory:") as db:
        ...     create_tables(db)
        ...     Outbox().append(db, "order:42", {"event": "paid"})
        """
        to = link(connection)
        check_name(key, "a message's key")
        return run(to, self._append(to, key, written(payload, f"the payload of a message of {key!r}")))

    @overload
    def pending(self, connection: Blocking) -> int: ...
    @overload
    def pending(self, connection: Awaited) -> Coroutine[Any, Any, int]: ...

    def pending(self, connection: Any) -> Any:
        """Return how many messages wait to be delivered: for an alarm when they only become more.

        >>> import sqlite3
        >>> from fencelock.lockfree.schema import create_tables
        >>> db = sqlite3.connect(":memory:"); create_tables(db)
        >>> Outbox().pending(db)
        0
        >>> db.close()
        """
        to = link(connection)
        return run(to, self._pending(to))

    def collect(self, connection: Any, idle: int = IDLE, limit: int = 1000) -> Any:
        """Remove, on MySQL and MariaDB, this outbox's keys that nobody has used for `idle` seconds; return how many.

        There a row for each key keeps the order. Other databases need no such rows: nothing is done. It is part of your
        transaction: commit after each call, also after one that returns 0.

        >>> import sqlite3
        >>> Outbox().collect(sqlite3.connect(":memory:"))
        0
        """
        to = link(connection)
        return run(to, self._collect(to, idle, limit))

    async def _append(self, to: Link, key: str, payload: str) -> None:
        if await to.commits_each():
            raise FencelockError(
                f"a message of {key!r} belongs into the transaction that it is about, and this connection commits each "
                "statement by itself: begin one first, or turn autocommit off",
                key,
            )
        args = {"outbox": self._bytes(to, self.name), "name": self._bytes(to, key), "payload": payload}
        if to.dialect == POSTGRESQL:
            number = sha256(json.dumps(["fencelock.outbox", self.name, key]).encode()).digest()[:8]
            await self._ask(to, PG_APPEND, {**args, "turn": int.from_bytes(number, signed=True)})
            return
        if to.dialect == MYSQL:
            await self._ask(to, MY_TURN, args)
        await self._ask(to, APPEND, args)

    async def _pending(self, to: Link) -> int:
        return int((await self._ask(to, PENDING, {"outbox": self._bytes(to, self.name)})).rows[0][0])

    async def _collect(self, to: Link, idle: int, limit: int) -> int:
        if to.dialect != MYSQL:
            return 0
        # One by one, by the key: a search would lock every row that it passes.
        args = {"outbox": self._bytes(to, self.name), "idle": idle}
        rows = (await self._ask(to, MY_IDLE, {**args, "limit": limit})).rows
        counts = [await self._ask(to, MY_FORGET, {**args, "name": name}) for (name,) in rows]
        return sum(count.touched for count in counts)

    async def next(self, to: Link, token: int, limit: int, but: list[str]) -> list[Message]:
        """Return the messages to deliver next, oldest first, but none of these keys. For the relay."""
        names = {f"but_{number}": self._bytes(to, key) for number, key in enumerate(but)}
        others = f" AND name NOT IN ({', '.join(f':{name}' for name in names)})" if names else ""
        args = {**names, "outbox": self._bytes(to, self.name), "limit": limit}
        rows = (await self._ask(to, NEXT.format(others=others), args)).rows
        return [Message(id_, _text(name), _payload(payload), token) for id_, name, payload in rows]

    async def forget(self, to: Link, ids: list[int]) -> None:
        """Remove what was delivered. For the relay, which has passed the fence in this transaction."""
        named = {f"id_{number}": id_ for number, id_ in enumerate(ids)}
        statement = FORGET.format(ids=", ".join(f":{name}" for name in named))
        await self._ask(to, statement, {**named, "outbox": self._bytes(to, self.name)})

    async def _ask(self, to: Link, statement: str, args: dict[str, Any]) -> Answer:
        try:
            return await to.execute(statement, args)
        except Exception as error:
            explain(error, self.name)
            raise

    @staticmethod
    def _bytes(to: Link, text: str) -> str | bytes:
        return text.encode() if to.dialect == MYSQL else text


def _payload(text: str) -> Json | Unreadable:
    try:
        return json.loads(text)
    except ValueError as error:
        return Unreadable(str(error))


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else bytes(name).decode()
