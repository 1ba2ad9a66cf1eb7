"""What is asked for each time a lock is taken and given back, packed and read without a detour; kazoo knows all the rest.

kazoo builds a message field by field and reads all of an answer: that alone took a sixth of the time of a lock that passes
through many hands. Its requests and these can be asked for alike.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

from kazoo.exceptions import EXCEPTIONS, ZookeeperError
from kazoo.protocol.serialization import write_string

EPHEMERAL_SEQUENTIAL = 3
CREATE, DELETE, SET_DATA, CHILDREN, MULTI, SET_WATCHES = 15, 2, 5, 8, 14, 101
FAILED = -1

HEAD = Struct("!iqi")
"""What an answer begins with: the number of what was asked, that of the latest change, and an error."""
INT = Struct("!i")
LONG = Struct("!q")
EVENT = Struct("!iii")
"""What happened, the connection's state, and the length of the path."""
STEP = Struct("!i?i")
"""What stands before each step of a transaction: its type, whether there is none any more, and an error."""
NO_OTHERS = INT.pack(0) + INT.pack(0)
ANY_VERSION = INT.pack(-1)
FLAGS = INT.pack(EPHEMERAL_SEQUENTIAL)
SET_STEP, DELETE_STEP, NO_STEP = STEP.pack(SET_DATA, False, -1), STEP.pack(DELETE, False, -1), STEP.pack(-1, True, -1)


MALFORMED = (struct.error, ValueError, IndexError, KeyError)
"""What is raised by reading a message that breaks off, or is none of ZooKeeper's: the connection is closed then."""


class Request(NamedTuple):
    """A request as bytes, and how its answer is read: from there on."""

    type: int
    body: bytes
    deserialize: Callable[[bytes, int], Any]

    def serialize(self) -> bytes:
        """Return all but the header."""
        return self.body


def packed_acl(acl: Any) -> bytes:
    """Return the rights on a node, in the form in which `line_up` takes them."""
    rights = (INT.pack(right.perms) + write_string(right.id.scheme) + write_string(right.id.id) for right in acl)
    return INT.pack(len(acl)) + b"".join(rights)


def line_up(path: str, told: bytes, acl: bytes) -> Request:
    """Make a node of this session, with a number at its end. The answer: its name, and the number of the change."""
    return Request(CREATE, b"".join((_text(path), INT.pack(len(told)), told, acl, FLAGS)), _made)


def children(path: str) -> Request:
    """Look who is there. The answer: their names."""
    return Request(CHILDREN, _text(path) + b"\0", _names)


def watch(path: str, zxid: int) -> Request:
    """Watch a node. The answer says nothing: if it is gone, or was changed later than that, the watch fires at once.

    It is what clients tell a server to which they have just changed over.
    """
    return Request(SET_WATCHES, b"".join((LONG.pack(zxid), INT.pack(1), _text(path), NO_OTHERS)), _nothing)


def pass_on(path: str) -> Request:
    """Write to a node and take it away, in one step. The answer: None, or the error of the first that failed."""
    node = _text(path)
    steps = SET_STEP, node, INT.pack(0), ANY_VERSION, DELETE_STEP, node, ANY_VERSION, NO_STEP
    return Request(MULTI, b"".join(steps), _first_error)


def fired(message: bytes) -> tuple[int, str]:
    """Return what an event says: what happened, and to which node."""
    kind, _, length = EVENT.unpack_from(message, HEAD.size)
    begin = HEAD.size + EVENT.size
    return kind, message[begin : begin + length].decode()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return INT.pack(len(encoded)) + encoded


def _nothing(_message: bytes, _start: int) -> bool:
    return True


def _made(message: bytes, start: int) -> tuple[str, int]:
    begin = start + 4
    end = begin + INT.unpack_from(message, start)[0]
    return message[message.rindex(b"/", begin, end) + 1 : end].decode(), LONG.unpack_from(message, end)[0]


def _names(message: bytes, start: int) -> list[str]:
    names, unpack = [], INT.unpack_from
    end = start + 4
    for _ in range(unpack(message, start)[0]):
        begin = end + 4
        end = begin + unpack(message, end)[0]
        names.append(message[begin:end].decode())
    return names


def _first_error(message: bytes, start: int) -> Exception | None:
    if STEP.unpack_from(message, start)[0] != FAILED:
        return None
    return error_of(INT.unpack_from(message, start + STEP.size)[0])


def error_of(code: int) -> Exception:
    """Return kazoo's error for a code of ZooKeeper's; a newer server has codes that kazoo does not know."""
    error: Exception = EXCEPTIONS[code]() if code in EXCEPTIONS else ZookeeperError(f"code {code}")
    return error
