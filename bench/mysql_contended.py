"""Eight processes on one name, on MariaDB, compared with the bare statements. tooz is missing: a pair takes it 27 ms."""

from __future__ import annotations

from bench import mysql_peers as peers
from bench.contended import PROCESSES, Make, compare
from bench.harness import Goal
from fencelock.engines.mysql.statements import schema
from tests.servers import MariaDB

OURS = "fencelock"
COUNTER = "fencelock, no MEMORY tables allowed"
PLAIN = "GET_LOCK, RELEASE_LOCK, bare PyMySQL (no token)"
BARE = "GET_LOCK, NEXTVAL, RELEASE_LOCK, bare PyMySQL"


def main(rounds: int) -> list[Goal]:
    contestants: dict[str, Make] = {
        BARE: peers.bare,
        PLAIN: peers.bare_without_token,
        "the same statements over a raw socket": peers.raw,
        "the same, both in one send, over a raw socket": peers.raw_together,
        OURS: peers.ours,
        COUNTER: peers.ours_on_disk,
    }
    with MariaDB() as server:
        server.query(
            f"CREATE DATABASE {peers.ON_DISK}; USE {peers.ON_DISK};" + ";".join(schema()).replace("MEMORY", "InnoDB")
        )
        seen = compare(
            f"MariaDB, {PROCESSES} processes on one name, empty body", contestants, server.url, rounds=rounds
        )
    ours = seen[OURS]
    return [
        Goal("MariaDB contended: grants per second ÷ the bare statements'", ours.over(seen[BARE]), 0.7,
             at_most=False),
        Goal("MariaDB contended: grants per second ÷ GET_LOCK alone, without a token",
             ours.over(seen[PLAIN]), 0.3, at_most=False),
        Goal("MariaDB contended: with the counter on disk ÷ the bare statements'",
             seen[COUNTER].over(seen[BARE]), 0.3, at_most=False),
        Goal("MariaDB contended: the most uneven process, % of the mean", ours.uneven * 100, 10),
    ]  # fmt: skip
