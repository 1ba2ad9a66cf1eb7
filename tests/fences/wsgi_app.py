"""A web application with and without the middleware, in a process: `python -m tests.fences.wsgi_app FOLDER`."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from fencelock.fences import TokenPair
from fencelock.fences.http import WsgiFencingMiddleware, parse
from fencelock.fences.sql import StandaloneSqlFence
from tests.fences.counters import Document

texts: dict[str, str] = {}


def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Return the text, or change it."""
    place = environ["PATH_INFO"]
    if environ["REQUEST_METHOD"] == "PUT":
        fields = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        mine: TokenPair = environ.get("fencelock") or parse(environ["HTTP_FENCING_TOKEN"])
        texts[place] = Document.changed(texts.get(place), mine, fields["saw"], fields["value"])
    start_response("200 OK", [("Content-Type", "application/json")])
    return [texts.get(place, "").encode()]


class Server(ThreadingMixIn, WSGIServer):
    """One thread for each connection."""

    daemon_threads = True


class Quiet(WSGIRequestHandler):
    """Logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    folder = Path(sys.argv[1])
    fenced = WsgiFencingMiddleware(
        application,
        StandaloneSqlFence(lambda: sqlite3.connect(folder / "fences.db")),
        resource=lambda environ: None if environ["PATH_INFO"] == "/bare" else environ["PATH_INFO"],
    )
    with make_server("127.0.0.1", 0, fenced, Server, Quiet) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
