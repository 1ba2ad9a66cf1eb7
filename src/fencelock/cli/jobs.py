"""`fencelock jobs`: the schedules, when they run next, and how their last runs ended."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fencelock.cli.codes import SHORT_TABLE
from fencelock.cli.errors import write_error, write_output
from fencelock.cli.ls import columns
from fencelock.cli.options import Parser, add_look, connect
from fencelock.cli.show import dump, duration, printable, write_engine

if TYPE_CHECKING:
    from datetime import datetime

    from fencelock.primitives.schedule import Job

DESCRIPTION = """\
List the schedules that have been used, by name: the next slot, and the last
run. Times are in UTC."""


def parser() -> Parser:
    """Return the parser of its arguments."""
    parser = Parser("jobs", DESCRIPTION, SHORT_TABLE)
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that begin with this")
    add_look(parser)
    return parser


def main(argv: list[str]) -> int:
    """Print a table, or JSON."""
    from fencelock.primitives.schedule import jobs
    from fencelock.runtime.blocking import run_sync

    options = parser().parse_args(argv)
    with connect(options) as locks:
        found = [job for job in run_sync(jobs(locks._client)) if job.name.startswith(options.prefix)]
        engine = locks._url
    if options.json:
        dump({"engine": engine, "jobs": [_as_json(job) for job in found]})
        return 0
    write_engine(engine)
    if not found:
        if sys.stdout is not None and sys.stdout.isatty():
            write_error("no schedule has been used here")
        return 0
    rows = [("NAME", "SCHEDULE", "NEXT", "LAST SLOT", "OUTCOME", "ATTEMPT", "DURATION", "OWNER"), *map(_row, found)]
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell + " " * (width - columns(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    write_output("".join(f"{line}\n" for line in lines))
    return 0


def _row(job: Job) -> tuple[str, ...]:
    last = job.last
    return (
        printable(job.name),
        printable(job.expression),
        _time(job.next) or "-",
        _time(last and last.time) or "-",
        "-" if last is None else last.outcome.value,
        "-" if last is None else str(last.attempt),
        "-" if last is None else duration(last.duration),
        "-" if last is None else printable(last.owner),
    )


def _as_json(job: Job) -> dict[str, Any]:
    last = job.last
    return {
        "name": job.name,
        "schedule": job.expression,
        "next": _time(job.next),
        "last": None
        if last is None
        else {
            "slot": last.slot,
            "outcome": last.outcome.value,
            "attempt": last.attempt,
            "owner": last.owner,
            "token": last.token,
            "started": _time(last.started),
            "ended": _time(last.ended),
            "duration": last.duration,
            "error": last.error,
            "triggered": last.triggered,
        },
    }


def _time(time: datetime | None) -> str | None:
    return None if time is None else f"{time:%Y-%m-%dT%H:%M:%SZ}"
