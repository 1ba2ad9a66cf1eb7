"""The words of the protocol: packets, and the answers that they add up to. No I/O."""

from __future__ import annotations

from typing import Any, NamedTuple

from fencelock.core.runtime import NO_REPLY

QUIT = b"\x01\x00\x00\x00\x01"
"""Good-bye: else the server would log a broken connection."""
GO_ON = b"\x01\x03"
"""The password was proved, and what follows at once says that we are in: there is nothing to say to it."""
WHOLE = 0xFFFFFF
"""A packet of this length goes on in the next one; nothing that we ask for is so long."""


class Packet(NamedTuple):
    """A packet of the login, as it is."""

    number: int
    body: bytes


class Ok(NamedTuple):
    """A statement was carried out."""

    affected: int
    insert_id: int


class Rows(NamedTuple):
    """What a query found; values are as the server writes them, None is NULL."""

    rows: list[tuple[bytes | None, ...]]


class ServerError(Exception):
    """An error that a server answered with: returned as any other answer, never raised by a wire."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"


def packet(number: int, body: bytes) -> bytes:
    """Return a packet as it is sent."""
    return len(body).to_bytes(3, "little") + bytes((number & 0xFF,)) + body


def query(sql: str) -> bytes:
    """Return a statement as it is sent."""
    return packet(0, b"\x03" + sql.encode())


def read_error(body: bytes) -> ServerError:
    """Read an error; one that comes before the login has no state."""
    words = body[3:]
    if words[:1] == b"#":
        words = words[6:]
    return ServerError(int.from_bytes(body[1:3], "little"), words.decode(errors="replace"))


def read_number(body: bytes, at: int) -> tuple[int, int]:
    """Return a number of variable length, and where it ends."""
    first = body[at]
    if first < 0xFB:
        return first, at + 1
    size = {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(first)
    if size is None or at + 1 + size > len(body):
        raise ValueError("not a length")
    return int.from_bytes(body[at + 1 : at + 1 + size], "little"), at + 1 + size


def read_row(body: bytes) -> tuple[bytes | None, ...]:
    """Read the values of a row."""
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


class Messages:
    """`fencelock.core.runtime.Parser`: packets while the login lasts, whole answers from then on."""

    def __init__(self) -> None:
        self.logged_in = False
        self._data = bytearray()
        self._rows: list[tuple[bytes | None, ...]] | None = None
        self._skip = 0

    def feed(self, data: bytes, /) -> None:
        """Take in what came."""
        self._data += data

    def gets(self) -> Any:
        """Return the next whole answer, or NO_ANSWER."""
        data = self._data
        while len(data) >= 4:
            size = int.from_bytes(data[:3], "little")
            if size == WHOLE:
                raise ValueError("an answer of 16 MB")
            if len(data) < 4 + size:
                break
            number, body = data[3], bytes(data[4 : 4 + size])
            del data[: 4 + size]
            if not self.logged_in:
                if body == GO_ON:
                    continue
                return Packet(number, body)
            answer = self._take(body)
            if answer is not None:
                return answer
        return NO_REPLY

    def _take(self, body: bytes) -> Ok | Rows | ServerError | None:
        """Take in one packet; return an answer if it is the last of one."""
        if not body:
            raise ValueError("an empty packet")
        kind = body[0]
        if kind == 0xFF:
            self._rows, self._skip = None, 0
            return read_error(body)
        if self._rows is None:
            return self._begin(body)
        if self._skip:
            self._skip -= 1
            return None
        if kind == 0xFE and len(body) < 9:
            rows, self._rows = self._rows, None
            return Rows(rows)
        self._rows.append(read_row(body))
        return None

    def _begin(self, body: bytes) -> Ok | None:
        if body[0] == 0:
            affected, at = read_number(body, 1)
            return Ok(affected, read_number(body, at)[0])
        columns, _ = read_number(body, 0)
        self._rows, self._skip = [], columns + 1  # what the columns are, and the end of that
        return None
