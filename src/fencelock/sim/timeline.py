"""A history for people: one line for each event, in order of time."""

from __future__ import annotations

from collections.abc import Iterator

from fencelock.sim.history import History, Kind, Op


def timeline(history: History) -> Iterator[str]:
    """Yield the lines of a history."""
    lines: list[tuple[float, str, str]] = []
    for op in history.ops:
        lines.append(
            (
                op.called,
                op.owner,
                f"calls {op.kind} {op.name!r}" + (f" (token {op.token})" if op.kind is Kind.RELEASE else ""),
            )
        )
        if op.returned is not None:
            lines.append((op.returned, op.owner, _ending(op)))
        if op.valid_until is not None:
            lines.append((op.valid_until, op.owner, f"can no longer trust its lease on {op.name!r} (token {op.token})"))
    for write in history.writes:
        verb = "accepts" if write.accepted else "REFUSES"
        what = f"{verb} {write.value} from {write.owner} (token {write.token}), who saw {write.saw}"
        lines.append((write.at, write.resource, what))
    lines += [
        (group.returned, group.owner, f"multi-lock {', '.join(group.names)}: {group.outcome}")
        for group in history.groups
        if group.returned is not None
    ]
    for term in history.terms:
        lines += [(term.start, term.owner, f"begins the work of term {term.token}")]
        lines += [(term.end, term.owner, f"ends the work of term {term.token}")]
    for saw in history.observations:
        leader = "no leader" if saw.token is None else f"{saw.owner} lead term {saw.token} ({saw.value})"
        lines.append((saw.at, saw.observer, f"sees {leader}"))
    for run in history.job_runs:
        what = f"slot {run.slot}, attempt {run.attempt} (token {run.token})"
        lines += [(run.start, run.owner, f"begins {what}"), (run.end, run.owner, f"ends {what}")]
    for build in history.builds:
        lines += [(build.start, build.owner, f"begins build {build.number}")]
        lines += [(build.end, build.owner, f"ends build {build.number}")]
    for call in history.cache_calls:
        result = "an error" if call.value is None else f"build {call.value}"
        lines += [(call.called, call.owner, f"asks for {call.key!r}"), (call.returned, call.owner, f"gets {result}")]
    for stored in history.record_writes:
        lines += [(stored.at, "engine", f"stores {stored.value!r} under {stored.key!r} (token {stored.token})")]
    for reservation in history.reservations:
        ending = (
            "never gets a reply" if reservation.returned is None else f"{reservation.outcome}, {reservation.wait:.4f} s"
        )
        lines += [(reservation.called, reservation.owner, f"reserves a call of {reservation.key!r}: {ending}")]
        if reservation.went is not None:
            lines += [(reservation.went, reservation.owner, f"calls {reservation.key!r}")]
    lines += [(note.at, note.who, note.what) for note in history.notes]
    lines += [
        (left.at, left.owner or "engine", f"still has a {left.role} {left.name}".rstrip()) for left in history.leftovers
    ]
    for at, who, what in sorted(lines, key=lambda line: line[0]):
        yield f"{at:10.4f}  {who:8} {what}"


def _ending(op: Op) -> str:
    if op.valid_from is not None:
        ticket = "" if op.ticket is None else f", ticket {op.ticket}"
        return f"holds {op.name!r} with token {op.token}{ticket}"
    return f"{op.kind} of {op.name!r} ends: {op.outcome}"
