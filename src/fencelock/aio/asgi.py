"""Messages of ASGI: a complete response, the body of a request, and an application whose response is captured."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from fencelock.errors import FencelockError
from fencelock.runtime.asyncio import AsyncioRuntime

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Response(NamedTuple):
    """A complete response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def to_json(self) -> Any:
        """Return it as a value for JSON."""
        headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers]
        return {"status": self.status, "headers": headers, "body": b64encode(self.body).decode()}

    @classmethod
    def from_json(cls, form: Any) -> Response:
        """Return the response that `to_json` wrote."""
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in form["headers"]]
        return cls(form["status"], headers, b64decode(form["body"]))

    async def send(self, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


def problem(body: bytes, status: int) -> Response:
    """Return a response that describes a problem, as RFC 9457 defines it."""
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    return Response(status, [*headers, (b"cache-control", b"no-store")], body)


class Disconnected(Exception):
    """The client disconnected before its request was complete."""


async def read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """Return the body of a request, or None if it is too large; raise Disconnected."""
    parts: list[bytes] = []
    left = max_bytes
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(message.get("body", b""))
        left -= len(parts[-1])
        if left < 0:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


async def call_app(
    app: App, scope: Scope, body: bytes, respond: Callable[[Response], Awaitable[None]], send: Send
) -> None:
    """Run the application on a request that was read already. When its response is complete, pass it to `respond`.

    The application's last `send` returns when `respond` does, as with a server: what follows runs after the response.
    """
    start: Message | None = None
    parts: list[bytes] = []
    given = complete = False
    responded = AsyncioRuntime().event()

    async def receive_stored() -> Message:
        nonlocal given
        if given:
            # Report the disconnect only after the commit: an application that streams would stop in the middle of its
            # response, which could not be stored then.
            await responded.wait(None)
            return {"type": "http.disconnect"}
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def take(message: Message) -> None:
        nonlocal start, complete
        if complete:
            await send(message)  # the application's error page after a failed commit
        elif message["type"] == "http.response.start":
            start = message
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))
            if start is not None and not message.get("more_body", False):
                complete = True
                headers = [(bytes(name), bytes(value)) for name, value in start.get("headers", [])]
                await respond(Response(start["status"], headers, b"".join(parts)))
                responded.set()

    await app(scope, receive_stored, take)
    if not complete:
        raise FencelockError("the application ended before its response was complete: nothing of it is stored")
