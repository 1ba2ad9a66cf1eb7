"""ZooKeeper's protocol without I/O: frames, replies and errors. kazoo encodes requests and decodes what they return."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from kazoo import exceptions as kazoo_errors
from kazoo.protocol import serialization as codec

from fencelock.core.runtime import NO_REPLY, Event, NoReply
from fencelock.errors import EngineUnavailable, FencelockError, OutcomeUnknown

EPHEMERAL, EPHEMERAL_SEQUENTIAL, CONTAINER = 1, 3, 4
"""Flags of a new node."""
WATCH_XID, AUTH_XID = -1, -4
DELETED = 2
"""The type of the event for a deleted node."""
MAX_FRAME = 64 * 1024 * 1024
"""A longer frame is not ZooKeeper's: its own limit is 1 MB for a node, and a list of children is some MB."""
NOT_EXECUTED = (0, -2)
"""The errors that a failed transaction gives for the steps before and after the one that failed."""

NO_OUTCOME = (
    kazoo_errors.ConnectionLoss,
    kazoo_errors.SessionExpiredError,
    kazoo_errors.SessionMovedError,
    kazoo_errors.UnknownSessionError,
)
"""The errors after which the request may or may not have been carried out."""


class Malformed(ValueError):
    """The server sent bytes that are not ZooKeeper's protocol. The connection is closed."""


class CreateContainer(codec.Create2):  # type: ignore[misc]
    """Creates a node that ZooKeeper removes after its last child is gone; kazoo does not have this request."""

    type = 19


class CloseSession(codec.Close):  # type: ignore[misc]
    """Ends the session. kazoo's has no decoder for the empty reply."""

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> bool:  # noqa: ARG003
        """Return that it is done."""
        return True


class MultiFailed(NamedTuple):
    """What `Multi` decodes if the transaction was not carried out: which step failed, and why."""

    step: int
    error: Exception


class Multi(codec.Transaction):  # type: ignore[misc]
    """A transaction. kazoo's own fails on error codes that it does not know.

    Servers reply to a Create2 in it as to a Create, without the node's stat: only a SetData tells the transaction's number.
    """

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> list[Any] | MultiFailed:
        """Return the result of each step, or MultiFailed."""
        results: list[Any] = []
        while True:
            kind, done, _ = codec.multiheader_struct.unpack_from(data, offset)
            offset += codec.multiheader_struct.size
            if done:
                return results
            result: Any = True
            if kind == -1:
                code = codec.int_struct.unpack_from(data, offset)[0]
                offset += codec.int_struct.size
                if code not in NOT_EXECUTED:
                    return MultiFailed(len(results), error_of(code))
            elif kind == codec.Create.type:
                result, offset = codec.read_string(data, offset)
            elif kind == codec.SetData.type:
                result = codec.SetData.deserialize(data, offset)
                offset += codec.stat_struct.size
            results.append(result)


class Reply:
    """The reply to one request. The thread that reads the connection fills it in; the first outcome counts."""

    __slots__ = ("_event", "_on_done", "done", "error", "failed_step", "value")

    def __init__(self, event: Event | None = None, on_done: Callable[[Reply], None] | None = None) -> None:
        self._event = event
        self._on_done = on_done
        self.done = False
        self.error: Exception | None = None
        self.failed_step: int | None = None
        """The step of a transaction that `error` belongs to."""
        self.value: Any = None

    def resolve(self, value: Any = None, error: Exception | None = None) -> None:
        """Store the outcome and wake the waiting caller."""
        if not self.done:
            if isinstance(value, MultiFailed):
                self.failed_step, error = value
            self.value, self.error, self.done = value, error, True
            if self._on_done is not None:
                self._on_done(self)
            if self._event is not None:
                self._event.set()

    @property
    def no_node(self) -> bool:
        """Whether the node, or its parent, does not exist."""
        return isinstance(self.error, kazoo_errors.NoNodeError)

    @property
    def node_exists(self) -> bool:
        """Whether the node to create exists already."""
        return isinstance(self.error, kazoo_errors.NodeExistsError)

    @property
    def bad_version(self) -> bool:
        """Whether the node has another version than the expected one."""
        return isinstance(self.error, kazoo_errors.BadVersionError)

    @property
    def answered(self) -> bool:
        """Whether the server has replied, with a result or with an error."""
        return self.done and not isinstance(self.error, NO_OUTCOME)

    def get(self) -> Any:
        """Return the result, or raise a FencelockError."""
        if self.error is not None:
            raise translate(self.error) from self.error
        return self.value


def error_of(code: int) -> Exception:
    """Return kazoo's error for an error code. A newer server has codes that kazoo does not know."""
    known = kazoo_errors.EXCEPTIONS
    error: Exception = known[code]() if code in known else kazoo_errors.ZookeeperError(f"code {code}")
    return error


def translate(error: Exception) -> FencelockError:
    """Return our error for an error of kazoo's."""
    if isinstance(error, NO_OUTCOME):
        return OutcomeUnknown("the connection to ZooKeeper broke, or its session ended, before the reply came")
    if isinstance(error, kazoo_errors.NoAuthError):
        return EngineUnavailable(
            "ZooKeeper refuses: no rights on this node; log in as the user who created the namespace (user:password@ in "
            "the URL)"
        )
    if isinstance(error, kazoo_errors.AuthFailedError):
        return EngineUnavailable("ZooKeeper refuses the login")
    if isinstance(error, kazoo_errors.UnimplementedError):
        return EngineUnavailable("this ZooKeeper does not know containers; 3.5 or later is needed")
    return EngineUnavailable(f"ZooKeeper refuses: {type(error).__name__.removesuffix('Error')} {error}".rstrip())


class FrameParser:
    """`fencelock.core.runtime.Parser`: cuts the stream into frames."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._unread += data

    def gets(self) -> bytes | NoReply:
        """Return the next complete frame, or NO_REPLY."""
        unread = self._unread
        if len(unread) < 4:
            return NO_REPLY
        end = 4 + codec.int_struct.unpack_from(unread)[0]
        if not 4 <= end <= MAX_FRAME:
            raise Malformed(f"a frame of {end - 4} bytes")
        if len(unread) < end:
            return NO_REPLY
        found = bytes(unread[4:end])
        del unread[:end]
        return found


def frame(request: Any, xid: int | None) -> bytes:
    """Return the bytes of a request; the first request of a connection has no header (None)."""
    body = request.serialize()
    header = b"" if xid is None else codec.int_int_struct.pack(xid, request.type)
    return b"".join((codec.int_struct.pack(len(header) + len(body)), header, body))


def decode(decoder: Callable[[bytes, int], Any], message: bytes, offset: int = codec.reply_header_struct.size) -> Any:
    """Return what one of kazoo's decoders finds in a message, behind the header; raise Malformed."""
    try:
        return decoder(message, offset)
    except (struct.error, ValueError, IndexError) as problem:
        raise Malformed(f"a message that ends too early: {problem}") from problem
