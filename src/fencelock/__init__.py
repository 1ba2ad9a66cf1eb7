"""Distributed locks that stay right when they break.

>>> import fencelock
>>> with fencelock.connect("memory://readme") as locks:
...     with locks.lock("order:42", ttl=30) as lease:
...         lease.token > 0
True

`fencelock.aio` has the same names, awaited. `fencelock.fences` and `fencelock.lockfree` are imported when they are used.
"""

TYPE_CHECKING = False  # as in typing, without importing it
if TYPE_CHECKING:
    from fencelock.api.sync import Locks, connect
    from fencelock.api.sync_cache import CachedFunction
    from fencelock.api.sync_election import Election
    from fencelock.api.sync_jobs import Once, Schedule, Slot
    from fencelock.api.sync_lock import Lease, Lock, Lost, RWLock
    from fencelock.api.sync_multi import Group, MultiLock
    from fencelock.api.sync_rate_limit import RateLimit
    from fencelock.errors import (
        BuildFailed,
        ClientClosed,
        DifferentLoop,
        EngineUnavailable,
        FencelockError,
        GuaranteeUnavailable,
        InvalidArgument,
        InvalidName,
        InvalidTTL,
        InvalidType,
        InvalidURL,
        KeyInProgress,
        KeyReused,
        LeaseLost,
        LockTimeout,
        MissingDependency,
        NotHeld,
        OutcomeUnknown,
        RateLimited,
        ReleaseFailed,
        StaleToken,
        VersionConflict,
        WouldDeadlock,
    )
    from fencelock.model import Holder, LossReason, Mode, Snapshot, TokenGuarantee, Traits, Waiter
    from fencelock.primitives.election import Candidate, Leader
    from fencelock.primitives.rate_limit import RateState
    from fencelock.primitives.runs import Outcome, Run

__version__ = "0.1.0"

__all__ = [
    "BuildFailed",
    "CachedFunction",
    "Candidate",
    "ClientClosed",
    "DifferentLoop",
    "Election",
    "EngineUnavailable",
    "FencelockError",
    "Group",
    "GuaranteeUnavailable",
    "Holder",
    "InvalidArgument",
    "InvalidName",
    "InvalidTTL",
    "InvalidType",
    "InvalidURL",
    "KeyInProgress",
    "KeyReused",
    "Leader",
    "Lease",
    "LeaseLost",
    "Lock",
    "LockTimeout",
    "Locks",
    "LossReason",
    "Lost",
    "MissingDependency",
    "Mode",
    "MultiLock",
    "NotHeld",
    "Once",
    "Outcome",
    "OutcomeUnknown",
    "RWLock",
    "RateLimit",
    "RateLimited",
    "RateState",
    "ReleaseFailed",
    "Run",
    "Schedule",
    "Slot",
    "Snapshot",
    "StaleToken",
    "TokenGuarantee",
    "Traits",
    "VersionConflict",
    "Waiter",
    "WouldDeadlock",
    "connect",
]

PUBLIC_MODULES = (
    "fencelock.errors",
    "fencelock.model",
    "fencelock.api.sync",
    "fencelock.api.sync_lock",
    "fencelock.api.sync_multi",
    "fencelock.api.sync_cache",
    "fencelock.api.sync_election",
    "fencelock.api.sync_jobs",
    "fencelock.api.sync_rate_limit",
    "fencelock.primitives.election",
    "fencelock.primitives.rate_limit",
    "fencelock.primitives.runs",
)

if not TYPE_CHECKING:  # a type checker would take any name for a public one

    def __getattr__(name: str) -> object:
        """Import the public names when they are first asked for: `fencelock run` starts without most of them."""
        from importlib import import_module

        if name in ("aio", "fences", "lockfree"):
            return import_module(f"fencelock.{name}")
        if name not in __all__:
            from fencelock.primitives.api_hints import no_module_attribute

            raise no_module_attribute(__name__, name)
        for module in PUBLIC_MODULES:
            found = vars(import_module(module)).get(name)
            if found is not None:
                globals()[name] = found
                return found
        raise AssertionError(f"{name!r} is public and nowhere to be found")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
