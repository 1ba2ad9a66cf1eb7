"""`fencelock watch NAME`: a line for the current state of a lock, and one for each change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.errors import write_output
from fencelock.cli.options import Parser, add_look, connect
from fencelock.cli.show import as_json, printable, state, write_engine

if TYPE_CHECKING:
    from fencelock.model import Snapshot

DESCRIPTION = """\
Print the state of a lock, then a line for each change, until it is interrupted.
States that last less than a second may be skipped. While the engine cannot be
reached, it is tried again."""


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser("watch", DESCRIPTION, SHORT_TABLE)
    parser.add_name()
    add_look(parser)
    return parser


def main(argv: list[str]) -> int:
    """Print lines of text or of JSON."""
    import json
    from datetime import UTC, datetime

    options = parser().parse_names(argv)
    with connect(options) as locks:
        if not options.json:
            write_engine(locks._url)
        for snapshot in locks.watch(options.name):
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            fields = {"time": time, "engine": locks._url, **as_json(snapshot, locks.traits.fair)}
            write_output(f"{json.dumps(fields) if options.json else f'{time} {_line(snapshot)}'}\n")
    return 0


def _line(snapshot: Snapshot) -> str:
    holders = [
        f"{printable(holder.owner)} (token {holder.token}{f', value {holder.value!r}' if holder.value else ''})"
        for holder in snapshot.holders
    ]
    by = f" by {', '.join(holders)}" if holders else ""
    return f"{printable(snapshot.name)}: {state(snapshot)}{by}; {len(snapshot.waiters)} waiting"
