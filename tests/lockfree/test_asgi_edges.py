"""The Idempotency-Key header with clients that disconnect, incomplete responses, and bodies in many parts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from fencelock import FencelockError, KeyInProgress, aio
from fencelock.aio.lockfree.asgi import IdempotencyMiddleware
from tests.lockfree.databases import Database

SCOPE = {"type": "http", "method": "POST", "path": "/pay", "headers": [(b"idempotency-key", b"k")]}


class Client:
    """Sends one request in parts, and can disconnect."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces or (b"",))
        self.gone = asyncio.Event()
        self.got: list[Any] = []

    async def receive(self) -> Any:
        if self._pieces:
            return {"type": "http.request", "body": self._pieces.pop(0), "more_body": bool(self._pieces)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)

    @property
    def status(self) -> int:
        return int(self.got[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)


async def ask(app: Any, *pieces: bytes, **more: Any) -> Client:
    """Send a request and wait for the answer."""
    client = Client(*pieces)
    await app({**SCOPE, **more}, client.receive, client.send)
    return client


async def test_client_disconnects_during_a_streamed_response() -> None:
    """A client that disconnects does not stop an application that streams: its response is stored for the repetition."""
    calls = 0

    async def stream(send: Any) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        await asyncio.sleep(0.05)
        await send({"type": "http.response.body", "body": b"second"})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        assert (await receive())["type"] == "http.request"
        streaming, leaving = asyncio.ensure_future(stream(send)), asyncio.ensure_future(receive())
        await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (streaming, leaving):
            task.cancel()
        await asyncio.gather(streaming, leaving, return_exceptions=True)

    async with aio.connect("memory://asgi-leaves") as locks:
        safe = IdempotencyMiddleware(app, locks, caller=lambda scope: "me")
        client = Client()
        client.gone.set()
        await safe(SCOPE, client.receive, client.send)
        assert (await ask(safe)).body == b"first second"
    assert calls == 1


async def test_incomplete_response_is_not_stored() -> None:
    """An incomplete response is an error, and is not stored."""
    calls = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": calls == 1})

    async with aio.connect("memory://asgi-half") as locks:
        safe = IdempotencyMiddleware(app, locks, caller=lambda scope: "me")
        with pytest.raises(FencelockError, match="before its response was complete"):
            await ask(safe)
        assert (await ask(safe)).body == b"half"
    assert calls == 2


async def test_disconnect_is_reported_after_the_response() -> None:
    """An application that waits for its client to disconnect after the response gets that message, as from a server."""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})
        seen.append((await receive())["type"])

    async with aio.connect("memory://asgi-disconnect") as locks:
        assert (await ask(IdempotencyMiddleware(app, locks, caller=lambda scope: "me"))).status == 200
    assert seen == ["http.disconnect"]


async def test_error_of_the_applications_own_key_is_raised() -> None:
    """KeyInProgress of another key that the application uses is its own error, and not the response 409 of this key."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise KeyInProgress("another key", "another")

    async with aio.connect("memory://asgi-own-key") as locks:
        with pytest.raises(KeyInProgress, match="another key"):
            await ask(IdempotencyMiddleware(app, locks, caller=lambda scope: "me"))


@pytest.mark.parametrize("method", ["post", "Post"])
async def test_method_in_any_case(method: str) -> None:
    """A method in lower case needs a key, too."""
    calls = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body"})

    async with aio.connect(f"memory://asgi-{method}") as locks:
        safe = IdempotencyMiddleware(app, locks, caller=lambda scope: "me")
        for _ in range(2):
            assert (await ask(safe, method=method)).status == 201
        with pytest.raises(TypeError, match="methods"):
            IdempotencyMiddleware(app, locks, caller=lambda scope: "me", methods="POST")
    assert calls == 1


@pytest.mark.parametrize("status", [408, 425, 429])
async def test_try_again_later_is_not_stored(status: int) -> None:
    """After a response such as 429, a repetition is executed."""
    answers = [status, 201]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": answers.pop(0), "headers": []})
        await send({"type": "http.response.body"})

    async with aio.connect(f"memory://asgi-{status}") as locks:
        safe = IdempotencyMiddleware(app, locks, caller=lambda scope: "me")
        assert [(await ask(safe)).status for _ in range(3)] == [status, 201, 201]


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("on", ["postgresql"])
async def test_store_that_does_not_commit(database: Database, key: str) -> None:
    """The middleware notices a store that rolls back before it sends the first response."""
    url = database.url.replace("postgresql:", "postgresql+psycopg:")
    engine, calls = create_async_engine(url), 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body"})

    headers = {"headers": [(b"idempotency-key", key.encode())]}
    for wrong in (engine.connect, async_sessionmaker(engine)):
        safe = IdempotencyMiddleware(app, wrong, caller=lambda scope: "me")
        client = Client()
        with pytest.raises(FencelockError, match=r"engine\.begin"):
            await safe({**SCOPE, **headers}, client.receive, client.send)
        assert client.got == []
    for right in (engine.begin, async_sessionmaker(engine).begin):
        safe = IdempotencyMiddleware(app, right, caller=lambda scope: "me")
        assert [(await ask(safe, **headers)).status for _ in range(2)] == [201, 201]
    assert calls == 3
    await engine.dispose()


async def test_invalid_store_is_refused() -> None:
    """An invalid store is refused when the middleware is made."""
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(TypeError, match=r"such as engine\.begin or pool\.connection, not AsyncEngine"):
        IdempotencyMiddleware(lambda *_: asyncio.sleep(0), engine, caller=lambda scope: "me")
    await engine.dispose()


async def test_body_in_small_parts() -> None:
    """Reading a body that arrives byte by byte takes linear time."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(len(body)).encode()})

    async with aio.connect("memory://asgi-crumbs") as locks:
        safe = IdempotencyMiddleware(app, locks, caller=lambda scope: "me")
        async with asyncio.timeout(30):
            assert (await ask(safe, *[b"x"] * 100_000)).body == b"100000"


async def test_response_too_large_to_store_is_sent_and_not_computed_again(key: str) -> None:
    """With a lock client as the store: the first request gets the response, a repetition 410; the work is done once."""
    calls, keyed = 0, {"headers": [(b"idempotency-key", key.encode())]}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 300_000})

    async with aio.connect("memory://asgi-too-large") as locks:
        safe = IdempotencyMiddleware(app, locks, caller=lambda scope: "me")
        assert (await ask(safe, **keyed)).body == b"x" * 300_000
        again = await ask(safe, **keyed)
        assert again.status == 410
        assert b"executed before" in again.body
        assert (await ask(safe, b"another body", **keyed)).status == 422
    assert calls == 1
