"""The header and the middleware: ASGI and WSGI, httpx (blocking and asyncio), and requests."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import make_server

import httpx
import pytest
import requests

from fencelock import InvalidType, StaleToken
from fencelock.aio.fences import memory as aio_memory
from fencelock.aio.fences import sql as aio_sql
from fencelock.aio.fences.http import FencingMiddleware
from fencelock.fences import Fenced, TokenPair
from fencelock.fences.http import (
    BadHeader,
    FencingTokenAuth,
    WsgiFencingMiddleware,
    header,
    parse,
    path_of,
    raise_for_stale,
)
from fencelock.fences.memory import MemoryFence
from fencelock.fences.sql import StandaloneSqlFence
from tests.fences.fake_lease import fake_lease
from tests.fences.wsgi_app import Quiet


async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
    seen = repr(tuple(scope.get("fencelock") or ())).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": seen})


def wsgi_app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [])
    return [repr(tuple(environ.get("fencelock") or ())).encode()]


@pytest.mark.parametrize("id", ["5f1d", 'quo"ted; id=', "ö 7", "a\r\nb: c"])
def test_header_round_trip(id: str) -> None:
    """Whatever the id, the header has one line of ASCII, and says the same on the other side."""
    value = header(fake_lease(2**53 - 1, id))
    assert value.isascii()
    assert value.isprintable()
    assert parse(value) == TokenPair(2**53 - 1, id)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "34",
        '34; id=""',
        'x; id="a"',
        '-1; id="a"',
        '34; id="a", 35; id="b"',
        '34;id="a",35;id="b"',
        '34;id="a";id="b"',
        '34; id="a\\b"',
        '٣; id="a"',
        f'{2**53}; id="a"',
    ],
)
def test_bad_header(value: str) -> None:
    """What is no token and id is refused."""
    with pytest.raises(BadHeader, match="Fencing-Token"):
        parse(value)


def check(answer: Any, status: int, kind: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    if kind is not None:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["type"] == f"urn:fencelock:{kind}"
        assert answer.json()["status"] == status


def play(send: Any) -> None:
    """Check what every middleware promises; `send(method, path, lease, headers)` returns the response."""
    answer = send("POST", "/stock", fake_lease(34, "ö 7"), {})
    check(answer, 200)
    assert answer.text == repr((34, "ö 7", "/stock"))
    answer = send("PUT", "/stock", fake_lease(33), {})
    check(answer, 409, "stale-token")
    assert (answer.json()["token"], answer.json()["seen"], answer.json()["instance"]) == (33, 34, "/stock")
    with pytest.raises(StaleToken, match="refused token 33") as caught:
        raise_for_stale(answer)
    assert (caught.value.token, caught.value.seen, caught.value.name) == (33, 34, "/stock")
    check(send("DELETE", "/stock", fake_lease(34, "another claim"), {}), 409, "stale-token")
    check(send("PATCH", "/other", fake_lease(33), {}), 200)
    check(send("POST", "/stock", None, {}), 428, "token-required")
    check(send("POST", "/stock", None, {"Fencing-Token": "many"}), 400, "bad-token")
    check(send("POST", "/" + "x" * 1024, fake_lease(34), {}), 400, "bad-resource")
    check(send("GET", "/stock", fake_lease(33), {}), 200)
    check(send("POST", "/free", None, {}), 200)


def resource(where: Any) -> str | None:
    path = where.get("path") or where.get("PATH_INFO")
    return None if path == "/free" else path


@pytest.mark.parametrize("kind", ["memory", "standalone"])
def test_asgi(kind: str, tmp_path: Path) -> None:
    """The ASGI middleware refuses old tokens with a fence in memory and with one in a database."""
    import aiosqlite

    fences: dict[str, Any] = {
        "memory": aio_memory.MemoryFence(),
        "standalone": aio_sql.StandaloneSqlFence(lambda: aiosqlite.connect(tmp_path / "fences.db")),
    }
    app = FencingMiddleware(asgi_app, fences[kind], resource=resource)

    with asyncio.Runner() as runner:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

        def send(method: str, path: str, lease: Fenced | None, headers: dict[str, str]) -> httpx.Response:
            auth = None if lease is None else FencingTokenAuth(lease)
            return runner.run(client.request(method, path, headers=headers, auth=auth))

        play(send)
        runner.run(client.aclose())


def test_wsgi_with_httpx() -> None:
    """The WSGI middleware refuses old tokens that httpx sends."""
    transport = httpx.WSGITransport(WsgiFencingMiddleware(wsgi_app, MemoryFence(), resource=resource))
    with httpx.Client(transport=transport, base_url="http://test") as client:

        def send(method: str, path: str, lease: Fenced | None, headers: dict[str, str]) -> httpx.Response:
            return client.request(
                method, path, headers=headers, auth=None if lease is None else FencingTokenAuth(lease)
            )

        play(send)


def test_wsgi_with_requests(tmp_path: Path) -> None:
    """The WSGI middleware with a fence in a database refuses old tokens that requests sends, beside another auth."""
    fence = StandaloneSqlFence(lambda: sqlite3.connect(tmp_path / "fences.db"))
    app = WsgiFencingMiddleware(wsgi_app, fence, resource=resource)
    with make_server("127.0.0.1", 0, app, handler_class=Quiet) as server, requests.Session() as session:
        session.trust_env = False
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def then(request: Any) -> Any:
            request.headers["X-Then"] = "1"
            return request

        def send(method: str, path: str, lease: Fenced | None, headers: dict[str, str]) -> requests.Response:
            auth = None if lease is None else FencingTokenAuth(lease, auth=then)
            answer = session.request(method, f"http://127.0.0.1:{server.server_port}{path}", headers=headers, auth=auth)
            assert answer.request.headers.get("X-Then") == (None if lease is None else "1")
            return answer

        play(send)
        server.shutdown()
        thread.join()


def test_optional_token_and_other_protocols() -> None:
    """With required=False a request without a token passes; a request that is not HTTP passes in any case."""
    called: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.append(scope["type"])

    async def use() -> None:
        optional = FencingMiddleware(app, aio_memory.MemoryFence(), resource=path_of, required=False)
        await optional({"type": "http", "method": "POST", "path": "/", "headers": []}, None, None)
        for fenced in (optional, FencingMiddleware(app, aio_memory.MemoryFence(), resource=path_of)):
            await fenced({"type": "websocket", "path": "/"}, None, None)

    asyncio.run(use())
    assert called == ["http", "websocket", "websocket"]


def test_token_pair_in_place_of_a_lease() -> None:
    """A fence takes a token pair in place of a lease."""
    fence = MemoryFence()
    fence.enter(TokenPair(34, "a"), "stock")
    with pytest.raises(StaleToken):
        fence.enter(parse('33; id="b"'), "stock")


def called(app: Any, method: str, value: str, path: str = "/stock") -> int:
    """Call a WSGI application; return the status."""
    statuses: list[str] = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "HTTP_FENCING_TOKEN": value}
    app(environ, lambda status, headers: statuses.append(status))
    return int(statuses[0].split()[0])


def test_middleware_refuses_a_fence_of_the_other_half(tmp_path: Path) -> None:
    """Each middleware refuses a fence of the other API when it is made."""
    with pytest.raises(InvalidType, match=r"use fencelock\.aio\.fences"):
        WsgiFencingMiddleware(wsgi_app, aio_memory.MemoryFence(), resource=path_of)
    with pytest.raises(InvalidType, match=r"use fencelock\.fences"):
        FencingMiddleware(asgi_app, MemoryFence(), resource=path_of)


@pytest.mark.parametrize("sent", ["POST", "post", "Post"])
def test_methods_in_any_case(sent: str) -> None:
    """The case of a method makes no difference, in `methods` and in a request."""
    for app in (
        WsgiFencingMiddleware(wsgi_app, MemoryFence(), resource=path_of),
        WsgiFencingMiddleware(wsgi_app, MemoryFence(), resource=path_of, methods=["post"]),
    ):
        assert [called(app, sent, f'{token}; id="{token}"') for token in (34, 33)] == [200, 409]


def test_methods_decide_which_requests_need_a_token() -> None:
    """Only requests of the given methods are compared; others pass with an old token."""
    app = WsgiFencingMiddleware(wsgi_app, MemoryFence(), resource=path_of, methods=["PURGE"])
    assert [called(app, "PURGE", f'{token}; id="{token}"') for token in (34, 33)] == [200, 409]
    assert called(app, "POST", '33; id="33"') == 200


@pytest.mark.parametrize("required", [True, False])
def test_empty_header_is_refused(required: bool) -> None:
    """An empty header is a malformed one, as in ASGI, and not a missing one, also if the token is optional."""
    app = WsgiFencingMiddleware(wsgi_app, MemoryFence(), resource=path_of, required=required)
    assert called(app, "POST", "") == 400


def test_methods_as_one_str_are_refused() -> None:
    """One method as a str would be its letters, and no request would be fenced."""
    with pytest.raises(TypeError, match="methods"):
        WsgiFencingMiddleware(wsgi_app, MemoryFence(), resource=path_of, methods="POST")


def test_path_names_the_same_resource_in_wsgi_and_asgi() -> None:
    """A path has the same name in WSGI and in ASGI, so that both can share a fence."""
    fence = MemoryFence()
    assert called(WsgiFencingMiddleware(wsgi_app, fence, resource=path_of), "POST", '34; id="a"', "/caf\xc3\xa9") == 200
    assert called(WsgiFencingMiddleware(wsgi_app, fence, resource=path_of), "POST", '34; id="a"', "/\xff") == 200
    assert fence.token("/café") == 34


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"type": "urn:fencelock:stale-token"}'])
def test_other_responses_are_no_refusal(body: bytes) -> None:
    """A response that only looks like a refusal raises nothing; a refusal without details raises StaleToken."""
    answer = httpx.Response(409, headers={"content-type": "application/problem+json"}, content=body)
    if b"stale" in body:
        with pytest.raises(StaleToken):
            raise_for_stale(answer)
    else:
        raise_for_stale(answer)


def challenged(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """An application that demands authentication, and returns the scheme and the token that it gets."""
    given = environ.get("HTTP_AUTHORIZATION", "")
    if not given:
        start_response("401 Unauthorized", [("WWW-Authenticate", 'Digest realm="x", nonce="n", qop="auth"')])
        return [b""]
    start_response("200 OK", [])
    return [f"{given.split()[0]} {environ['fencelock'].token}".encode()]


@pytest.mark.parametrize(
    ("then", "scheme"),
    [
        (httpx.BasicAuth("ann", "s3cr3t"), "Basic"),
        (httpx.DigestAuth("ann", "s3cr3t"), "Digest"),
        (("ann", "s3cr3t"), "Basic"),
        (requests.auth.HTTPBasicAuth("ann", "s3cr3t"), "Basic"),
    ],
)
def test_other_auth_beside_the_token(then: Any, scheme: str) -> None:
    """An auth of httpx, one of requests and a pair are sent with the token, blocking and asyncio."""
    app = WsgiFencingMiddleware(challenged, MemoryFence(), resource=path_of)
    auth = FencingTokenAuth(fake_lease(34), auth=then)
    with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://test") as client:
        assert client.post("/stock", auth=auth).text == f"{scheme} 34"

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        headers = [] if given else [(b"www-authenticate", b'Digest realm="x", nonce="n", qop="auth"')]
        await send({"type": "http.response.start", "status": 200 if given else 401, "headers": headers})
        body = b"%s %d" % (given.partition(b" ")[0], scope["fencelock"].token)
        await send({"type": "http.response.body", "body": body})

    async def use() -> str:
        transport = httpx.ASGITransport(FencingMiddleware(asgi, aio_memory.MemoryFence(), resource=path_of))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.post("/stock", auth=auth)).text

    assert asyncio.run(use()) == f"{scheme} 34"


@pytest.mark.parametrize("then", ["ann", 5, ("ann",)])
def test_invalid_auth_is_refused(then: Any) -> None:
    """An invalid auth is refused when it is given, and not with the first request."""
    with pytest.raises(TypeError, match=r"auth is an auth"):
        FencingTokenAuth(fake_lease(34), auth=then)


def test_title_of_a_bad_resource() -> None:
    """The response for an invalid resource has a title of its own."""
    transport = httpx.WSGITransport(WsgiFencingMiddleware(wsgi_app, MemoryFence(), resource=path_of))
    with httpx.Client(transport=transport, base_url="http://test") as client:
        answer = client.post("/" + "x" * 1024, auth=FencingTokenAuth(fake_lease(34)))
    check(answer, 400, "bad-resource")
    assert answer.json()["title"] == "Bad resource of a fence"


def test_slash_at_the_end_names_the_same_resource() -> None:
    """A path with a slash at its end is the same resource as without, in both kinds of middleware."""
    app = WsgiFencingMiddleware(wsgi_app, MemoryFence(), resource=path_of)
    assert called(app, "POST", '34; id="a"', "/stock/x") == 200
    assert called(app, "POST", '33; id="b"', "/stock/x/") == 409
    assert called(app, "POST", '33; id="b"', "/") == 200

    async def use() -> list[int]:
        fenced = httpx.ASGITransport(FencingMiddleware(asgi_app, aio_memory.MemoryFence(), resource=path_of))
        async with httpx.AsyncClient(transport=fenced, base_url="http://test") as client:
            sent = [(34, "/stock/x/"), (33, "/stock/x"), (33, "/")]
            return [
                (await client.post(path, auth=FencingTokenAuth(fake_lease(token)))).status_code for token, path in sent
            ]

    assert asyncio.run(use()) == [200, 409, 200]


@pytest.mark.parametrize(
    ("middleware", "fence"), [(FencingMiddleware, aio_memory.MemoryFence()), (WsgiFencingMiddleware, MemoryFence())]
)
def test_resource_must_be_given(middleware: Any, fence: Any) -> None:
    """The middleware needs a function that names the resource of a request."""
    with pytest.raises(TypeError, match="'resource'"):
        middleware(wsgi_app, fence)
    with pytest.raises(TypeError, match="resource is a function that takes the scope or environ"):
        middleware(wsgi_app, fence, resource="stock")


def test_unknown_paths_leave_no_mark() -> None:
    """A path that the application does not know passes to it, and the fence stores nothing."""
    fence = MemoryFence()
    app = WsgiFencingMiddleware(wsgi_app, fence, resource=lambda environ: {"/stock": "stock"}.get(path_of(environ)))
    for path in ("/a", "/b", "/stock"):
        assert called(app, "POST", '34; id="a"', path) == 200
    assert list(fence._marks) == ["stock"]


def test_path_of_a_mounted_application() -> None:
    """The path of a request includes the mount point of the application."""
    fence = MemoryFence()
    app = WsgiFencingMiddleware(wsgi_app, fence, resource=path_of)
    for mounted, path in [("/shop", "/stock/"), ("", "/stock"), ("/shop/stock", ""), ("/caf\xc3\xa9", "/stock")]:
        environ = {"REQUEST_METHOD": "POST", "SCRIPT_NAME": mounted, "PATH_INFO": path}
        app({**environ, "HTTP_FENCING_TOKEN": '34; id="a"'}, lambda status, headers: None)
    assert sorted(fence._marks) == ["/café/stock", "/shop/stock", "/stock"]
    assert path_of({"type": "http", "root_path": "/shop", "path": "/shop/stock/"}) == "/shop/stock"
