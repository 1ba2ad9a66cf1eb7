"""Book several seats together: all of them or none, without a deadlock, and never one seat twice."""

import random
import sqlite3
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import fencelock
from fencelock.fences.sql import SqlFence

FOLDER = Path(tempfile.mkdtemp())
DATABASE = FOLDER / "theatre.db"
SEATS = [f"A{number}" for number in range(1, 11)]
fence = SqlFence()


def book(locks: fencelock.Locks, customer: str, seats: list[str]) -> bool:
    """Book all seats for a customer, or none of them if one is taken."""
    try:
        with locks.multi(*[f"seat:{seat}" for seat in seats], ttl=30, timeout=10) as group:
            with closing(sqlite3.connect(DATABASE, timeout=10)) as database, database:  # one transaction
                for lease in group.leases.values():
                    fence.check(database, lease)  # before the first read
                marks = ", ".join("?" for _ in seats)
                if database.execute(f"SELECT 1 FROM bookings WHERE seat IN ({marks})", seats).fetchone():
                    return False  # one of them is sold
                database.executemany("INSERT INTO bookings VALUES (?, ?)", [(seat, customer) for seat in seats])
                return True
    except fencelock.LockTimeout as timeout:
        print(f"{customer}: {timeout.name} is busy; please try again")
        return False


def main() -> None:
    with closing(sqlite3.connect(DATABASE)) as database, database:
        database.execute("CREATE TABLE bookings (seat TEXT PRIMARY KEY, customer TEXT)")
    random.seed(7)
    wishes = {f"customer {number}": random.sample(SEATS, 3) for number in range(8)}
    booked: dict[str, list[str]] = {}

    def try_to_book(locks: fencelock.Locks, customer: str) -> None:
        if book(locks, customer, wishes[customer]):
            booked[customer] = wishes[customer]

    with fencelock.connect(f"sqlite:///{FOLDER}/locks.db") as locks:
        threads = [threading.Thread(target=try_to_book, args=(locks, customer)) for customer in wishes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for customer, seats in sorted(booked.items()):
        print(f"{customer} has {', '.join(seats)}")
    sold = [seat for seats in booked.values() for seat in seats]
    assert len(sold) == len(set(sold)) >= 3


if __name__ == "__main__":
    main()
