"""Background tasks of an application, such as Starlette's, run after the commit and outside of the transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiosqlite
import pytest

from fencelock import KeyInProgress
from fencelock.aio.lockfree.asgi import IdempotencyMiddleware
from tests.lockfree.databases import Database
from tests.lockfree.test_asgi_edges import SCOPE, Client, ask

pytestmark = pytest.mark.parametrize("on", ["sqlite"])

Background = Callable[[], Awaitable[None]]


class Shop:
    """Charges over the given connection, responds, and then works in the background."""

    def __init__(self, key: str, background: Background, *, status: int = 201, streams: bool = False) -> None:
        self.key = key
        self.background = background
        self.status = status
        self.streams = streams
        self.calls = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        await receive()
        await scope["state"]["idempotency"].connection.execute("INSERT INTO charge VALUES (?, 10)", (self.key,))
        if self.streams:
            # As Starlette's StreamingResponse: whichever ends first, the last part or the client, ends the other.
            sending, leaving = asyncio.ensure_future(self.respond(send)), asyncio.ensure_future(receive())
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for task in (sending, leaving):
                task.cancel()
            results = await asyncio.gather(sending, leaving, return_exceptions=True)
            if isinstance(results[0], BaseException):
                raise results[0]
        else:
            await self.respond(send)
        await self.background()

    async def respond(self, send: Any) -> None:
        """Send the response in two parts."""
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"charged ", "more_body": True})
        await send({"type": "http.response.body", "body": b"10"})


@pytest.fixture
def store(database: Database) -> Callable[[], Any]:
    """Gives a connection, and commits at the end."""

    @asynccontextmanager
    async def transaction() -> AsyncIterator[Any]:
        async with aiosqlite.connect(database.path(), timeout=0.1) as connection:
            yield connection
            await connection.commit()

    return transaction


def scope_of(key: str) -> dict[str, Any]:
    """Return the scope of a request with a key."""
    return {**SCOPE, "headers": [(b"idempotency-key", key.encode())]}


@pytest.mark.parametrize(("status", "charges"), [(201, 1), (503, 0)])
@pytest.mark.parametrize("streams", [False, True])
async def test_background_work_runs_after_the_response_was_committed_and_sent(
    database: Database, store: Any, key: str, status: int, charges: int, streams: bool
) -> None:
    """Background work runs after the response was sent and the transaction has ended."""
    client = Client()
    seen: list[tuple[int, bytes, int]] = []

    async def background() -> None:
        database.ask("INSERT INTO charge VALUES (?, 10)", f"{key} elsewhere")  # which an open transaction would block
        seen.append((client.status, client.body, database.charges(key)))

    app = IdempotencyMiddleware(Shop(key, background, status=status, streams=streams), store, caller=lambda scope: "me")
    await app(scope_of(key), client.receive, client.send)
    assert seen == [(status, b"charged 10", charges)]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyInProgress])
async def test_error_in_background_work_does_not_undo_the_response(
    database: Database, store: Any, key: str, error: type[Exception]
) -> None:
    """An error of the background work is raised; the response was sent once, and a repeated request gets it."""

    async def background() -> None:
        raise error("in the background")

    shop, client = Shop(key, background), Client()
    app = IdempotencyMiddleware(shop, store, caller=lambda scope: "me")
    with pytest.raises(error):
        await app(scope_of(key), client.receive, client.send)
    assert [message["type"] for message in client.got] == ["http.response.start", "http.response.body"]
    assert (await ask(app, **scope_of(key))).body == b"charged 10"
    assert (shop.calls, database.charges(key)) == (1, 1)


@pytest.mark.parametrize("streams", [False, True])
async def test_no_background_work_if_the_commit_fails(database: Database, key: str, streams: bool) -> None:
    """A failed commit is raised by the application's last `send`; nothing was sent, and a repeated request is executed."""

    @asynccontextmanager
    async def failing() -> AsyncIterator[Any]:
        async with aiosqlite.connect(database.path()) as connection:
            yield connection
            raise ConnectionError("the commit failed")

    async def background() -> None:
        pytest.fail("nothing was committed")

    client = Client()
    app = IdempotencyMiddleware(Shop(key, background, streams=streams), failing, caller=lambda scope: "me")
    with pytest.raises(ConnectionError, match="the commit failed"):
        await app(scope_of(key), client.receive, client.send)
    assert (client.got, database.charges(key)) == ([], 0)


async def test_error_page_of_the_application_is_sent_if_the_commit_fails(database: Database, key: str) -> None:
    """An application that catches the error of a failed commit can send an error page, which is not stored."""

    @asynccontextmanager
    async def failing() -> AsyncIterator[Any]:
        async with aiosqlite.connect(database.path()) as connection:
            yield connection
            raise ConnectionError("the commit failed")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"charged"})
        except ConnectionError:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"sorry"})

    client = await ask(IdempotencyMiddleware(app, failing, caller=lambda scope: "me"), **scope_of(key))
    assert (client.status, client.body) == (500, b"sorry")
