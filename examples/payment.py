"""Charge each order once, even if two workers take the same order from a queue.

Three things protect the charge: the lock keeps the workers from working on one order at the same time, the fence lets the
database reject a worker whose lease has ended, and the row says whether the order is already paid.
"""

import sqlite3
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import fencelock
from fencelock.fences.sql import SqlFence

FOLDER = Path(tempfile.mkdtemp())
DATABASE = FOLDER / "shop.db"
ORDERS = [1, 2, 3, 2, 1, 3]  # a queue may deliver an order twice
fence = SqlFence()


def charge(locks: fencelock.Locks, order: int) -> str:
    """Charge an order unless it is paid; raise LockTimeout if another worker keeps it for too long."""
    with closing(sqlite3.connect(DATABASE, timeout=10)) as database:
        with locks.lock(f"order:{order}", ttl=30, timeout=10, max_hold=60) as lease, database:  # one transaction
            fence.check(database, lease)  # first statement: StaleToken if a newer holder has written
            (paid,) = database.execute("SELECT paid FROM orders WHERE id = ?", (order,)).fetchone()
            if paid:
                return f"order {order}: already paid"
            # Call the payment service here. Send f"order-{order}" as its idempotency key, so that a repetition is harmless.
            database.execute("UPDATE orders SET paid = 1, token = ? WHERE id = ?", (lease.token, order))
            return f"order {order}: charged"


def main() -> None:
    with closing(sqlite3.connect(DATABASE)) as database, database:
        database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, paid INTEGER DEFAULT 0, token INTEGER)")
        database.executemany("INSERT INTO orders (id) VALUES (?)", [(order,) for order in sorted(set(ORDERS))])
    results: list[str] = []
    with fencelock.connect(f"sqlite:///{FOLDER}/locks.db") as locks:
        workers = [
            threading.Thread(target=lambda order=order: results.append(charge(locks, order))) for order in ORDERS
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    print("\n".join(sorted(results)))
    assert sum(result.endswith(": charged") for result in results) == len(set(ORDERS))


if __name__ == "__main__":
    main()
