"""Every error that fencelock raises. Each carries the lock's name and says what to do next."""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, without importing it
if TYPE_CHECKING:
    from fencelock.model import LossReason


class FencelockError(Exception):
    """The root of all of fencelock's errors.

    >>> try:
    ...     raise LockTimeout("gave up on 'report' after 5 s", "report")
    ... except FencelockError as error:
    ...     error.name
    'report'
    """

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name
        """The lock that this is about, or None when it is about the engine as a whole."""


class LockTimeout(FencelockError, TimeoutError):
    """The lock was not granted within the time that the caller was ready to wait. Nothing is held, nothing is queued."""


class LeaseLost(FencelockError):
    """The lease is over although its holder was not done: stop touching what it protected."""

    def __init__(self, message: str, name: str | None = None, reason: LossReason | None = None) -> None:
        super().__init__(message, name)
        self.reason = reason
        """How it ended; None if the holder had released it itself."""


class NotHeld(FencelockError):
    """This client does not hold the lock, or not in the mode that the caller needs."""


class WouldDeadlock(FencelockError, RuntimeError):
    """The thread or task would wait for itself: it is inside a `with` block that holds this name.

    Leave the block first, or use `reentrant=True` in both places if they need the same mode.
    """


class RateLimited(FencelockError):
    """The call would exceed a rate limit, and was not charged."""

    def __init__(self, message: str, name: str | None = None, *, retry_after: float = 0.0) -> None:
        super().__init__(message, name)
        self.retry_after = retry_after
        """Seconds after which a call of this cost may go."""


class StaleToken(FencelockError):
    """A fence refused a write: a newer holder has written. Do not repeat it with the same token. `name` is the resource."""

    def __init__(
        self, message: str, name: str | None = None, *, token: int | None = None, seen: int | None = None
    ) -> None:
        super().__init__(message, name)
        self.token = token
        """The token that was refused."""
        self.seen = seen
        """The token that it was compared with, or None if that is not known."""


class KeyInProgress(FencelockError):
    """Somebody else is working under this idempotency key at this moment. Ask again in a while: its result may be there."""


class KeyReused(FencelockError, ValueError):
    """This idempotency key was used before, for something else: another payload. Use a new key for a new request."""


class VersionConflict(FencelockError):
    """What was read has been changed by others before it could be written. Read again, and decide again."""


class BuildFailed(FencelockError):
    """Another process failed to build this value a moment ago. The next try may succeed."""

    def __init__(self, message_text: str, name: str | None = None, *, type: str = "", message: str = "") -> None:
        super().__init__(message_text, name)
        self.type = type
        """The name of the error's class."""
        self.message = message
        """The text of the error."""


class EngineUnavailable(FencelockError, ConnectionError):
    """The engine could not be reached, or refused to work. The driver's own error is the cause.

    >>> print(EngineUnavailable("cannot reach Redis at db:6379", "report"))
    'report': cannot reach Redis at db:6379
    """

    def __str__(self) -> str:
        """Return the message, with the lock's name before it if it is about the engine as a whole."""
        message = super().__str__()
        return message if self.name is None or repr(self.name) in message else f"{self.name!r}: {message}"


class OutcomeUnknown(EngineUnavailable):
    """The request was sent and no answer came: it may or may not have been carried out."""


class ReleaseFailed(EngineUnavailable):
    """The engine did not confirm a release: the lock may still be taken until its ttl ends.

    The work under the lock is done, so there is nothing to repeat: the client goes on trying to release it by itself.
    """


class GuaranteeUnavailable(FencelockError):
    """The engine cannot promise what was asked for, and says so before anything is locked."""


class InvalidArgument(FencelockError, ValueError):
    """An argument that fencelock cannot use. The message names the argument and says what it may be.

    >>> issubclass(InvalidName, InvalidArgument), issubclass(InvalidArgument, ValueError)
    (True, True)
    """


class InvalidType(InvalidArgument, TypeError):
    """An argument of the wrong type, such as an int where a function is needed."""


class InvalidName(InvalidArgument):
    """A lock's name or a namespace that no engine would take."""


class InvalidTTL(InvalidArgument):
    """A time to live that is not a number of seconds within what the engine can keep."""


class InvalidURL(InvalidArgument):
    """A URL that names no engine of this release, or lacks something that its engine needs."""


class MissingDependency(FencelockError, ImportError):
    """The engine's driver is not installed. The message names the extra that brings it."""


class ClientClosed(FencelockError, RuntimeError):
    """The client was closed; connect again."""


class DifferentLoop(FencelockError, RuntimeError):
    """An asyncio client was used from an event loop other than the one that it belongs to."""
