"""What a server's errors mean: the one place that translates them."""

from __future__ import annotations

from fencelock.errors import EngineUnavailable, FencelockError, InvalidName, OutcomeUnknown

COMMAND = "fencelock schema --apply"

HINTS = {
    "25006": "it is a replica, or read-only: connect to the primary",
    "28P01": "the user or the password is wrong: look at the URL, PGPASSWORD and ~/.pgpass",
    "42501": f"the user lacks the right: have `{COMMAND}` run by one who may create a schema, and see the grants in "
    "docs/engines/postgres.md",
    "53100": "its disk is full",
    "53200": "it is out of memory",
    "53300": "it has no connection left: raise max_connections, close some, or put PgBouncer between",
    "FL001": "ALTER ROLE … SET default_transaction_isolation = 'read committed'",
    "FL002": "use another database, or the same release of fencelock everywhere",
}
LOGIN_MESSAGES = {
    "password authentication failed": "28P01",
    "too many clients": "53300",
    "too many connections": "53300",
    "remaining connection slots": "53300",
}
"""The SQLSTATE for a message: libpq reports only the message of a failed login."""
MISSING = frozenset({"3F000", "42P01", "42883"})
"""The schema, a table or a function does not exist."""
RETRYABLE = frozenset({"40001", "40P01", "55P03", "57014"})
"""Serialization failure, deadlock, the role's own lock_timeout or statement_timeout: nothing changed; a retry may help."""
UNKNOWN_STATEMENT = "26000"
"""A prepared statement does not exist: a pooler gave the session to others. Another connection helps."""
COLLISION = "FL003"
FORBIDDEN = "42501"
FORBIDDEN_HINTS = {
    "permission denied for database": HINTS[FORBIDDEN],
    "permission denied for": "the schema is there and the user lacks rights in it: have its owner run the GRANTs in "
    "docs/engines/postgres.md",
    "terminat": "only members of its role, or of pg_signal_backend, may end another role's session, and only superusers a "
    "superuser's",
}
"""The hint for a missing right, by a part of the server's message, which alone names the right. The first match counts."""


class ServerError(Exception):
    """An error that the server returned."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


def translate(error: ServerError, address: str) -> FencelockError:
    """Return the error to raise `from` the server's."""
    message = f"{address}: {error}"
    if error.state.startswith(("08", "57P")):  # it ended the session, perhaps after it had committed the statement
        return OutcomeUnknown(message)
    if error.state == COLLISION:
        return InvalidName(
            f"this name and another one in use cannot be told apart by their hash: {error}; use another name"
        )
    hint = HINTS.get(error.state)
    if error.state == FORBIDDEN:
        hint = next((found for part, found in FORBIDDEN_HINTS.items() if part in str(error)), hint)
    return EngineUnavailable(f"{message} ({hint})" if hint else message)
