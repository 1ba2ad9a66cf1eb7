"""`fencelock show NAME`: who holds a lock and who waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.errors import write_error, write_output
from fencelock.cli.options import Parser, add_look, connect

if TYPE_CHECKING:
    from fencelock.model import Holder, Snapshot, Waiter


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser(
        "show", "Show who holds a lock and who waits for it, in order of service if there is one.", SHORT_TABLE
    )
    parser.add_name()
    add_look(parser)
    return parser


def main(argv: list[str]) -> int:
    """Print the lock as text or as JSON."""
    options = parser().parse_names(argv)
    with connect(options) as locks:
        snapshot, fair, engine = locks.inspect(options.name), locks.traits.fair, locks._url
    if options.json:
        dump({"engine": engine, **as_json(snapshot, fair)})
        return 0
    write_engine(engine)
    lines = [f"{printable(snapshot.name)}: {state(snapshot)}\n"]
    if len(snapshot.limits) > 1:
        limits = " and ".join(map(str, snapshot.limits))
        lines.append(f"  contenders use the limits {limits}: each respects its own\n")
    lines += [f"  held by {describe(holder)}\n" for holder in snapshot.holders]
    for position, waiter in enumerate(snapshot.waiters, 1):
        number = f", number {position} in line" if fair else ""  # without fairness the queue has no order
        lines.append(f"  waiting{number}: {printable(waiter.owner)}{_mode(waiter)}\n")
    write_output("".join(lines))
    return 0


def state(snapshot: Snapshot) -> str:
    """Return how a lock is held: free, held, shared, or the number of permits that are taken."""
    holders = snapshot.holders
    if not holders or holders[0].limit is None:
        return "free" if not holders else "held" if holders[0].mode == "exclusive" else "shared"
    return f"{len(holders)} of {' or '.join(map(str, snapshot.limits))} permits"


def write_engine(url: str) -> None:
    """Write the engine to stderr. `url` has no password."""
    write_error(f"engine {url}")


def describe(holder: Holder) -> str:
    """Return a holder as text."""
    expires = f"expires in {duration(holder.expires_in)}"
    return f"{printable(holder.owner)}, token {holder.token}{held(holder)}, {expires}{_mode(holder)}"


def held(holder: Holder) -> str:
    """Return how long the holder has held the lock, as text, or "" if the engine does not record it."""
    return "" if holder.held_for is None else f", held for {duration(holder.held_for)}"


def _mode(claim: Holder | Waiter) -> str:
    mode = {"exclusive": "", "shared": ", shared"}.get(claim.mode, f", one of {claim.limit} permits")
    return f"{mode}, value {claim.value!r}" if claim.value else mode


def as_json(snapshot: Snapshot, fair: bool) -> dict[str, object]:
    """Return a lock for --json. Keys may be added, never renamed."""
    waiters = enumerate(snapshot.waiters, 1)
    return {
        "name": snapshot.name,
        "token": snapshot.token,
        "holders": [holder_json(holder) for holder in snapshot.holders],
        "waiters": [{**_claim_json(waiter), "position": n if fair else None} for n, waiter in waiters],
        "limits": list(snapshot.limits),
    }


def holder_json(holder: Holder) -> dict[str, object]:
    """Return a holder for --json."""
    held_for = None if holder.held_for is None else round(holder.held_for, 3)
    return {**_claim_json(holder), "token": holder.token, "held_for": held_for}


def _claim_json(claim: Holder | Waiter) -> dict[str, object]:
    return {
        "owner": claim.owner,
        "expires_in": round(claim.expires_in, 3),
        "mode": claim.mode.value,
        "limit": claim.limit,
        "value": claim.value,
    }


def dump(document: object) -> None:
    """Write JSON to stdout."""
    import json

    write_output(json.dumps(document, indent=2) + "\n")


def duration(seconds: float | None) -> str:
    """Return a duration as text.

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
    """Return a name or an owner for a terminal: unchanged, or quoted and escaped if it has control characters."""
    return text if text.isprintable() else ascii(text)
