"""The schema `fencelock`: made on first use, or by `fencelock schema`; its version is compared, never migrated silently."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

from fencelock.core.clock import PATIENT, Deadline
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.link import Link, Row, Statement, connect
from fencelock.engines.postgres.place import Place
from fencelock.engines.postgres.trouble import AGAIN, MISSING, ServerError, translate
from fencelock.errors import EngineUnavailable

LAYOUT = 1
APPLY_SECONDS = 60.0
TRIES = 20
"""How often a greeting is repeated that others' make fail, as they do where the default isolation is serializable."""
ADVISORY_SINCE = 140000
"""The first server that can end an idle session, and knows since when one waits for a lock."""

GREET = Statement(
    "fl_greet",
    "SELECT version, pg_catalog.pg_backend_pid(), pg_catalog.current_setting('default_transaction_isolation'), "
    "pg_catalog.current_setting('idle_session_timeout', true), pg_catalog.current_setting('fsync'), fencelock.greet() "
    "FROM fencelock.layout",
)
THERE = Statement(
    "fl_there",
    "SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace "
    "WHERE n.nspname = 'fencelock' AND c.relname = 'layout'",
)
GRANTS = """\
GRANT USAGE ON SCHEMA fencelock TO app;
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fencelock TO app;
GRANT SELECT, USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA fencelock TO app;
"""
ISOLATION = Statement("fl_isolation", "SET default_transaction_isolation = 'read committed'")


@cache
def script(advisory: bool = True) -> str:
    """Return all that makes the schema, in one transaction that sees what others have made while it waited for them."""
    folder = files("fencelock.engines.postgres") / "sql"
    parts = ("tables", "mint", "rows", "records", *(("advisory",) if advisory else ()), "version")
    text = "\n".join((folder / f"{part}.sql").read_text("utf-8") for part in parts)
    return f"BEGIN ISOLATION LEVEL READ COMMITTED;\n{text}COMMIT;\n"


class DatabaseSchema:
    """`fencelock.core.engine.Schema` of one database."""

    def __init__(self, runtime: Runtime, place: Place) -> None:
        self._runtime = runtime
        self._place = place

    def text(self) -> str:
        """Return the script, for people to read and run."""
        return script()

    def grants(self) -> str:
        """Return what another role needs."""
        return GRANTS

    async def apply(self) -> bool:
        """Make the schema; return whether it was not there."""
        link = await connect(self._runtime, self._place, [])
        try:
            there = bool(await link.request(THERE, (), APPLY_SECONDS))
            await apply(link, self._place.address, APPLY_SECONDS)
            await before_tls(link, self._place.address, APPLY_SECONDS)
        finally:
            if link.open:
                link.close()
        return not there


async def apply(link: Link, address: str, timeout: float) -> None:
    """Make the schema, unless it is there; whoever else does the same waits."""
    try:
        await link.script(script(link.version >= ADVISORY_SINCE), timeout)
    except ServerError as error:
        raise translate(error, address) from error


class Settings(NamedTuple):
    """What a new session says of the server's settings."""

    idle_session_timeout: str
    weakness: str
    """The setting that lets the server forget commits in a crash, or nothing."""


async def before_tls(link: Link, address: str, timeout: float, limit: Deadline = PATIENT) -> Settings:
    """Make sure of the schema and of what the session needs; return the settings that matter."""
    encoding = link.setting("server_encoding")
    if encoding not in ("UTF8", "SQL_ASCII"):
        raise EngineUnavailable(f"{address}: the database's encoding is {encoding}, and names need UTF8")
    try:
        rows = await _greet(link, address, timeout, limit)
        if [row[0] for row in rows] != [b"%d" % LAYOUT]:
            versions = ", ".join(sorted((row[0] or b"").decode() for row in rows)) or "none"
            raise EngineUnavailable(
                f"{address}: the schema fencelock was made by another release of fencelock (layout {versions}, this one has "
                f"{LAYOUT}); use another database, or the same release everywhere"
            )
        ((_, pid, isolation, idle, fsync, _),) = rows
        link.pid = int(pid or 0)
        link.direct = link.pid == link.claimed_pid
        if isolation != b"read committed" and link.direct:
            await link.request(ISOLATION, (), limit.at_most(timeout))
    except ServerError as error:
        raise translate(error, address) from error
    return Settings((idle or b"0").decode(), "" if fsync == b"on" else "fsync is off; set it to on")


async def _greet(link: Link, address: str, timeout: float, limit: Deadline) -> list[Row]:
    """Greet the server; if it does not know us, make the schema first."""
    tries = TRIES
    while True:
        tries -= 1
        try:
            return await link.request(GREET, (), limit.at_most(timeout))
        except ServerError as error:
            if error.state not in AGAIN | MISSING or not tries:
                raise
            if error.state in MISSING:
                await apply(link, address, limit.at_most(timeout))
