"""The schema `fencelock`: created on first use or by `fencelock schema`. Its version is checked, never migrated silently."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.connection import PostgresConnection, Row, Statement, connect
from fencelock.engines.postgres.errors import MISSING, RETRYABLE, ServerError, translate
from fencelock.engines.postgres.url import PostgresUrl
from fencelock.errors import EngineUnavailable

LAYOUT = 2
APPLY_TIMEOUT = 60.0
MAX_TRIES = 20
"""How often a handshake runs that fails because of others', as happens if the default isolation is serializable."""
ADVISORY_SINCE = 140000
"""The first server version that can end idle sessions, and reports since when a session waits for a lock."""

HANDSHAKE = Statement(
    "fl_handshake",
    "SELECT version, pg_catalog.pg_backend_pid(), pg_catalog.current_setting('default_transaction_isolation'), "
    "pg_catalog.current_setting('idle_session_timeout', true), pg_catalog.current_setting('fsync'), fencelock.handshake() "
    "FROM fencelock.layout",
)
LAYOUT_EXISTS = Statement(
    "fl_layout_exists",
    "SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace "
    "WHERE n.nspname = 'fencelock' AND c.relname = 'layout'",
)
GRANTS = """\
GRANT USAGE ON SCHEMA fencelock TO app;
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fencelock TO app;
GRANT SELECT, USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA fencelock TO app;
"""
SET_ISOLATION = Statement("fl_set_isolation", "SET default_transaction_isolation = 'read committed'")


@cache
def script(advisory: bool = True) -> str:
    """Return the script that creates the schema in one transaction.

    READ COMMITTED lets it see what concurrent runs committed while it waited for them.
    """
    folder = files("fencelock.engines.postgres") / "sql"
    parts = ("tables", "mint", "rows", "records", "rates", *(("advisory",) if advisory else ()), "version")
    text = "\n".join((folder / f"{part}.sql").read_text("utf-8") for part in parts)
    return f"BEGIN ISOLATION LEVEL READ COMMITTED;\n{text}COMMIT;\n"


class DatabaseSchema:
    """`fencelock.core.engine.Schema` of one database."""

    def __init__(self, runtime: Runtime, url: PostgresUrl) -> None:
        self._runtime = runtime
        self._url = url

    def text(self) -> str:
        """Return the script, for people to read and run."""
        return script()

    def grants(self) -> str:
        """Return the statements that grant another role its rights."""
        return GRANTS

    async def apply(self) -> bool:
        """Create the schema; return False if it existed already."""
        connection = await connect(self._runtime, self._url)
        try:
            existed = bool(await connection.request(LAYOUT_EXISTS, (), APPLY_TIMEOUT))
            await apply(connection, self._url.address, APPLY_TIMEOUT)
            await handshake(connection, self._url.address, APPLY_TIMEOUT)
        finally:
            if connection.open:
                connection.close()
        return not existed


async def apply(connection: PostgresConnection, address: str, timeout: float) -> None:
    """Create the schema unless it exists; concurrent calls wait for each other."""
    try:
        await connection.script(script(connection.version >= ADVISORY_SINCE), timeout)
    except ServerError as error:
        raise translate(error, address) from error


async def handshake(connection: PostgresConnection, address: str, timeout: float) -> tuple[str, str]:
    """Check the encoding and the schema, and prepare the session.

    Return its idle_session_timeout, and the setting that lets the server lose commits in a crash, or an empty string.
    """
    encoding = connection.setting("server_encoding")
    if encoding not in ("UTF8", "SQL_ASCII"):
        raise EngineUnavailable(f"{address}: the database's encoding is {encoding}, and names need UTF8")
    try:
        rows = await _handshake(connection, address, timeout)
        if [row[0] for row in rows] != [b"%d" % LAYOUT]:
            versions = ", ".join(sorted((row[0] or b"").decode() for row in rows)) or "none"
            raise EngineUnavailable(
                f"{address}: the schema fencelock was made by another release of fencelock (layout {versions}, this one has "
                f"{LAYOUT}); use another database, or the same release everywhere"
            )
        ((_, pid, isolation, idle, fsync, _),) = rows
        connection.pid = int(pid or 0)
        connection.direct = connection.pid == connection.claimed_pid
        if isolation != b"read committed" and connection.direct:
            await connection.request(SET_ISOLATION, (), timeout)
    except ServerError as error:
        raise translate(error, address) from error
    return (idle or b"0").decode(), "" if fsync == b"on" else "fsync is off; set it to on"


async def _handshake(connection: PostgresConnection, address: str, timeout: float) -> list[Row]:
    """Run the handshake; if the schema is missing or incomplete, create it first."""
    tries = MAX_TRIES
    while True:
        tries -= 1
        try:
            return await connection.request(HANDSHAKE, (), timeout)
        except ServerError as error:
            if error.state not in RETRYABLE | MISSING or not tries:
                raise
            if error.state in MISSING:
                await apply(connection, address, timeout)
