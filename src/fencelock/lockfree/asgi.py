"""ASGI middleware for the `Idempotency-Key` header, as draft-ietf-httpapi-idempotency-key-header has it.

A request that is sent again under its key gets the first one's response, and the application does not see it.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from hashlib import sha256
from typing import Any, NamedTuple

from fencelock.errors import FencelockError, InvalidType, KeyInProgress, KeyReused
from fencelock.lockfree.colour import world_of
from fencelock.lockfree.idempotency import DAY, ResultTooLarge, Run, idempotent
from fencelock.lockfree.idempotency_locks import is_client
from fencelock.lockfree.idempotency_sql import kept
from fencelock.sqlio import link

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Store = Callable[[], AbstractAsyncContextManager[Any]]

HEADER = b"idempotency-key"
KEY_MAX = 255
LATER = frozenset({408, 425, 429})
"""Responses that are about the moment and not about the request: timeout, too early, too many."""
DRAFT = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"


class Response(NamedTuple):
    """A whole response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def to_json(self) -> Any:
        """Return it as a result can carry it."""
        headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers]
        return {"status": self.status, "headers": headers, "body": b64encode(self.body).decode()}

    @classmethod
    def from_json(cls, form: Any) -> Response:
        """Return what `to_json` gave."""
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in form["headers"]]
        return cls(form["status"], headers, b64decode(form["body"]))

    async def send(self, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


class _RollBack(Exception):
    """The application answered with an error of its own: nothing of it is to be kept."""


class _Gone(Exception):
    """The client has left before its request was complete."""


class IdempotencyMiddleware:
    """Answers a request that was answered before under the same `Idempotency-Key` with the same response.

    `store`: what gives a connection inside a transaction and commits when it ends, for example `pool.connection` of psycopg's
    AsyncConnectionPool or `engine.begin` (not `engine.connect`) of SQLAlchemy's AsyncEngine; or a client of
    `fencelock.aio.connect`, which keeps the key by a lock and a record. One that does not commit is noticed at the first
    response that is to be kept, which is then not sent. The application finds the connection in
    `scope["state"]["idempotency"].connection`: what it writes over that is committed together with its response. What it
    writes elsewhere is not: if the process dies between the two, the request is carried out again.

    `caller`: tells who sends the request (a user, a tenant), from its scope. Keys of different callers have nothing to do
    with each other; without that one could read another's response by guessing its key.

    `methods`: which requests have a key. `required`: whether one without it is refused (400). 409: the first one is still
    being worked on. 422: the key was used for something else. Responses from 500 on, and those that say to come back later
    (408, 425, 429), are not kept: a repetition is carried out.

    `body_max`: bytes that a request may have; a larger one is refused (413). It is read into memory before the application
    is called. A response may have any size with a connection as the store. With a client, one above about 190 KiB is sent
    but not stored, and a repetition gets 410.

    A response is held back until it is complete: then it is committed, and only then sent. One that never ends has no place
    here. What the application does afterwards, such as Starlette's background tasks, it does after that, outside the
    transaction, and not at all if the commit fails. That its client has left is not told to the application: the client will
    ask for the response again.

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
        self._app = app
        self._store = store
        self._commits = False  # until it was seen
        self._caller = caller
        if isinstance(methods, str):
            raise InvalidType(f"methods are several, as in [{methods!r}]: the letters of one would let everything pass")
        self._methods = frozenset(method.upper() for method in methods)
        self._required = required
        self._ttl = ttl
        self._body_max = body_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["method"].upper() not in self._methods:
            return await self._app(scope, receive, send)
        sent = [value for name, value in scope["headers"] if name.lower() == HEADER]
        if not sent and not self._required:
            return await self._app(scope, receive, send)
        responding = False

        async def tracked(message: Message) -> None:
            nonlocal responding
            responding = True
            await send(message)

        try:
            response = await self._answer(scope, receive, tracked, sent)
        except _Gone:
            return None
        except (KeyInProgress, KeyReused) as error:
            if responding:  # the error is of something that the application does after its response
                raise
            response = _refusal(error)
        return None if response is None else await response.send(send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, sent: list[bytes]) -> Response | None:
        """Return the response to a request that the application does not see; have the application answer any other."""
        key = _key_of(sent)
        if key is None:
            title = "Idempotency-Key is missing" if not sent else "Idempotency-Key is not valid"
            detail = (
                f'Send one Idempotency-Key of at most {KEY_MAX} characters, a string such as "8e03978e-40d5-43e8-bc93".'
            )
            return problem(400, title, detail)
        body = await _body(receive, self._body_max)
        if body is None:
            return problem(413, "Content Too Large", f"A request with a key may have at most {self._body_max} bytes.")
        request = json.dumps([scope["method"], scope["path"], scope.get("query_string", b"").decode("latin-1")])
        name = f"http:{sha256(self._caller(scope).encode()).hexdigest()[:32]}:{key}"
        payload = request.encode() + b"\n" + body
        async with AsyncExitStack() as transaction:
            connection = None if is_client(self._store) else await transaction.enter_async_context(self._store())
            where = self._store if connection is None else connection
            run = await transaction.enter_async_context(
                idempotent(where, name, payload=payload, ttl=self._ttl, wait=False)
            )
            if run.repeated:
                return _replay(run)

            async def commit_and_respond(response: Response) -> None:
                try:
                    async with transaction.pop_all():
                        if response.status >= 500 or response.status in LATER:
                            raise _RollBack
                        run.result = response.to_json()
                except _RollBack:
                    pass
                else:
                    if connection is not None and not self._commits:
                        await self._check_kept(name)
                await response.send(send)

            state = {**scope.get("state", {}), "idempotency": Work(run, connection)}
            # No extensions: a response by another way, such as a file's path, could not be kept.
            inner = {**scope, "state": state, "extensions": {}}
            await _call(self._app, inner, body, commit_and_respond, send)
        return None

    async def _check_kept(self, name: str) -> None:
        """Raise unless the first response that was to be kept is there: before it is sent, as otherwise nothing was done."""
        async with self._store() as connection:
            self._commits = await kept(link(connection), name)
        if not self._commits:
            raise FencelockError(
                f"nothing of the request {name!r} is there: the store of IdempotencyMiddleware rolled it back at its end "
                "instead of committing it. Give one that commits, such as engine.begin (not engine.connect), "
                "async_sessionmaker(engine).begin (not async_sessionmaker(engine)), or psycopg's pool.connection",
                name,
            )


class Work(NamedTuple):
    """What the application finds in `scope["state"]["idempotency"]`."""

    run: Run
    connection: Any
    """In the transaction that keeps the response; None if a lock and a record keep it.

    The transaction ends with the response: background tasks need a connection of their own.
    """


def _refusal(error: KeyInProgress | KeyReused) -> Response:
    if isinstance(error, KeyReused):
        detail = "This Idempotency-Key was used for another request. Use a new one for a new request."
        return problem(422, "Idempotency-Key is already used", detail)
    detail = "A request with the same Idempotency-Key is being worked on. Send it again in a while."
    response = problem(409, "A request is outstanding for this Idempotency-Key", detail)
    response.headers.append((b"retry-after", b"1"))
    return response


def _replay(run: Run) -> Response:
    """Return the stored response of an earlier request."""
    try:
        response = Response.from_json(run.result)
    except ResultTooLarge:
        detail = (
            "This request was carried out before. Its response was too large to be stored. Do not send the request again "
            "under a new key: read what it has changed."
        )
        return problem(410, "The response was not stored", detail)
    response.headers.append((b"idempotent-replayed", b"true"))
    return response


def problem(status: int, title: str, detail: str) -> Response:
    """Return a response that says what is wrong, as RFC 9457 has it."""
    body = json.dumps({"type": DRAFT, "title": title, "status": status, "detail": detail}).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    return Response(status, [*headers, (b"cache-control", b"no-store")], body)


def _key_of(sent: list[bytes]) -> str | None:
    """Return the key: a string in quotes, as the draft has it, or bare, as many clients send it. None: it is none.

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


async def _body(receive: Receive, most: int) -> bytes | None:
    parts: list[bytes] = []
    left = most
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        parts.append(message.get("body", b""))
        left -= len(parts[-1])
        if left < 0:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


async def _call(
    app: App, scope: Scope, body: bytes, respond: Callable[[Response], Awaitable[None]], send: Send
) -> None:
    """Run the application on a request that was read already. When its response is complete, give it to `respond`.

    The application's last `send` returns when `respond` does, as with a server: what follows comes after the response.
    """
    start: Message | None = None
    parts: list[bytes] = []
    given = complete = False
    responded = world_of(awaited=True).event()

    async def again() -> Message:
        nonlocal given
        if given:
            # Not when the client leaves: half a response could not be kept, and the client would find nothing. Nor before
            # the commit: an application that streams breaks off its last `send` when it hears of it.
            await responded.wait(None)
            return {"type": "http.disconnect"}
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def take(message: Message) -> None:
        nonlocal start, complete
        if complete:
            await send(message)  # the application's own error page, if the commit has failed
        elif message["type"] == "http.response.start":
            start = message
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))
            if start is not None and not message.get("more_body", False):
                complete = True
                headers = [(bytes(name), bytes(value)) for name, value in start.get("headers", [])]
                await respond(Response(start["status"], headers, b"".join(parts)))
                responded.set()

    await app(scope, again, take)
    if not complete:
        raise FencelockError("the application ended before its response was complete: nothing of it is kept")
