"""`fencelock show NAME`: who holds a lock and who waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.guard import put
from fencelock.cli.options import Parser, add_engine, engine_url

if TYPE_CHECKING:
    from fencelock.model import Holder, Snapshot, Waiter


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser(
        "show", "Show who holds a lock and who waits for it, in order of service if there is one.", SHORT_TABLE
    )
    parser.add_name()
    add_engine(parser)
    parser.add_argument("--json", action="store_true", help="for programs: the keys are in docs/cli.md")
    return parser


def main(argv: list[str]) -> int:
    """Print it for people, or as JSON."""
    options = parser().parse_named(argv)
    from fencelock.facade.sync import connect

    with connect(engine_url(options), namespace=options.namespace) as locks:
        snapshot, fair = locks.inspect(options.name), locks.traits.fair
    if options.json:
        dump(as_json(snapshot))
        return 0
    lines = [f"{printable(snapshot.name)}: {'held' if snapshot.holders else 'free'}\n"]
    lines += [f"  held by {describe(holder)}\n" for holder in snapshot.holders]
    for place, waiter in enumerate(snapshot.waiters, 1):
        number = f", number {place} in line" if fair else ""  # else whoever is lucky is next
        lines.append(f"  waiting{number}: {printable(waiter.owner)}{_mode(waiter)}\n")
    put("".join(lines))
    return 0


def describe(holder: Holder) -> str:
    """Return a holder in words."""
    return f"{printable(holder.owner)}, token {holder.token}, expires in {duration(holder.expires_in)}{_mode(holder)}"


def _mode(place: Holder | Waiter) -> str:
    if not place.shared:
        return ""
    return ", shared" if place.limit is None else f", one of {place.limit} permits"


def as_json(snapshot: Snapshot) -> dict[str, object]:
    """Return what programs get to see of a lock. Keys are added, never renamed."""
    return {
        "name": snapshot.name,
        "token": snapshot.token,
        "holders": [holder_json(holder) for holder in snapshot.holders],
        "waiters": [_place_json(waiter) for waiter in snapshot.waiters],
    }


def holder_json(holder: Holder) -> dict[str, object]:
    """Return what programs get to see of a holder."""
    return {**_place_json(holder), "token": holder.token}


def _place_json(place: Holder | Waiter) -> dict[str, object]:
    return {
        "owner": place.owner,
        "expires_in": round(place.expires_in, 3),
        "shared": place.shared,
        "limit": place.limit,
    }


def dump(document: object) -> None:
    """Write JSON to stdout."""
    import json

    put(json.dumps(document, indent=2) + "\n")


def duration(seconds: float | None) -> str:
    """Return a time for people."""
    return "-" if seconds is None else f"{seconds:.1f} s"


def printable(text: str) -> str:
    """Return a name or a label so that it cannot move the cursor or swap directions: as it is, or quoted and escaped."""
    return text if text.isprintable() else ascii(text)
