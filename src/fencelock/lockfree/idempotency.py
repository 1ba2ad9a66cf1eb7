"""Idempotency keys: a request that is sent again is not carried out again, and gets the answer of the first time.

With a connection, claim and result are part of the caller's own transaction: either the business write and the result
are there, or neither. With a client of fencelock's (Redis, etcd, …) a lock and a fenced record do what they can without one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from hashlib import sha256
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from fencelock.core.validation import LONGEST, check_name
from fencelock.errors import FencelockError, InvalidArgument, InvalidName, InvalidType, KeyInProgress, KeyReused
from fencelock.lockfree import idempotency_sql
from fencelock.lockfree.canonical import Json, canonical, written
from fencelock.lockfree.colour import check_colour
from fencelock.lockfree.idempotency_sql import Done, SqlStore
from fencelock.primitives.locked import name_template
from fencelock.runtime.blocking import run_sync
from fencelock.sqlio import Awaited, Blocking, link, run

__all__ = [
    "Idempotent",
    "KeyInProgress",
    "KeyReused",
    "ResultTooLarge",
    "Run",
    "collect",
    "idempotent",
    "idempotent_by",
]

DAY = 86400.0
KEY_MAX_BYTES = 1000
"""A little less than a name may have: some keep a key under a prefix."""

P = ParamSpec("P")
T = TypeVar("T")


class ResultTooLarge(FencelockError):
    """The work of this key was done, but its result was too large to be stored: there is nothing to return.

    Do not do the work again. Only a lock client as the store has this limit: 256 KiB.
    """


class Store(Protocol):
    """Where one key is kept."""

    awaited: bool

    async def claim(self, fingerprint: str, ttl: float, patience: float | None) -> Done | None: ...
    async def finish(self, result: str, ttl: float) -> None: ...
    async def leave(self, error: BaseException | None) -> None: ...


class Run:
    """One run under a key: the first, which does the work, or a repetition, which finds its result.

    >>> import sqlite3
    >>> from fencelock.lockfree.schema import create_tables
    >>> db = sqlite3.connect(":memory:"); create_tables(db)
    >>> with db, idempotent(db, "7f3a") as run:
    ...     run.result = [1, 2]
    >>> with db, idempotent(db, "7f3a") as run:
    ...     pass
    >>> run.repeated, run.result
    (True, [1, 2])
    >>> db.close()
    """

    __slots__ = ("_kept", "_result", "_too_large", "key", "repeated")

    def __init__(self, key: str, done: Done | None) -> None:
        self.key = key
        """The key."""
        self.repeated = done is not None
        """Whether it was done before: then there is nothing to do but to take the result."""
        self._kept = None if done is None else done.result  # as JSON, read when somebody asks
        self._too_large = done is not None and done.result is None
        self._result: Json = None

    @property
    def result(self) -> Json:
        """What JSON can carry: set it in the first run; in a repetition it is what the first one set.

        After the block it is as JSON carries it, also the first time: a tuple is a list, and keys are texts. In a repetition
        it raises ResultTooLarge if the store could not take it.
        """
        if self._too_large:
            raise ResultTooLarge(
                f"{self.key!r} was done before, and its result was too large to be stored: do not do it again, but look up "
                "what it has written. Let the first run store large results elsewhere, and its result say where",
                self.key,
            )
        if self._kept is not None:
            self._result, self._kept = json.loads(self._kept), None
        return self._result

    @result.setter
    def result(self, value: Json) -> None:
        if self.repeated:
            raise FencelockError(
                f"{self.key!r} was done before, and this block has done it again: ask `if not run.repeated:` first. Roll "
                "back",
                self.key,
            )
        self._result = value

    def __repr__(self) -> str:
        return f"<Run {self.key!r} {'repeated' if self.repeated else 'first'}>"


class Idempotent:
    """What `idempotent` returns: for `with`, or for `async with`, as the connection is."""

    __slots__ = ("_connection", "_fingerprint", "_key", "_patience", "_run", "_store", "_ttl")

    def __init__(self, connection: Any, key: str, payload: Json | bytes, ttl: float, wait: bool | float) -> None:
        self._connection = connection
        self._key = _checked(key)
        self._fingerprint = fingerprint(payload)
        self._ttl = _seconds(ttl, "ttl", at_least=1)
        self._patience = None if wait is True else _seconds(wait, "wait", at_least=0)
        self._store: Store | None = None
        self._run: Run | None = None

    def __enter__(self) -> Run:
        return run_sync(self._begin(self._open(awaited=False)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._store is not None
        run_sync(self._end(self._store, error))

    async def __aenter__(self) -> Run:
        return await self._begin(self._open(awaited=True))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._store is not None
        await self._end(self._store, error)

    def _open(self, *, awaited: bool) -> Store:
        from fencelock.lockfree.idempotency_locks import LockStore, is_client

        if is_client(self._connection):
            store: Store = LockStore(self._connection, self._key)
        else:
            store = SqlStore(link(self._connection), self._key)
        check_colour(self._connection, awaited=store.awaited, asked=awaited)
        self._store = store
        return store

    async def _begin(self, store: Store) -> Run:
        try:
            done = await store.claim(self._fingerprint, self._ttl, self._patience)
            if done is not None and done.fingerprint != self._fingerprint:
                raise KeyReused(
                    f"{self._key!r} was used before, with another payload: use a new key for what is a new request",
                    self._key,
                )
            self._run = Run(self._key, done)
        except BaseException as error:
            await store.leave(error)
            raise
        return self._run

    async def _end(self, store: Store, error: BaseException | None) -> None:
        try:
            if error is None and self._run is not None and not self._run.repeated:
                result = written(self._run.result, f"the result of {self._key!r}")
                await store.finish(result, self._ttl)
                self._run._kept = result
        except BaseException as failure:
            error = failure
            raise
        finally:
            await store.leave(error)


def idempotent(
    connection: Any, key: str, *, payload: Json | bytes = None, ttl: float = DAY, wait: bool | float = True
) -> Idempotent:
    """Return a block that is the only one to do the work of a key; `with` or `async with`, as the connection is.

    `connection`: yours, in a transaction that you commit; or a client of `fencelock.connect`, for work that no transaction
    holds. `payload`: what was asked for; a key that comes with another one is refused (KeyReused). `ttl`: seconds for which
    the result is kept. `wait`: for somebody else who is at it, for ever, for so many seconds, or (False) not at all:
    KeyInProgress. On SQLite, where one transaction at a time writes whatever it is about, False waits as long as the
    connection's own timeout says.

    With a client a result may have 256 KiB. The first run ends as usual if its result is larger, and a repetition raises
    ResultTooLarge when it reads `result`; the work is not done again.

    If the block ends with an error, roll back, as ever: there is no result then, and the next one does the work.

    >>> import sqlite3
    >>> from fencelock.lockfree.schema import create_tables
    >>> db = sqlite3.connect(":memory:"); create_tables(db)
    >>> charged = []
    >>> def pay(key, amount):
    ...     with db, idempotent(db, key, payload={"amount": amount}) as run:     # `with db` commits
    ...         if not run.repeated:
    ...             charged.append(amount)
    ...             run.result = {"charged": amount}
    ...     return run.result
    >>> pay("7f3a", 10), pay("7f3a", 10), charged
    ({'charged': 10}, {'charged': 10}, [10])
    >>> pay("7f3a", 99)
    Traceback (most recent call last):
    fencelock.errors.KeyReused: '7f3a' was used before, with another payload: use a new key for what is a new request
    >>> db.close()
    """
    return Idempotent(connection, key, payload, ttl, wait)


def idempotent_by(
    key: str,
    *,
    connection: str = "connection",
    payload: Callable[..., Json | bytes] | None = None,
    ttl: float = DAY,
    wait: bool | float = True,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator, for `def` and `async def` alike: a call that was made before returns what it returned then.

    `{argument}` in the key stands for the call's argument. The argument called `connection` says where the key is kept; all
    others are the payload, and have to be something that JSON can carry; but not the `self` or `cls` of a method: what tells
    objects apart belongs into the key, as in "pay:{self.shop}:{order}". `payload`, called with the same arguments, says what
    it is instead: for a Decimal or a model, or to leave out what makes no difference. What is returned comes back as JSON
    carries it, also the first time: a tuple is a list.

    >>> import sqlite3
    >>> from decimal import Decimal
    >>> from fencelock.lockfree.schema import create_tables
    >>> db = sqlite3.connect(":memory:"); create_tables(db)
    >>> @idempotent_by("pay:{order}")
    ... def pay(connection, order, amount):
    ...     print("charging", amount)
    ...     return {"charged": amount}
    >>> with db:
    ...     pay(db, 42, 10)
    ...     pay(db, 42, amount=10)
    charging 10
    {'charged': 10}
    {'charged': 10}
    >>> @idempotent_by("pay:{order}", payload=lambda connection, order, amount, mailer: str(amount))
    ... def pay_and_tell(connection, order, amount, mailer):
    ...     return {"charged": str(amount)}
    >>> with db:
    ...     pay_and_tell(db, 43, Decimal("9.99"), print)
    {'charged': '9.99'}
    >>> db.close()
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        awaited = inspect.iscoroutinefunction(function)
        key_of = name_template(key, function, awaited=awaited)
        signature = inspect.signature(function)
        if connection not in signature.parameters:
            raise InvalidType(f"{function.__qualname__} has no argument {connection!r}: say which one, by connection=…")
        # The object of a method is no part of what was asked for, and JSON could not carry it.
        apart = {connection, *({"self", "cls"} & {next(iter(signature.parameters))})}

        def block(args: Any, kwargs: Any) -> Idempotent:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            where, name = bound.arguments[connection], key_of(*args, **kwargs)
            if payload is not None:
                return idempotent(where, name, payload=payload(*args, **kwargs), ttl=ttl, wait=wait)
            asked = {name: value for name, value in bound.arguments.items() if name not in apart}
            try:
                return idempotent(where, name, payload=asked, ttl=ttl, wait=wait)
            except TypeError as error:
                raise InvalidType(
                    f"the payload of {name!r} is what {function.__qualname__} was called with, and {error}: say what it is "
                    "instead, by payload=lambda …, which is called with the same arguments"
                ) from error

        if awaited:

            @wraps(function)
            async def acall(*args: P.args, **kwargs: P.kwargs) -> Any:
                async with block(args, kwargs) as run:
                    if not run.repeated:
                        run.result = await cast(Awaitable[Any], function(*args, **kwargs))
                return run.result

            return cast(Callable[P, T], acall)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with block(args, kwargs) as run:
                if not run.repeated:
                    run.result = function(*args, **kwargs)
            return cast(T, run.result)

        return call

    return decorate


@overload
def collect(connection: Blocking, limit: int = 1000) -> int:
    """Do it on a connection that blocks."""


@overload
def collect(connection: Awaited, limit: int = 1000) -> Coroutine[Any, Any, int]:
    """Do it on a connection of asyncio's, to be awaited."""


def collect(connection: Any, limit: int = 1000) -> Any:
    """Remove results whose time is over, `limit` at most, in the caller's transaction; return how many.

    Commit after each call, also after one that returns 0: it began a transaction as well, and on SQLite an open one keeps
    everybody else from writing.

    >>> import sqlite3
    >>> from fencelock.lockfree.schema import create_tables
    >>> db = sqlite3.connect(":memory:"); create_tables(db)
    >>> while True:
    ...     removed = collect(db)
    ...     db.commit()
    ...     if not removed:
    ...         break
    >>> db.close()
    """
    to = link(connection)
    return run(to, idempotency_sql.collect(to, limit))


def fingerprint(payload: Json | bytes) -> str:
    """Return what tells payloads apart: equal JSON has an equal fingerprint, in whatever order its keys stand.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    True
    """
    return sha256(b"bytes:" + payload if isinstance(payload, bytes) else _bytes(payload)).hexdigest()


def _bytes(payload: Json) -> bytes:
    return canonical(payload).encode(errors="surrogatepass")  # JSON can carry half a pair


def _checked(key: str) -> str:
    check_name(key, "an idempotency key")
    if len(key.encode()) > KEY_MAX_BYTES:
        raise InvalidName(f"an idempotency key may have at most {KEY_MAX_BYTES} bytes in UTF-8: {key!r:.40}…", key)
    return key


def _seconds(value: object, what: str, *, at_least: int) -> float:
    if value is False and at_least == 0:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not at_least <= value <= LONGEST:
        raise InvalidArgument(
            f"{what} must be {at_least} or more seconds, and {LONGEST:.0f} at most, not {value!r:.40}"
        )
    return float(value)
