"""The packets of the protocol, and the parser that makes replies of them. No I/O."""

from __future__ import annotations

from typing import Any, NamedTuple

from fencelock.core.runtime import NO_REPLY

QUIT = b"\x01\x00\x00\x00\x01"
"""COM_QUIT. Without it, the server logs an aborted connection."""
FAST_AUTH_OK = b"\x01\x03"
"""The server accepts the hash of the password. It sends OK next, so this packet gets no response."""
MAX_PACKET = 0xFFFFFF
"""A packet of this length continues in the next one. No reply to our statements is so long."""


class Packet(NamedTuple):
    """A packet of the login, not parsed."""

    number: int
    body: bytes


class Ok(NamedTuple):
    """The server has executed a statement that returns no rows."""

    affected: int
    insert_id: int


class Rows(NamedTuple):
    """The rows of a query. Values are in the text protocol; None is NULL."""

    rows: list[tuple[bytes | None, ...]]


class ServerError(Exception):
    """An error packet. A connection returns it like any other reply and never raises it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"


def packet(number: int, body: bytes) -> bytes:
    """Encode a packet."""
    return len(body).to_bytes(3, "little") + bytes((number & 0xFF,)) + body


def query(sql: str) -> bytes:
    """Encode a statement (COM_QUERY)."""
    return packet(0, b"\x03" + sql.encode())


def read_error(body: bytes) -> ServerError:
    """Parse an error packet. An error before the login has no SQL state."""
    message = body[3:]
    if message[:1] == b"#":
        message = message[6:]
    return ServerError(int.from_bytes(body[1:3], "little"), message.decode(errors="replace"))


def read_number(body: bytes, at: int) -> tuple[int, int]:
    """Parse a length-encoded integer; return it and the index after it."""
    first = body[at] if at < len(body) else 0xFF
    if first < 0xFB:
        return first, at + 1
    size = {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(first)
    if size is None or at + 1 + size > len(body):
        raise ValueError("not a length-encoded integer")
    return int.from_bytes(body[at + 1 : at + 1 + size], "little"), at + 1 + size


def read_row(body: bytes) -> tuple[bytes | None, ...]:
    """Parse the values of a row."""
    values: list[bytes | None] = []
    at = 0
    while at < len(body):
        if body[at] == 0xFB:
            values.append(None)
            at += 1
        else:
            size, at = read_number(body, at)
            if at + size > len(body):
                raise ValueError("a value is longer than its packet")
            values.append(body[at : at + size])
            at += size
    return tuple(values)


class ReplyParser:
    """`fencelock.core.runtime.Parser`: returns raw packets during the login, and complete replies afterwards."""

    def __init__(self) -> None:
        self.logged_in = False
        self._data = bytearray()
        self._rows: list[tuple[bytes | None, ...]] | None = None
        self._skip = 0

    def feed(self, data: bytes, /) -> None:
        """Add received bytes."""
        self._data += data

    def gets(self) -> Any:
        """Return the next complete reply, or NO_REPLY."""
        data = self._data
        while len(data) >= 4:
            size = int.from_bytes(data[:3], "little")
            if size == MAX_PACKET:
                raise ValueError("a reply of 16 MB")
            if len(data) < 4 + size:
                break
            number, body = data[3], bytes(data[4 : 4 + size])
            del data[: 4 + size]
            if not self.logged_in:
                if body == FAST_AUTH_OK:
                    continue
                return Packet(number, body)
            reply = self._parse(body)
            if reply is not None:
                return reply
        return NO_REPLY

    def _parse(self, body: bytes) -> Ok | Rows | ServerError | None:
        """Parse one packet; return the reply that it completes, if any."""
        if not body:
            raise ValueError("an empty packet")
        kind = body[0]
        if kind == 0xFF:
            self._rows, self._skip = None, 0
            return read_error(body)
        if self._rows is None:
            return self._parse_first(body)
        if self._skip:
            self._skip -= 1
            return None
        if kind == 0xFE and len(body) < 9:
            rows, self._rows = self._rows, None
            return Rows(rows)
        self._rows.append(read_row(body))
        return None

    def _parse_first(self, body: bytes) -> Ok | None:
        if body[0] == 0:
            affected, at = read_number(body, 1)
            return Ok(affected, read_number(body, at)[0])
        columns, _ = read_number(body, 0)
        self._rows, self._skip = [], columns + 1  # the column definitions and their EOF packet
        return None
