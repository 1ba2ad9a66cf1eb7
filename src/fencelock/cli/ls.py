"""`fencelock ls`: the locks that are held or waited for."""

from __future__ import annotations

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.options import Parser, add_engine, engine_url
from fencelock.cli.show import as_json, dump, duration, printable


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser("ls", "List the locks that are held or waited for.", SHORT_TABLE)
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that begin with this")
    add_engine(parser)
    parser.add_argument("--json", action="store_true", help="for programs: the keys are in docs/cli.md")
    return parser


def main(argv: list[str]) -> int:
    """Print a table, or JSON."""
    options = parser().parse_args(argv)
    from fencelock.facade.sync import connect

    with connect(engine_url(options), namespace=options.namespace) as locks:
        snapshots = [locks.inspect(name) for name in locks.names(options.prefix)]
    snapshots = [snapshot for snapshot in snapshots if snapshot.holders or snapshot.waiters]
    if options.json:
        dump({"locks": [as_json(snapshot) for snapshot in snapshots]})
        return 0
    rows = [("NAME", "STATE", "HOLDER", "TOKEN", "EXPIRES IN", "WAITERS")]
    for snapshot in snapshots:
        holders = snapshot.holders
        rows.append(
            (
                printable(snapshot.name),
                "free" if not holders else "shared" if holders[0].shared else "held",
                ", ".join(printable(holder.owner) for holder in holders) or "-",
                str(snapshot.token or "-"),
                duration(max((holder.expires_in for holder in holders), default=None)),
                str(len(snapshot.waiters)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if snapshots:
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
