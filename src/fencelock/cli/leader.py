"""`fencelock leader NAME`: the value of the leader of an election."""

from __future__ import annotations

import sys

from fencelock.cli.codes import NO_LEADER, SHORT_TABLE
from fencelock.cli.errors import write_error, write_output
from fencelock.cli.options import Parser, add_look, connect
from fencelock.cli.show import dump, printable


def parser() -> Parser:
    """Return the parser of its arguments."""
    codes = SHORT_TABLE.replace("done\n", "done\n  1    nobody leads\n", 1)
    parser = Parser("leader", "Print the value of the leader of an election.", codes)
    parser.add_name("the election's name")
    add_look(parser)
    return parser


def main(argv: list[str]) -> int:
    """Print the value, or the leader as JSON."""
    options = parser().parse_names(argv)
    with connect(options) as locks:
        leader = locks.election(options.name).leader()
    if options.json:
        dump(None if leader is None else leader._asdict())
    elif leader is None:
        write_error(f"nobody leads {options.name!r}")
    else:
        at_terminal = sys.stdout is not None and sys.stdout.isatty()
        write_output(f"{printable(leader.value) if at_terminal else leader.value}\n")
    return NO_LEADER if leader is None else 0
