"""Idempotency keys: a request that is sent again is not executed again, and gets the result of the first time.

With a connection, claim and result are part of the caller's own transaction: the business write and the result are both
stored, or neither is. With a client of fencelock (Redis, etcd, …) a lock and a fenced record come as close as possible
without one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from hashlib import sha256
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from fencelock.core.validation import MAX_SECONDS, check_name
from fencelock.errors import FencelockError, InvalidArgument, InvalidName, InvalidType, KeyInProgress, KeyReused
from fencelock.lockfree.canonical import Json, canonical, to_json
from fencelock.lockfree.idempotency_sql import Done, SqlStore, prune_expired
from fencelock.primitives.locked import name_template
from fencelock.runtime.blocking import run_sync
from fencelock.runtime.both_apis import Api, BlockingApi
from fencelock.sqlio import BlockingConnection, adapt

__all__ = ["IdempotencyKey", "KeyInProgress", "KeyReused", "ResultTooLarge", "Run", "idempotent", "prune"]

DAY = 86400.0
KEY_MAX_BYTES = 1000
"""Less than the limit of names, as some stores add a prefix to a key."""

P = ParamSpec("P")
T = TypeVar("T")


class ResultTooLarge(FencelockError):
    """The work of this key was done, but its result was too large to be stored, so there is nothing to return.

    Do not do the work again. Only a lock client as the store has this limit: 256 KiB.
    """


class Store(Protocol):
    """Stores one key."""

    async def claim(self, fingerprint: str, ttl: float, timeout: float | None) -> Done | None: ...
    async def finish(self, result: str, ttl: float) -> None: ...
    async def leave(self, error: BaseException | None) -> None: ...


class Run:
    """One run under a key: the first one, which does the work, or a replay, which gets its result.

    >>> import sqlite3
    >>> from fencelock.lockfree.schema import create_tables
    >>> db = sqlite3.connect(":memory:"); create_tables(db)
    >>> with db, IdempotencyKey(db, "7f3a") as run:
    ...     run.result = [1, 2]
    >>> with db, IdempotencyKey(db, "7f3a") as run:
    ...     pass
    >>> run.replayed, run.result
    (True, [1, 2])
    >>> db.close()
    """

    __slots__ = ("_result", "_too_large", "key", "replayed")

    def __init__(self, key: str, done: Done | None) -> None:
        self.key = key
        """The key."""
        self.replayed = done is not None
        """Whether an earlier run has done the work: then only the result is needed."""
        self._too_large = done is not None and done.result is None
        self._result: Json = None if done is None or done.result is None else json.loads(done.result)

    @property
    def result(self) -> Json:
        """A value that JSON can represent: set it in the first run; a replay returns it.

        After the block it has gone through JSON, also in the first run: a tuple is a list, and keys are strings. In a replay
        it raises ResultTooLarge if the store could not take it.
        """
        if self._too_large:
            raise ResultTooLarge(
                f"{self.key!r} was done before, and its result was too large to be stored: do not do it again, but read what "
                "it has written. Let the first run store large results elsewhere, and return their place",
                self.key,
            )
        return self._result

    @result.setter
    def result(self, value: Json) -> None:
        if self.replayed:
            raise FencelockError(
                f"{self.key!r} was done before, and this block has repeated it: test `if not run.replayed:` first. Roll back",
                self.key,
            )
        self._result = value

    def __repr__(self) -> str:
        return f"<Run {self.key!r} {'replayed' if self.replayed else 'first'}>"


class BaseIdempotencyKey(Api):
    """What both APIs share."""

    def __init__(
        self, connection: Any, key: str, *, payload: Json | bytes = None, ttl: float = DAY, wait: bool | float = True
    ) -> None:
        self._connection = connection
        self._key = _check_key(key)
        self._fingerprint = fingerprint(payload)
        self._ttl = _check_seconds(ttl, "ttl", at_least=1)
        self._timeout = None if wait is True else _check_seconds(wait, "wait", at_least=0)
        self._store: Store | None = None
        self._run: Run | None = None

    async def _begin(self) -> Run:
        from fencelock.lockfree.idempotency_records import LockStore, is_client

        if is_client(self._connection):
            store: Store = LockStore(self._connection, self._key, awaited=self._awaited)
        else:
            adapter = adapt(self._connection, "lockfree", awaited=self._awaited)
            store = SqlStore(adapter, self._key, self._runtime())
        self._store = store
        try:
            done = await store.claim(self._fingerprint, self._ttl, self._timeout)
            if done is not None and done.fingerprint != self._fingerprint:
                raise KeyReused(
                    f"{self._key!r} was used before, with another payload: use a new key for a new request", self._key
                )
            self._run = Run(self._key, done)
        except BaseException as error:
            await store.leave(error)
            raise
        return self._run

    async def _end(self, error: BaseException | None) -> None:
        assert self._store is not None
        try:
            if error is None and self._run is not None and not self._run.replayed:
                result = to_json(self._run.result, f"the result of {self._key!r}")
                await self._store.finish(result, self._ttl)
                self._run._result = json.loads(result)
        except BaseException as failure:
            error = failure
            raise
        finally:
            await self._store.leave(error)


class IdempotencyKey(BaseIdempotencyKey, BlockingApi):
    """A `with` block that does the work of a key once, in all processes.

    `connection`: yours, in a transaction that you commit; or a client of `fencelock.connect`, for work outside a
    transaction. `payload`: what was requested; the same key with another payload is refused (KeyReused). `ttl`: seconds
    for which the result is stored. `wait`: for another run that is in progress, without limit, for so many seconds, or
    (False) not at all: KeyInProgress. On SQLite, where only one transaction at a time writes, False waits for the
    connection's own timeout.

    With a client a result may have 256 KiB. The first run ends as usual if its result is larger, and a replay raises
    ResultTooLarge when it reads `result`; the work is not done again.

    If the block raises, roll back: no result is stored, and the next run does the work.

    >>> import sqlite3
    >>> from fencelock.lockfree.schema import create_tables
    >>> db = sqlite3.connect(":memory:"); create_tables(db)
    >>> charged = []
    >>> def pay(key, amount):
    ...     with db, IdempotencyKey(db, key, payload={"amount": amount}) as run:     # `with db` commits
    ...         if not run.replayed:
    ...             charged.append(amount)
    ...             run.result = {"charged": amount}
    ...     return run.result
    >>> pay("7f3a", 10), pay("7f3a", 10), charged
    ({'charged': 10}, {'charged': 10}, [10])
    >>> pay("7f3a", 99)
    Traceback (most recent call last):
    fencelock.errors.KeyReused: '7f3a' was used before, with another payload: use a new key for a new request
    >>> db.close()
    """

    def __enter__(self) -> Run:
        return run_sync(self._begin())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        run_sync(self._end(error))


def idempotent(
    key: str,
    *,
    connection: str = "connection",
    payload: Callable[..., Json | bytes] | None = None,
    ttl: float = DAY,
    wait: bool | float = True,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: a repeated call returns the result of the first one.

    `{argument}` in the key stands for the call's argument. The argument called `connection` is where the key is stored.
    The other arguments are the payload, and must be values that JSON can represent. The `self` or `cls` of a method is
    not part of it: what distinguishes objects belongs into the key, as in "pay:{self.shop}:{order}". `payload`, called
    with the same arguments, returns another payload: for a Decimal or a model, or to leave out arguments that make no
    difference. The result goes through JSON, also the first time: a tuple becomes a list.

    >>> import sqlite3
    >>> from decimal import Decimal
    >>> from fencelock.lockfree.schema import create_tables
    >>> db = sqlite3.connect(":memory:"); create_tables(db)
    >>> @idempotent("pay:{order}")
    ... def pay(connection, order, amount):
    ...     print("charging", amount)
    ...     return {"charged": amount}
    >>> with db:
    ...     pay(db, 42, 10)
    ...     pay(db, 42, amount=10)
    charging 10
    {'charged': 10}
    {'charged': 10}
    >>> @idempotent("pay:{order}", payload=lambda connection, order, amount, mailer: str(amount))
    ... def pay_and_mail(connection, order, amount, mailer):
    ...     return {"charged": str(amount)}
    >>> with db:
    ...     pay_and_mail(db, 43, Decimal("9.99"), print)
    {'charged': '9.99'}
    >>> db.close()
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        arguments_of = key_arguments(function, key, connection, payload, awaited=False)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            store, name, asked = arguments_of(args, kwargs)
            with IdempotencyKey(store, name, payload=asked, ttl=ttl, wait=wait) as run:
                if not run.replayed:
                    run.result = function(*args, **kwargs)
            return cast(T, run.result)

        return call

    return decorate


def key_arguments(
    function: Callable[..., Any],
    key: str,
    connection: str,
    payload: Callable[..., Json | bytes] | None,
    *,
    awaited: bool,
) -> Callable[[Any, Any], tuple[Any, str, Json | bytes]]:
    """Return a function that takes the arguments of a decorated call, and returns its connection, key and payload."""
    key_of = name_template(key, function, awaited=awaited)
    signature = inspect.signature(function)
    if connection not in signature.parameters:
        raise InvalidType(
            f"{function.__qualname__} has no argument {connection!r}: name the right one with connection=…"
        )
    # The object of a method is not part of the request, and JSON could not represent it.
    left_out = {connection, *({"self", "cls"} & {next(iter(signature.parameters))})}

    def arguments_of(args: Any, kwargs: Any) -> tuple[Any, str, Json | bytes]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        store, name = bound.arguments[connection], key_of(*args, **kwargs)
        if payload is not None:
            return store, name, payload(*args, **kwargs)
        asked = {name: value for name, value in bound.arguments.items() if name not in left_out}
        try:
            canonical(asked)
        except TypeError as error:
            raise InvalidType(
                f"the payload of {name!r} is the arguments of {function.__qualname__}, and {error}: pass payload=lambda …, "
                "which is called with the same arguments, and returns another payload"
            ) from error
        return store, name, asked

    return arguments_of


def prune(connection: BlockingConnection, limit: int = 1000) -> int:
    """Remove at most `limit` expired results, in the caller's transaction; return their number.

    Commit after each call, also if it returns 0: it has begun a transaction, and on SQLite an open one blocks other writers.

    >>> import sqlite3
    >>> from fencelock.lockfree.schema import create_tables
    >>> db = sqlite3.connect(":memory:"); create_tables(db)
    >>> while True:
    ...     removed = prune(db)
    ...     db.commit()
    ...     if not removed:
    ...         break
    >>> db.close()
    """
    return run_sync(prune_expired(adapt(connection, "lockfree", awaited=False), limit))


def fingerprint(payload: Json | bytes) -> str:
    """Return a hash of a payload: equal JSON has the same hash, whatever the order of its keys.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    True
    """
    if isinstance(payload, bytes):
        return sha256(b"bytes:" + payload).hexdigest()
    return sha256(canonical(payload).encode(errors="surrogatepass")).hexdigest()  # JSON allows lone surrogates


def _check_key(key: str) -> str:
    check_name(key, "an idempotency key")
    if len(key.encode()) > KEY_MAX_BYTES:
        raise InvalidName(f"an idempotency key may have at most {KEY_MAX_BYTES} bytes in UTF-8: {key!r:.40}…", key)
    return key


def _check_seconds(value: object, what: str, *, at_least: int) -> float:
    if value is False and at_least == 0:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not at_least <= value <= MAX_SECONDS:
        raise InvalidArgument(
            f"{what} must be {at_least} or more seconds, and {MAX_SECONDS:.0f} at most, not {value!r:.40}"
        )
    return float(value)
