"""The Idempotency-Key header: the status codes of the draft, and an application that works once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiosqlite
import httpx
import psycopg
import pytest

from fencelock import KeyInProgress, KeyReused, aio
from fencelock.aio.lockfree.asgi import IdempotencyMiddleware
from tests.lockfree.databases import Database


class Till:
    """An application that charges, over the connection that it is given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.status = 201
        self.error: Exception | None = None
        self.called = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        body = (await receive()).get("body", b"")
        work = scope.get("state", {}).get("idempotency")
        if work is not None and work.connection is not None:
            await work.connection.execute(f"INSERT INTO charge VALUES ('{self.name}', 10)")
        self.called.set()
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        headers = [(b"content-type", b"text/plain"), (b"x-call", str(self.calls).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"charged ", "more_body": True})
        await send({"type": "http.response.body", "body": body})


def caller(scope: Any) -> str:
    """Return the user that the header names."""
    return str(dict(scope["headers"]).get(b"x-user", b""))


def client_of(app: Any) -> httpx.AsyncClient:
    """Return an HTTP client of the application."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=True), base_url="http://till")


def keyed(key: str, **more: str) -> dict[str, str]:
    """Return the headers of a request."""
    return {"Idempotency-Key": f'"{key}"', **more}


@pytest.fixture
def store(database: Database) -> Callable[[], Any]:
    """Gives a connection, and commits at the end."""

    @asynccontextmanager
    async def transaction() -> AsyncIterator[Any]:
        if database.name == "postgresql":
            async with await psycopg.AsyncConnection.connect(database.url) as connection:
                yield connection
        else:
            async with aiosqlite.connect(database.path(), timeout=0.1) as lite:
                yield lite
                await lite.commit()

    return transaction


@pytest.mark.parametrize("on", ["sqlite", pytest.param("postgresql", marks=pytest.mark.engine("postgres"))])
async def test_work_is_done_once(database: Database, store: Any, key: str) -> None:
    """A repeated request gets the first response with its headers, and the write is done once."""
    till = Till(key)
    async with client_of(IdempotencyMiddleware(till, store, caller=caller)) as http:
        first = await http.post("/pay?x=1", content=b"10", headers=keyed(key))
        again = await http.post("/pay?x=1", content=b"10", headers={"Idempotency-Key": key})
        for response in (first, again):
            assert (response.status_code, response.text) == (201, "charged 10")
            assert response.headers["x-call"] == "1"
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
        for url, body in (("/pay?x=1", b"11"), ("/pay?x=2", b"10"), ("/refund?x=1", b"10")):
            refused = await http.post(url, content=body, headers=keyed(key))
            assert refused.status_code == 422
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.json()["title"] == "Idempotency-Key is already used"
        elsewhere = await http.post("/pay", content=b"11", headers=keyed(key, **{"X-User": "another claim"}))
        assert elsewhere.status_code == 201
    assert till.calls == 2
    assert database.charges(key) == 2


@pytest.mark.parametrize("on", ["sqlite"])
async def test_failed_responses_are_not_stored(database: Database, store: Any, key: str) -> None:
    """After an exception or an error status the transaction is rolled back, and a repeated request is executed."""
    till = Till(key)
    async with client_of(IdempotencyMiddleware(till, store, caller=caller)) as http:
        till.error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            await http.post("/pay", headers=keyed(key))
        till.error, till.status = None, 503
        assert (await http.post("/pay", headers=keyed(key))).status_code == 503
        assert database.charges(key) == 0
        till.status = 402
        for _ in range(2):
            assert (await http.post("/pay", headers=keyed(key))).status_code == 402
    assert till.calls == 3


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("on", ["postgresql"])
async def test_refused_key_ends_the_store_with_an_error(store: Any, key: str) -> None:
    """If the key is in progress or was used for another request, the store's block ends with the error, to roll back."""
    ended: list[type[BaseException]] = []

    @asynccontextmanager
    async def watched() -> AsyncIterator[Any]:
        async with store() as connection:
            try:
                yield connection
            except BaseException as error:
                ended.append(type(error))
                raise

    till = Till(key)
    till.go_on.clear()
    async with client_of(IdempotencyMiddleware(till, watched, caller=caller)) as http:
        first = asyncio.create_task(http.post("/pay", content=b"10", headers=keyed(key)))
        await till.called.wait()
        assert (await http.post("/pay", content=b"10", headers=keyed(key))).status_code == 409
        assert ended == [KeyInProgress]
        till.go_on.set()
        assert (await first).status_code == 201
        assert (await http.post("/pay", content=b"11", headers=keyed(key))).status_code == 422
        assert ended == [KeyInProgress, KeyReused]


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("on", ["postgresql"])
async def test_in_progress(database: Database, store: Any, key: str) -> None:
    """While the first request is in progress, a second one gets 409."""
    till = Till(key)
    till.go_on.clear()
    async with client_of(IdempotencyMiddleware(till, store, caller=caller)) as http:
        first = asyncio.create_task(http.post("/pay", headers=keyed(key)))
        await till.called.wait()
        second = await http.post("/pay", headers=keyed(key))
        assert second.status_code == 409
        assert second.headers["retry-after"] == "1"
        assert second.json()["status"] == 409
        till.go_on.set()
        assert (await first).status_code == 201
        assert (await http.post("/pay", headers=keyed(key))).status_code == 201
    assert till.calls == 1


async def test_lock_client_as_the_store(key: str) -> None:
    """With a client of fencelock, the key is stored with a lock and a record."""
    async with aio.connect("memory://asgi-test") as locks:
        till = Till(key)
        async with client_of(IdempotencyMiddleware(till, locks, caller=caller)) as http:
            till.go_on.clear()
            first = asyncio.create_task(http.post("/pay", headers=keyed(key)))
            await till.called.wait()
            assert (await http.post("/pay", headers=keyed(key))).status_code == 409
            till.go_on.set()
            assert (await first).status_code == 201
            assert (await http.post("/pay", headers=keyed(key))).text == "charged "
        assert till.calls == 1


@pytest.mark.parametrize("value", ["", '"', '"a', '"a"b"', '"a\\b"', "a b", "a,b", "k" * 256, '"tab\t"', "ü"])
async def test_missing_or_malformed_key(value: str) -> None:
    """A request without a valid key is refused with 400, and does not reach the application."""
    async with aio.connect("memory://asgi-none") as locks:
        till = Till("x")
        async with client_of(IdempotencyMiddleware(till, locks, caller=caller)) as http:
            for headers in ([], [(b"idempotency-key", value.encode())], [(b"idempotency-key", b"a")] * 2):
                refused = await http.post("/pay", headers=headers)
                assert refused.status_code == 400
                assert refused.headers["content-type"] == "application/problem+json"
                assert refused.json()["title"].startswith("Idempotency-Key is")
        assert till.calls == 0


async def test_requests_without_a_key_are_passed_through() -> None:
    """Other methods, other protocols, and requests without a key if it is optional reach the application unchanged."""
    async with aio.connect("memory://asgi-through") as locks:
        till = Till("x")
        app = IdempotencyMiddleware(till, locks, caller=caller, required=False)
        async with client_of(app) as http:
            assert (await http.get("/")).status_code == 201
            assert (await http.post("/", content=b"x")).text == "charged x"
        seen: list[str] = []

        async def other(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["type"])

        await IdempotencyMiddleware(other, locks, caller=caller)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
        assert seen == ["lifespan"]


async def test_large_body_and_disconnected_client() -> None:
    """A body that is too large is refused with 413; a client that disconnects during its body gets no response."""
    async with aio.connect("memory://asgi-large") as locks:
        till = Till("x")
        app = IdempotencyMiddleware(till, locks, caller=caller, body_max=10)
        async with client_of(app) as http:
            assert (await http.post("/", content=b"x" * 11, headers=keyed("a"))).status_code == 413
            assert (await http.post("/", content=b"x" * 10, headers=keyed("a"))).status_code == 201

        async def leave() -> Any:
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"idempotency-key", b"b")]}
        await app(scope, leave, None)  # type: ignore[arg-type]
        assert till.calls == 1
