"""A history as people read it: one line for each thing that happened, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator

from fencelock.sim.history import History, Kind, Op


def timeline(history: History) -> Iterator[str]:
    """Yield the lines."""
    lines: list[tuple[float, str, str]] = []
    for op in history.ops:
        lines.append(
            (
                op.called,
                op.owner,
                f"asks to {op.kind} {op.name!r}" + (f" (token {op.token})" if op.kind is Kind.RELEASE else ""),
            )
        )
        if op.returned is not None:
            lines.append((op.returned, op.owner, _ending(op)))
        if op.valid_until is not None:
            lines.append((op.valid_until, op.owner, f"no longer believes to hold {op.name!r} (token {op.token})"))
    for write in history.writes:
        verb = "accepts" if write.accepted else "REFUSES"
        what = f"{verb} {write.value} from {write.owner} (token {write.token}), who saw {write.saw}"
        lines.append((write.at, write.resource, what))
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
