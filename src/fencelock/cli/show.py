"""`fencelock show NAME`: who holds a lock and who waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.errors import put, say
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
    from fencelock.api.sync import connect

    with connect(engine_url(options), namespace=options.namespace) as locks:
        snapshot, fair, engine = locks.inspect(options.name), locks.traits.fair, locks._url
    if options.json:
        dump({"engine": engine, **as_json(snapshot)})
        return 0
    say_engine(engine)
    lines = [f"{printable(snapshot.name)}: {'held' if snapshot.holders else 'free'}\n"]
    lines += [f"  held by {describe(holder)}\n" for holder in snapshot.holders]
    for place, waiter in enumerate(snapshot.waiters, 1):
        number = f", number {place} in line" if fair else ""  # else whoever is lucky is next
        lines.append(f"  waiting{number}: {printable(waiter.owner)}{_mode(waiter)}\n")
    put("".join(lines))
    return 0


def say_engine(url: str) -> None:
    """Say which engine this is about, on stderr. `url` is without its password."""
    say(f"engine {url}")


def describe(holder: Holder) -> str:
    """Return a holder in words."""
    expires = f"expires in {duration(holder.expires_in)}"
    return f"{printable(holder.owner)}, token {holder.token}{held(holder)}, {expires}{_mode(holder)}"


def held(holder: Holder) -> str:
    """Return how long it has held the lock, in words, or nothing if the engine does not know."""
    return "" if holder.held_for is None else f", held for {duration(holder.held_for)}"


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
    held_for = None if holder.held_for is None else round(holder.held_for, 3)
    return {**_place_json(holder), "token": holder.token, "held_for": held_for}


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
    """Return a time for people.

    >>> [duration(seconds) for seconds in (None, 28.41, 600, 9000, 400_000)]
    ['-', '28.4 s', '10 min', '2.5 h', '4.6 d']
    """
    if seconds is None:
        return "-"
    if seconds < 300:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.1f} d"


def printable(text: str) -> str:
    """Return a name or a label so that it cannot move the cursor or swap directions: as it is, or quoted and escaped."""
    return text if text.isprintable() else ascii(text)
