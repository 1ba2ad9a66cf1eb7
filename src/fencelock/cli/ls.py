"""`fencelock ls`: the locks that are held or waited for."""

from __future__ import annotations

import sys

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.errors import write_error, write_output
from fencelock.cli.options import Parser, add_look, connect
from fencelock.cli.show import as_json, dump, duration, printable, state, write_engine


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser("ls", "List the locks that are held or waited for.", SHORT_TABLE)
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that begin with this")
    add_look(parser)
    return parser


def main(argv: list[str]) -> int:
    """Print a table, or JSON."""
    options = parser().parse_args(argv)
    with connect(options) as locks:
        snapshots = [locks.inspect(name) for name in locks.names(options.prefix)]
        engine, fair = locks._url, locks.traits.fair
    snapshots = [snapshot for snapshot in snapshots if snapshot.holders or snapshot.waiters]
    if options.json:
        dump({"engine": engine, "locks": [as_json(snapshot, fair) for snapshot in snapshots]})
        return 0
    write_engine(engine)
    if not snapshots:
        if sys.stdout is not None and sys.stdout.isatty():
            write_error("no lock is held" + (f" whose name begins with {options.prefix!r}" if options.prefix else ""))
        return 0
    rows = [("NAME", "STATE", "HOLDER", "VALUE", "HELD FOR", "TOKEN", "EXPIRES IN", "WAITERS")]
    for snapshot in snapshots:
        holders = snapshot.holders
        rows.append(
            (
                printable(snapshot.name),
                state(snapshot),
                ", ".join(printable(holder.owner) for holder in holders) or "-",
                ", ".join(printable(holder.value) for holder in holders if holder.value) or "-",
                duration(max((holder.held_for for holder in holders if holder.held_for is not None), default=None)),
                str(snapshot.token or "-"),
                duration(max((holder.expires_in for holder in holders), default=None)),
                str(len(snapshot.waiters)),
            )
        )
    lines: list[str] = []
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell + " " * (width - columns(cell)) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    write_output("".join(f"{line}\n" for line in lines))
    return 0


def columns(text: str) -> int:
    """Return the width of a text in a terminal: two columns for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    from unicodedata import category, east_asian_width

    return sum(0 if category(c) in ("Mn", "Me") else 2 if east_asian_width(c) in "WF" else 1 for c in text)
