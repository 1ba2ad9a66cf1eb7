"""`fencelock release --force NAME --reason TEXT`: take a lock away from its holder."""

from __future__ import annotations

from fencelock.cli.codes import SHORT_TABLE, USAGE
from fencelock.cli.errors import write_error, write_output
from fencelock.cli.options import Parser, add_look, connect
from fencelock.cli.show import describe, dump, holder_json, printable

DESCRIPTION = """\
Take a lock away from its holder and grant it to the next waiter. The old holder
finds out at its next renewal at the latest and may continue until then: fences
refuse it, as every later token is higher; a resource without a fence is not
protected. This is rarely needed: the lock of a process that died expires by
itself."""


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser("release", DESCRIPTION, SHORT_TABLE)
    parser.add_name()
    parser.add_argument("--force", action="store_true", help="needed: only a holder itself releases without force")
    parser.add_argument("--reason", metavar="TEXT", help="needed: why, for the log")
    parser.add_argument("--owner", help="who does this, for the log (host:pid)")
    add_look(parser)
    return parser


def main(argv: list[str]) -> int:
    """Release the lock by force and print the holders that lost it."""
    options = parser().parse_names(argv)
    if not options.force:
        write_error(
            f"only its holder can release {options.name!r}; to take it away, give --force and --reason, after a look at "
            f"`fencelock show`"
        )
        return USAGE
    if not (options.reason or "").strip():
        write_error(f"a forced release of {options.name!r} needs --reason TEXT, for those who find out later")
        return USAGE
    with connect(options, options.owner) as locks:
        holders = locks.inspect(options.name).holders
        dropped = locks.force_release(options.name, reason=options.reason)
    if options.json:
        document = {"name": options.name, "dropped": dropped, "holders": [holder_json(holder) for holder in holders]}
        dump({**document, "reason": options.reason})
        return 0
    lines = [f"{printable(options.name)}: {'released by force' if dropped else 'nobody held it'}\n"]
    if dropped:
        lines += [f"  dropped {describe(holder)}\n" for holder in holders]
    write_output("".join(lines))
    return 0
