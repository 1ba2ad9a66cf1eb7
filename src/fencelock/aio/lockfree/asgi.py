"""ASGI middleware for the `Idempotency-Key` header (draft-ietf-httpapi-idempotency-key-header).

A request that is sent again with its key gets the response of the first one, and does not reach the application.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from hashlib import sha256
from typing import Any, NamedTuple

from fencelock.aio.asgi import App, Disconnected, Receive, Response, Scope, Send, call_app, problem, read_body
from fencelock.aio.lockfree.idempotency import IdempotencyKey, ResultTooLarge, Run
from fencelock.errors import FencelockError, InvalidType, KeyInProgress, KeyReused
from fencelock.lockfree.idempotency import DAY
from fencelock.lockfree.idempotency_records import client_of, is_client
from fencelock.lockfree.idempotency_sql import is_stored
from fencelock.sqlio import adapt

HEADER = b"idempotency-key"
KEY_MAX = 255
TRY_LATER = frozenset({408, 425, 429})
"""Statuses that depend on the time and not on the request: timeout, too early, too many requests."""
DRAFT = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"


class _RollBack(Exception):
    """The application responded with an error: store nothing, and roll back."""


class IdempotencyMiddleware:
    """Responds to a repeated request with the same `Idempotency-Key` with the response of the first one.

    `store`: a function that gives a connection of asyncio inside a transaction and commits at its end, such as
    `pool.connection` of psycopg's AsyncConnectionPool or `engine.begin` (not `engine.connect`) of SQLAlchemy's
    AsyncEngine; or a client of `fencelock.aio.connect`, which stores the key with a lock and a record. The middleware
    notices a store that does not commit at the first response to be stored, and does not send that response. The
    application finds the connection in `scope["state"]["idempotency"].connection`: what it writes there is committed
    together with its response. What it writes elsewhere is not: if the process dies between the two, the request is
    executed again.

    `caller`: returns the user or tenant of a request, from its scope. Keys of different callers are independent;
    otherwise one caller could read another's response by guessing its key.

    `methods`: the requests that have a key. `required`: whether a request without it is refused (400). 409: the first
    request is still in progress. 422: the key was used for another request. Responses from 500 on, and 408, 425 and 429,
    are not stored: a repetition is executed.

    `body_max`: the largest request body in bytes; a larger one is refused (413). The middleware reads it into memory
    before it calls the application. A response may have any size with a connection as the store. With a client, one above
    about 190 KiB is sent but not stored, and a repetition gets 410.

    The middleware buffers a response until it is complete, then commits it, and only then sends it. It does not support
    endless responses. What the application does afterwards, such as Starlette's background tasks, runs after that,
    outside the transaction, and not at all if the commit fails. The application does not see that its client has
    disconnected: the client will ask for the response again.

    >>> async def app(scope, receive, send):
    ...     print("charging", (await receive())["body"])
    ...     await send({"type": "http.response.start", "status": 201, "headers": []})
    ...     await send({"type": "http.response.body", "body": b"charged"})
    >>> async def post(app, body):
    ...     scope = {"type": "http", "method": "POST", "path": "/pay", "headers": [(b"idempotency-key", b'"7f3a"')]}
    ...     async def receive(): return {"type": "http.request", "body": body}
    ...     async def send(message): print(message.get("status", message.get("body")))
    ...     await app(scope, receive, send)
    >>> async def main():
    ...     async with fencelock.aio.connect("memory://asgi") as locks:
    ...         safe = IdempotencyMiddleware(app, locks, caller=lambda scope: "me")
    ...         await post(safe, b"10")
    ...         await post(safe, b"10")
    >>> import asyncio, fencelock.aio
    >>> asyncio.run(main())
    charging b'10'
    201
    b'charged'
    201
    b'charged'
    """

    def __init__(
        self,
        app: App,
        store: Any,
        *,
        caller: Callable[[Scope], str],
        methods: Iterable[str] = ("POST", "PATCH"),
        required: bool = True,
        ttl: float = DAY,
        body_max: int = 1024 * 1024,
    ) -> None:
        if not callable(store) and not is_client(store):
            raise InvalidType(
                "store must be a client of fencelock.aio.connect, or a function that gives a connection in a transaction, "
                f"such as engine.begin or pool.connection, not {type(store).__name__}"
            )
        if is_client(store):
            client_of(store, awaited=True)  # refuses one of fencelock.connect
        self._app = app
        self._store = store
        self._commits = False  # until the first stored response was found again
        self._caller = caller
        if isinstance(methods, str):
            raise InvalidType(f"methods are a list, as in [{methods!r}], not one str")
        self._methods = frozenset(method.upper() for method in methods)
        self._required = required
        self._ttl = ttl
        self._body_max = body_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        if scope["type"] != "http" or scope["method"].upper() not in self._methods:
            return await self._app(scope, receive, send)
        sent = [value for name, value in scope["headers"] if name.lower() == HEADER]
        if not sent and not self._required:
            return await self._app(scope, receive, send)
        try:
            response = await self._answer(scope, receive, send, sent)
        except Disconnected:
            return None
        return None if response is None else await response.send(send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, sent: list[bytes]) -> Response | None:
        """Return the response to a request that must not reach the application; let the application respond to any other."""
        key = _key_of(sent)
        if key is None:
            title = "Idempotency-Key is missing" if not sent else "Idempotency-Key is not valid"
            detail = (
                f'Send one Idempotency-Key of at most {KEY_MAX} characters, a string such as "8e03978e-40d5-43e8-bc93".'
            )
            return _problem(400, title, detail)
        body = await read_body(receive, self._body_max)
        if body is None:
            return _problem(413, "Content Too Large", f"A request with a key may have at most {self._body_max} bytes.")
        request = json.dumps([scope["method"], scope["path"], scope.get("query_string", b"").decode("latin-1")])
        name = f"http:{sha256(self._caller(scope).encode()).hexdigest()[:32]}:{key}"
        payload = request.encode() + b"\n" + body
        entered = False
        try:
            async with AsyncExitStack() as transaction:
                connection = None if is_client(self._store) else await transaction.enter_async_context(self._store())
                where = self._store if connection is None else connection
                key_block = IdempotencyKey(where, name, payload=payload, ttl=self._ttl, wait=False)
                run = await transaction.enter_async_context(key_block)
                entered = True
                if run.replayed:
                    return _replay(run)

                async def commit_and_respond(response: Response) -> None:
                    try:
                        async with transaction.pop_all():
                            if response.status >= 500 or response.status in TRY_LATER:
                                raise _RollBack
                            run.result = response.to_json()
                    except _RollBack:
                        pass
                    else:
                        if connection is not None and not self._commits:
                            await self._check_stored(name)
                    await response.send(send)

                state = {**scope.get("state", {}), "idempotency": Work(run, connection)}
                # No extensions: a response in another form, such as the path of a file, could not be stored.
                inner = {**scope, "state": state, "extensions": {}}
                await call_app(self._app, inner, body, commit_and_respond, send)
        except (KeyInProgress, KeyReused) as error:
            if entered:  # the application's own, of another key
                raise
            return _refusal(error)
        return None

    async def _check_stored(self, name: str) -> None:
        """Raise unless the first response is stored. This comes before it is sent, as otherwise nothing was committed."""
        async with self._store() as connection:
            self._commits = await is_stored(adapt(connection, "lockfree", awaited=True), name)
        if not self._commits:
            raise FencelockError(
                f"the request {name!r} was not stored: the store of IdempotencyMiddleware rolled back instead of committing. "
                "Use one that commits, such as engine.begin (not engine.connect), "
                "async_sessionmaker(engine).begin (not async_sessionmaker(engine)), or psycopg's pool.connection",
                name,
            )


class Work(NamedTuple):
    """The value of `scope["state"]["idempotency"]`, for the application."""

    run: Run
    connection: Any
    """In the transaction that stores the response; None if a lock and a record store it.

    The transaction ends with the response: background tasks need a connection of their own.
    """


def _problem(status: int, title: str, detail: str) -> Response:
    body = json.dumps({"type": DRAFT, "title": title, "status": status, "detail": detail})
    return problem(body.encode(), status)


def _refusal(error: KeyInProgress | KeyReused) -> Response:
    if isinstance(error, KeyReused):
        detail = "This Idempotency-Key was used for another request. Use a new one for a new request."
        return _problem(422, "Idempotency-Key is already used", detail)
    detail = "A request with the same Idempotency-Key is in progress. Send it again in a while."
    response = _problem(409, "A request is outstanding for this Idempotency-Key", detail)
    response.headers.append((b"retry-after", b"1"))
    return response


def _replay(run: Run) -> Response:
    """Return the stored response of an earlier request."""
    try:
        response = Response.from_json(run.result)
    except ResultTooLarge:
        detail = (
            "This request was executed before. Its response was too large to be stored. Do not send the request again "
            "under a new key: read what it has changed."
        )
        return _problem(410, "The response was not stored", detail)
    response.headers.append((b"idempotent-replayed", b"true"))
    return response


def _key_of(sent: list[bytes]) -> str | None:
    """Return the key: a quoted string, as in the draft, or unquoted, as many clients send it. None: it is malformed.

    >>> _key_of([b'"a key"']), _key_of([b"8e03978e"]), _key_of([b'"a']), _key_of([b""]), _key_of([b"a", b"b"])
    ('a key', '8e03978e', None, None, None)
    """
    if len(sent) != 1 or not sent[0].isascii():
        return None
    text = sent[0].decode().strip(" \t")
    if text.startswith('"'):
        inner = text[1:-1]
        bare = inner.replace("\\\\", "").replace('\\"', "")
        if len(text) < 2 or not text.endswith('"') or '"' in bare or "\\" in bare:
            return None
        text = inner.replace('\\"', '"').replace("\\\\", "\\")
    elif not all(character.isalnum() or character in "!#$%&'*+-.^_`|~:/=" for character in text):
        return None
    return text if text.isprintable() and 1 <= len(text) <= KEY_MAX else None
