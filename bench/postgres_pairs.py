"""An uncontended acquire and release on PostgreSQL, both engines, compared with the bare statements and the peers."""

from __future__ import annotations

from bench import postgres_peers as peers
from bench.harness import Goal, Timing, interleaved, show, with_lock
from tests.servers import Postgres

OURS = "fencelock"
BARE = "bare statements, psycopg, prepared"
PEERS = ("sqlalchemy-dlock (no ttl, no token)", "pals (no ttl, no token)", "tooz (no ttl, no token)")


def main(rounds: int) -> list[Goal]:
    with Postgres() as server:
        url = server.url
        contestants = {
            BARE: with_lock(peers.BareAdvisory(url)),
            OURS: with_lock(peers.advisory(url)),
            PEERS[0]: peers.sqlalchemy_dlock(url),
            PEERS[1]: peers.pals(url),
            PEERS[2]: with_lock(peers.tooz(url)),
        }
        advisory = interleaved(contestants, rounds, repetitions=50)
        show("PostgreSQL advisory, uncontended acquire + release, blocking", advisory, base=BARE)
        rows = interleaved(
            {BARE: with_lock(peers.BareRow(url)), OURS: with_lock(peers.rows(url))}, rounds, repetitions=30
        )
        show("PostgreSQL rows, uncontended acquire + release, blocking", rows, base=BARE)
    return [
        Goal("PostgreSQL advisory: pair ÷ the bare statements", ratio(advisory, BARE), 1.3),
        *(Goal(f"PostgreSQL advisory: pair ÷ {name.split()[0]}'s", ratio(advisory, name), 1.0) for name in PEERS),
        Goal("PostgreSQL rows: pair ÷ a bare upsert + update", ratio(rows, BARE), 1.3),
    ]


def ratio(timings: dict[str, Timing], base: str) -> float:
    return timings[OURS].over(timings[base])
