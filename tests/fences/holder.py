"""A holder in a process of its own: `python -m tests.fences.holder KIND ADDRESS LOCKS_URL TTL`.

It executes each line of its input, and answers each with a line: `acquire`, `read`, `write`, `write_with_clock`, `begin` (a
transaction: check and read), `commit` (write and commit), `bare` (continue without the fence). It answers an error with its
name.

The fence gets a TokenPair, as from a holder that is stopped after its last look at the clock, before its statement arrives:
only the mark can refuse it. `write_with_clock` gives the fence the lease itself.
"""

from __future__ import annotations

import sys
from typing import Any

import fencelock
from fencelock.fences import TokenPair
from tests.fences.counters import open_counter


class Holder:
    """Executes the commands of a test."""

    def __init__(self, kind: str, address: str, url: str, ttl: str) -> None:
        self.kind, self.address = kind, address
        self.stock = open_counter(kind, address)
        self.locks = fencelock.connect(url, ttl=float(ttl))
        self.saw = 0
        self.lease: Any = None
        self.pair = TokenPair(0, "none")

    def acquire(self) -> str:
        self.lease = self.locks.lock("stock").acquire()
        self.pair = TokenPair(self.lease.token, self.lease.id)
        return str(self.pair.token)

    def read(self) -> str:
        self.saw = self.stock.read(self.pair)
        return str(self.saw)

    def write(self) -> str:
        self.stock.write(self.pair, self.saw, self.saw + 1)
        return "written"

    def write_with_clock(self) -> str:
        self.stock.write(self.lease, self.saw, self.saw + 1)
        return "written"

    def begin(self) -> str:
        self.stock.check(self.pair)
        self.saw = int(self.stock._run("SELECT value FROM stock")[0][0])
        return str(self.saw)

    def commit(self) -> str:
        self.stock._run("UPDATE stock SET value = ?", self.saw + 1)
        self.stock.connection.commit()
        return "committed"

    def bare(self) -> str:
        self.stock = open_counter(self.kind, self.address, fenced=False)
        return "bare"


def main() -> None:
    holder = Holder(*sys.argv[1:])
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            print(getattr(holder, line.strip())(), flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
    holder.locks.close()


if __name__ == "__main__":
    main()
