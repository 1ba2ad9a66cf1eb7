"""What an etcd member's refusal means: whether the request may have run, and what can be done about it."""

from __future__ import annotations

from fencelock.errors import EngineUnavailable, FencelockError, OutcomeUnknown

CANCELLED, UNKNOWN, TIMED_OUT, NOT_FOUND = 1, 2, 4, 5
PRECONDITION, INTERNAL, UNAVAILABLE, UNAUTHENTICATED = 9, 13, 14, 16

MAY_HAVE_RUN = frozenset({CANCELLED, UNKNOWN, TIMED_OUT, INTERNAL, UNAVAILABLE})
"""After these codes the request may have run all the same."""
NOT_RUN = ("no leader", "not capable", "too many requests", "not started")
"""Texts of refusals that come before anything runs. "server stopped" is not among them: a member that stops says it of
proposals that it has made, and the others may carry them out."""
LOG_IN_AGAIN = ("revision of auth store is old", "revision in header is old", "user name is empty")
"""Texts of refusals that a new login helps against: some tokens name a revision of the users and roles, which has changed."""
HINTS = {
    "no leader": "too few of its members are running or see each other",
    "space exceeded": "compact and defragment it, then `etcdctl alarm disarm`",
    "user name is empty": "give user and password in the URL",
    "invalid user ID or password": "user or password is wrong",
    "authentication is not enabled": "it has no users: leave them out of the URL",
    "permission denied": "the user needs a role that may read and write all keys that begin with the prefix and namespace",
}


class LeaseNotFound(EngineUnavailable):
    """The session is gone, so etcd has refused the request."""


class RpcError(Exception):
    """A gRPC status other than OK, of one call. `EtcdClient.run` repeats the call, or raises what `translate` returns."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    def _says(self, texts: tuple[str, ...]) -> bool:
        return any(text in str(self) for text in texts)

    @property
    def may_have_run(self) -> bool:
        """Whether the request may have run all the same."""
        return self.code in MAY_HAVE_RUN and not self._says(NOT_RUN)

    @property
    def retryable(self) -> bool:
        """Whether another member, or the same one a little later, may accept the request."""
        return self.code in MAY_HAVE_RUN or self._says(("too many requests",))

    @property
    def needs_login(self) -> bool:
        """Whether a new login may help: auth tokens expire, and roles change."""
        return self.code == UNAUTHENTICATED or self._says(LOG_IN_AGAIN)

    @property
    def lease_not_found(self) -> bool:
        """Whether the session is gone."""
        return self.code == NOT_FOUND and "lease" in str(self)

    def translate(self, address: str) -> FencelockError:
        """Return the error that the callers of `EtcdClient` see."""
        message = str(self)
        hint = next((hint for text, hint in HINTS.items() if text in message), None)
        text = f"etcd at {address} refused: {message or f'code {self.code}'}" + (f" ({hint})" if hint else "")
        if self.lease_not_found:
            return LeaseNotFound(text)
        return (OutcomeUnknown if self.may_have_run else EngineUnavailable)(text)
