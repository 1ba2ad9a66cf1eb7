"""The schema `fencelock`: made on first use, or by `fencelock schema`; its version is compared, never migrated silently."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fencelock.backends.postgres.link import Link, Statement
from fencelock.backends.postgres.trouble import MISSING, ServerError, translate
from fencelock.errors import EngineUnavailable

LAYOUT = 1
ADVISORY_SINCE = 140000
"""The first server that can end an idle session, and knows since when one waits for a lock."""

GREET = Statement(
    "fl_greet",
    "SELECT version, pg_backend_pid(), current_setting('default_transaction_isolation'), "
    "current_setting('idle_session_timeout', true), fencelock.greet() FROM fencelock.layout",
)
VERSION = Statement("fl_version", "SELECT max(version) FROM fencelock.layout")
ISOLATION = Statement("fl_isolation", "SET default_transaction_isolation = 'read committed'")


@cache
def script(advisory: bool = True) -> str:
    """Return all that makes the schema, one transaction's worth."""
    folder = files("fencelock.backends.postgres") / "sql"
    parts = ("tables", "mint", "rows", *(("advisory",) if advisory else ()), "version")
    return "\n".join((folder / f"{part}.sql").read_text("utf-8") for part in parts)


def printed() -> str:
    """Return the script for people to run."""
    return f"BEGIN;\n{script()}COMMIT;\n"


async def apply(link: Link, address: str, timeout: float) -> None:
    """Make the schema, unless it is there; whoever else does the same waits."""
    try:
        await link.script(script(link.version >= ADVISORY_SINCE), timeout)
    except ServerError as error:
        raise translate(error, address) from error


async def greet(link: Link, address: str, timeout: float) -> str:
    """Make sure of the schema and of what the session needs; return its idle_session_timeout."""
    encoding = link.setting("server_encoding")
    if encoding not in ("UTF8", "SQL_ASCII"):
        raise EngineUnavailable(f"{address}: the database's encoding is {encoding}, and names need UTF8")
    try:
        try:
            rows = await link.ask(GREET, (), timeout)
        except ServerError as error:
            if error.state not in MISSING:
                raise
            await apply(link, address, timeout)
            rows = await link.ask(GREET, (), timeout)
        if [row[0] for row in rows] != [b"%d" % LAYOUT]:
            versions = ", ".join(sorted((row[0] or b"").decode() for row in rows)) or "none"
            raise EngineUnavailable(
                f"{address}: the schema fencelock was made by another release of fencelock (layout {versions}, this one has "
                f"{LAYOUT}); use another database, or the same release everywhere"
            )
        ((_, pid, isolation, idle, _),) = rows
        link.pid = int(pid or 0)
        link.direct = link.pid == link.claimed_pid
        if isolation != b"read committed" and link.direct:
            await link.ask(ISOLATION, (), timeout)
    except ServerError as error:
        raise translate(error, address) from error
    return (idle or b"0").decode()
