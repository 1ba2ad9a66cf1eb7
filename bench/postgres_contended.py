"""Eight processes on one name, on PostgreSQL, compared with the bare advisory lock."""

from __future__ import annotations

from bench import postgres_peers as peers
from bench.contended import PROCESSES, Make, compare
from bench.harness import Goal, interleaved, with_lock
from tests.servers import Postgres

BARE = "pg_advisory_lock, bare (no ttl)"
ADVISORY = "fencelock advisory"
ROWS = "fencelock rows"


def main(rounds: int) -> list[Goal]:
    contestants: dict[str, Make] = {BARE: peers.BareAdvisory, ADVISORY: peers.advisory, ROWS: peers.rows}
    with Postgres() as server:
        peers.BareAdvisory(server.url)
        found = compare(
            f"PostgreSQL, {PROCESSES} processes on one name, empty body", contestants, server.url, rounds=rounds
        )
        pair = interleaved({"bare": with_lock(peers.BareRow(server.url))}, 5, repetitions=30)["bare"].median / 1e6
    advisory, rows = found[ADVISORY], found[ROWS]
    return [
        Goal("advisory contended: grants ÷ bare", advisory.over(found[BARE]), 0.7, at_most=False),
        Goal("advisory contended: the most uneven process, % of the mean", advisory.uneven * 100, 10),
        Goal("rows contended: grants per second", rows.per_second, 400, at_most=False),
        Goal("rows contended: grants ÷ the bare row pair's rate", rows.per_second * pair, 0.4, at_most=False),
        Goal("rows contended: the most uneven process, % of the mean", rows.uneven * 100, 10),
    ]
