"""The commands that look at an engine (`jobs`, `ls`, `show`, `watch`, `leader`), and `release`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fencelock.cli.codes import LEADER_CODES, NO_LEADER, OUTPUT_CODES
from fencelock.cli.errors import printable, write_error, write_output
from fencelock.cli.options import Parser, connect

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence
    from datetime import datetime

    from fencelock.model import Holder, Snapshot, Waiter
    from fencelock.primitives.schedule import Job

JOB_COLUMNS = ("NAME", "SCHEDULE", "NEXT", "LAST SLOT", "OUTCOME", "ATTEMPT", "DURATION", "OWNER")
LOCK_COLUMNS = ("NAME", "STATE", "HOLDER", "VALUE", "HELD FOR", "TOKEN", "EXPIRES IN", "WAITERS")

WATCH = """\
Print the state of a lock, then a line for each change, until it is interrupted.
States that last less than a second may be skipped. While the engine cannot be
reached, it is tried again."""

RELEASE = """\
Take a lock away from its holder and grant it to the next waiter. The old holder
finds out at its next renewal at the latest and may continue until then: fences
refuse it, as every later token is higher; a resource without a fence is not
protected. This is rarely needed: the lock of a process that died expires by
itself."""


def jobs(argv: list[str]) -> int:
    """`fencelock jobs`: list the schedules, when they run next, and how their last runs ended."""
    from fencelock.primitives.schedule import jobs
    from fencelock.runtime.blocking import run_sync

    description = "List the schedules that have been used, by name: the next slot, and the last\nrun. Times are in UTC."
    options = _parse_list("jobs", description, "fencelock jobs", argv)
    with connect(options) as locks:
        found = [job for job in run_sync(jobs(locks._client)) if job.name.startswith(options.name)]
    if options.json:
        _write_json({"engine": locks._url, "jobs": [_job_json(job) for job in found]})
    else:
        _write_table(locks._url, [JOB_COLUMNS, *map(_job_row, found)], "no schedule has been used here", options)
    return 0


def ls(argv: list[str]) -> int:
    """`fencelock ls`: list the locks that are held or waited for."""
    options = _parse_list("ls", "List the locks that are held or waited for.", "fencelock ls order:", argv)
    with connect(options) as locks:
        snapshots = [locks.inspect(name) for name in locks.names(options.name)]
        fair = locks.traits.fair
    found = [snapshot for snapshot in snapshots if snapshot.holders or snapshot.waiters]
    if options.json:
        _write_json({"engine": locks._url, "locks": [_lock_json(snapshot, fair) for snapshot in found]})
    else:
        _write_table(locks._url, [LOCK_COLUMNS, *map(_lock_row, found)], "no lock is held", options)
    return 0


def show(argv: list[str]) -> int:
    """`fencelock show NAME`: print who holds a lock and who waits for it."""
    description = "Show who holds a lock and who waits for it, in order of service if there is one."
    options = _parse_name("show", description, "fencelock show nightly-report", argv)
    with connect(options) as locks:
        snapshot, fair = locks.inspect(options.name), locks.traits.fair
    if options.json:
        _write_json({"engine": locks._url, **_lock_json(snapshot, fair)})
        return 0
    _write_engine(locks._url)
    lines = [f"{printable(snapshot.name)}: {_state(snapshot)}\n"]
    if len(snapshot.limits) > 1:
        limits = " and ".join(map(str, snapshot.limits))
        lines.append(f"  contenders use the limits {limits}: each respects its own\n")
    lines += [f"  held by {describe(holder)}\n" for holder in snapshot.holders]
    for position, waiter in enumerate(snapshot.waiters, 1):
        number = f", number {position} in line" if fair else ""  # without fairness the queue has no order
        lines.append(f"  waiting{number}: {printable(waiter.owner)}{_mode(waiter)}\n")
    write_output("".join(lines))
    return 0


def watch(argv: list[str]) -> int:
    """`fencelock watch NAME`: print a line for the current state of a lock, and one for each change."""
    from datetime import UTC, datetime

    options = _parse_name("watch", WATCH, "fencelock watch nightly-report", argv)
    with connect(options) as locks:
        if not options.json:
            _write_engine(locks._url)
        for snapshot in locks.watch(options.name):
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            if options.json:
                document = {"time": time, "engine": locks._url, **_lock_json(snapshot, locks.traits.fair)}
                _write_json(document, indent=None)
            else:
                write_output(f"{time} {_line(snapshot)}\n")
    return 0


def leader(argv: list[str]) -> int:
    """`fencelock leader NAME`: print the value of the leader of an election."""
    description = "Print the value of the leader of an election."
    options = _parse_name("leader", description, "fencelock leader scheduler", argv, LEADER_CODES)
    with connect(options) as locks:
        leader = locks.election(options.name).leader()
    if options.json:
        _write_json(None if leader is None else leader._asdict())
    elif leader is None:
        write_error(f"nobody leads {options.name!r}")
    else:
        write_output(f"{printable(leader.value) if _at_terminal() else leader.value}\n")
    return NO_LEADER if leader is None else 0


def release(argv: list[str]) -> int:
    """`fencelock release --force NAME --reason TEXT`: take a lock away and print the holders that lost it."""
    example = 'fencelock release nightly-report --force --reason "its host is gone"'
    parser = Parser("release", "NAME --force --reason TEXT [options]", RELEASE, example, OUTPUT_CODES)
    parser.add_name()
    parser.add_argument("--force", action="store_true", help="needed: only a holder itself releases without force")
    parser.add_argument("--reason", metavar="TEXT", default="", help="needed: why, for the log")
    parser.add_argument("--owner", help="who does this, for the log (host:pid)")
    parser.add_engine(json=True)
    options = parser.parse_name(argv)
    name = options.name
    if not options.force:
        parser.error(f"only its holder can release {name!r}; to take it away, give --force and --reason")
    if not options.reason.strip():
        parser.error(f"a forced release of {name!r} needs --reason TEXT, for those who find out later")
    with connect(options, options.owner) as locks:
        holders = locks.inspect(name).holders
        dropped = locks.force_release(name, reason=options.reason)
    if options.json:
        lost = [_claim_json(holder) for holder in holders]
        _write_json({"name": name, "dropped": dropped, "holders": lost, "reason": options.reason})
        return 0
    lines = [f"  dropped {describe(holder)}\n" for holder in holders] if dropped else []
    write_output("".join([f"{printable(name)}: {'released by force' if dropped else 'nobody held it'}\n", *lines]))
    return 0


def _parse_list(command: str, description: str, example: str, argv: list[str]) -> Namespace:
    parser = Parser(command, "[PREFIX] [options]", description, example, OUTPUT_CODES)
    parser.add_argument("names", metavar="PREFIX", nargs="*", help="only names that begin with this")
    parser.add_engine(json=True)
    return parser.parse(argv, most=1)


def _parse_name(command: str, description: str, example: str, argv: list[str], codes: str = OUTPUT_CODES) -> Namespace:
    parser = Parser(command, "NAME [options]", description, example, codes)
    parser.add_name()
    parser.add_engine(json=True)
    return parser.parse_name(argv)


# ---------------------------------------------------------------------- text


def _write_engine(url: str) -> None:
    write_error(f"engine {url}")  # `url` has no password


def _write_table(engine: str, rows: Sequence[tuple[str, ...]], nothing: str, options: Namespace) -> None:
    """Write the rows, of which the first is the header; at a terminal, write `nothing` if there is no other."""
    _write_engine(engine)
    if len(rows) == 1:
        if _at_terminal():
            write_error(nothing + (f" whose name begins with {options.name!r}" if options.name else ""))
        return
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell + " " * (width - columns(cell)) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip() + "\n")
    write_output("".join(lines))


def _at_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def columns(text: str) -> int:
    """Return the width of a text in a terminal: two columns for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    from unicodedata import category, east_asian_width

    return sum(0 if category(c) in ("Mn", "Me") else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _job_row(job: Job) -> tuple[str, ...]:
    planned = (printable(job.name), printable(job.expression), _time(job.next))
    if (last := job.last) is None:
        return (*planned, "-", "-", "-", "-", "-")
    ended = (last.outcome.value, str(last.attempt), _duration(last.duration), printable(last.owner))
    return (*planned, _time(last.time), *ended)


def _lock_row(snapshot: Snapshot) -> tuple[str, ...]:
    holders = snapshot.holders
    return (
        printable(snapshot.name),
        _state(snapshot),
        ", ".join(printable(holder.owner) for holder in holders) or "-",
        ", ".join(printable(holder.value) for holder in holders if holder.value) or "-",
        _duration(max((holder.held_for for holder in holders if holder.held_for is not None), default=None)),
        str(snapshot.token or "-"),
        _duration(max((holder.expires_in for holder in holders), default=None)),
        str(len(snapshot.waiters)),
    )


def _line(snapshot: Snapshot) -> str:
    holders = [
        f"{printable(holder.owner)} (token {holder.token}{f', value {holder.value!r}' if holder.value else ''})"
        for holder in snapshot.holders
    ]
    by = f" by {', '.join(holders)}" if holders else ""
    return f"{printable(snapshot.name)}: {_state(snapshot)}{by}; {len(snapshot.waiters)} waiting"


def _state(snapshot: Snapshot) -> str:
    """Return how a lock is held: free, held, shared, or the number of permits that are taken."""
    holders = snapshot.holders
    if not holders or holders[0].limit is None:
        return "free" if not holders else "held" if holders[0].mode == "exclusive" else "shared"
    return f"{len(holders)} of {' or '.join(map(str, snapshot.limits))} permits"


def describe(holder: Holder) -> str:
    """Return a holder as text."""
    held = "" if holder.held_for is None else f", held for {_duration(holder.held_for)}"
    expires = f"expires in {_duration(holder.expires_in)}"
    return f"{printable(holder.owner)}, token {holder.token}{held}, {expires}{_mode(holder)}"


def _mode(claim: Holder | Waiter) -> str:
    mode = {"exclusive": "", "shared": ", shared"}.get(claim.mode, f", one of {claim.limit} permits")
    return f"{mode}, value {claim.value!r}" if claim.value else mode


def _duration(seconds: float | None) -> str:
    """Return a duration as text.

    >>> [_duration(seconds) for seconds in (None, 28.41, 600, 9000, 400_000)]
    ['-', '28.4 s', '10 min', '2.5 h', '4.6 d']
    """
    if seconds is None:
        return "-"
    if seconds < 300:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.1f} d"


def _time(time: datetime | None) -> str:
    return "-" if time is None else f"{time:%Y-%m-%dT%H:%M:%SZ}"


# ---------------------------------------------------------------------- JSON: keys may be added, never renamed


def _write_json(document: object, indent: int | None = 2) -> None:
    import json

    write_output(json.dumps(document, indent=indent, default=_time) + "\n")


def _lock_json(snapshot: Snapshot, fair: bool) -> dict[str, Any]:
    waiters = enumerate(snapshot.waiters, 1)
    return {
        "name": snapshot.name,
        "token": snapshot.token,
        "holders": [_claim_json(holder) for holder in snapshot.holders],
        "waiters": [{**_claim_json(waiter), "position": n if fair else None} for n, waiter in waiters],
        "limits": list(snapshot.limits),
    }


def _claim_json(claim: Holder | Waiter) -> dict[str, Any]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in claim._asdict().items()}


def _job_json(job: Job) -> dict[str, Any]:
    last = job.last and {**job.last._asdict(), "duration": job.last.duration}
    return {"name": job.name, "schedule": job.expression, "next": job.next, "last": last}
