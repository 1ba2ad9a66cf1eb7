"""Distributed locks that stay right when they break.

>>> import fencelock
>>> with fencelock.connect("memory://readme") as locks:
...     with locks.lock("order:42", ttl=30) as lease:
...         lease.token > 0
True

The asyncio twin is `fencelock.aio`.
"""

from fencelock.errors import (
    ClientClosed,
    DifferentLoop,
    EngineUnavailable,
    FencelockError,
    GuaranteeUnavailable,
    InvalidName,
    InvalidTTL,
    InvalidURL,
    LeaseLost,
    LimitMismatch,
    LockTimeout,
    MissingDependency,
    StaleToken,
)
from fencelock.facade.sync import Lease, Lock, Locks, Lost, connect
from fencelock.model import Holder, Reason, Snapshot, Strength, Traits, Waiter

__version__ = "0.1.0"

__all__ = [
    "ClientClosed",
    "DifferentLoop",
    "EngineUnavailable",
    "FencelockError",
    "GuaranteeUnavailable",
    "Holder",
    "InvalidName",
    "InvalidTTL",
    "InvalidURL",
    "Lease",
    "LeaseLost",
    "LimitMismatch",
    "Lock",
    "LockTimeout",
    "Locks",
    "Lost",
    "MissingDependency",
    "Reason",
    "Snapshot",
    "StaleToken",
    "Strength",
    "Traits",
    "Waiter",
    "connect",
]
