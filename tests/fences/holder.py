"""A holder in a process of its own: `python -m tests.fences.holder KIND ADDRESS LOCKS_URL TTL`.

It does what each line of its input says, and answers each with a line: `acquire`, `read`, `write`, `begin` (a transaction:
check and read), `commit` (write and commit), `bare` (go on without the fence). An error is answered by its name.
"""

from __future__ import annotations

import sys
from typing import Any

import fencelock
from tests.fences.counters import open_counter


class Holder:
    def __init__(self, kind: str, address: str, url: str, ttl: str) -> None:
        self.kind, self.address = kind, address
        self.stock = open_counter(kind, address)
        self.locks = fencelock.connect(url, ttl=float(ttl))
        self.saw = 0
        self.lease: Any = None

    def acquire(self) -> str:
        self.lease = self.locks.lock("stock").acquire()
        return str(self.lease.token)

    def read(self) -> str:
        self.saw = self.stock.read(self.lease)
        return str(self.saw)

    def write(self) -> str:
        self.stock.write(self.lease, self.saw, self.saw + 1)
        return "written"

    def begin(self) -> str:
        self.stock.check(self.lease)
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
