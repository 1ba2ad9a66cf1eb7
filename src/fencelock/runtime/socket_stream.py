"""Open a socket for the blocking runtime, for engines whose driver does not connect itself."""

from __future__ import annotations

import socket
from collections.abc import Callable

from fencelock.core.runtime import Endpoint

CHUNK = 65536


def open_stream(endpoint: Endpoint) -> socket.socket:
    """Open a socket, for engines without a driver that connects."""
    if endpoint.name.startswith("/"):
        return _open_unix(endpoint)
    sock = socket.create_connection((endpoint.name, endpoint.port), endpoint.seconds)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if endpoint.before_tls is not None:
            _send_preamble(sock, endpoint.before_tls)
        return sock if endpoint.tls is None else endpoint.tls.wrap_socket(sock, server_hostname=endpoint.name)
    except BaseException:
        sock.close()
        raise


def _open_unix(endpoint: Endpoint) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(endpoint.seconds)
        sock.connect(endpoint.name)
    except BaseException:
        sock.close()
        raise
    return sock


def _send_preamble(sock: socket.socket, before_tls: Callable[[bytes], bytes | None]) -> None:
    """Exchange what the protocol requires before TLS. The server then sends nothing until it gets this reply."""
    received = b""
    while (reply := before_tls(received)) is None:
        data = sock.recv(CHUNK)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        received += data
    sock.sendall(reply)
