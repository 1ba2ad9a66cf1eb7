"""The scenarios: which faults a run has, how many, and which invariants hold all the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fencelock.sim.check import Invariants
from fencelock.sim.network import NetworkFaults


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of run. The seed decides all that is open here."""

    name: str
    about: str
    invariants: Invariants
    faults: NetworkFaults
    names: tuple[str, ...] = ("x",)
    processes: int = 3
    tasks: int = 1
    jobs: int = 3
    ttls: tuple[float, ...] = (1.0, 2.0)
    lapses: bool = True
    """Whether some leases are not renewed, or have a max_hold."""
    lingers: tuple[float, ...] = (0.0, 0.0, 3.0)
    """For how many ttls leases are held, at most."""
    fence: bool = True
    cancels: int = 0
    steps: int = 60
    """The awaits of a process within which it is cancelled, paused or crashes."""
    pauses: int = 0
    """Pauses of a process, of up to two ttls."""
    crashes: int = 0
    partitions: int = 0
    """Partitions of one or all processes from the engine, in one direction or both, for up to two ttls."""
    wipes: int = 0
    rewinds: bool = False
    """Whether the engine's wall clock stands still, so that an engine without its data repeats its tokens."""
    forces: int = 0
    jumps: bool = False
    """Whether the clock by which leases expire is set."""
    stalls: int = 0
    """Pauses of a server, of up to two ttls."""
    restarts: int = 0
    """Restarts of a server that keeps its data."""
    nodes: tuple[int, ...] = (1,)
    """How many servers the engine may have."""
    engine: str = "memory"
    primitive: str = "lock"
    lag: float = 0.0
    """Seconds by which what observers read may be out of date."""


LONG = 60.0
"""The longest time for which a name may be free with faults: every participant may have to expire, one after the other."""

ROUGH = NetworkFaults(delay=0.03, slow=0.1, slowest=1.2, lost=0.08, doubled=0.05)

SCENARIOS = (
    Scenario(
        "calm",
        "messages overtake each other and none is lost; waiting and working tasks are cancelled",
        # No lease has to expire, so a release must reach the next waiter within a few messages.
        Invariants(free_at_most=0.6, ttl=3.1),
        NetworkFaults(delay=0.02),
        tasks=2,
        ttls=(2.0, 3.0),
        lapses=False,
        cancels=4,
    ),
    Scenario(
        "lossy",
        "messages are lost, arrive late, or arrive twice",
        Invariants(free_at_most=LONG, clean=False, ttl=2.1),
        ROUGH,
        cancels=1,
    ),
    Scenario(
        "late",
        "messages are lost or arrive late, after their sender gave up on an answer and asked again",
        # A caller repeats its clean-up until it is confirmed, and a request that arrives later must have no effect.
        Invariants(free_at_most=LONG, ttl=3.1),
        NetworkFaults(delay=0.03, slow=0.12, slowest=0.9, lost=0.08),
        ttls=(2.0, 3.0),
        lapses=False,
        cancels=5,
    ),
    Scenario(
        "stops",
        "processes are paused for longer than their leases last, and crash",
        Invariants(free_at_most=LONG, ttl=2.1),
        NetworkFaults(delay=0.03, reply_timeout=1.0),
        pauses=5,
        crashes=1,
        cancels=1,
    ),
    Scenario(
        "drift",
        "leases expire, and are renewed at the last moment, by clocks with the largest difference in rate",
        Invariants(free_at_most=10 * LONG, ttl=20.1),
        NetworkFaults(delay=0.002),
        jobs=2,
        ttls=(20.0,),
        pauses=2,
    ),
    Scenario(
        "kept",
        "leases are held for many ttls, with pauses and partitions one after the other",
        Invariants(free_at_most=LONG, clean=False, ttl=1.1),
        NetworkFaults(delay=0.05, reply_timeout=0.8),
        jobs=1,
        ttls=(1.0,),
        lapses=False,
        lingers=(8.0,),
        steps=30,
        pauses=12,
        partitions=3,
    ),
    Scenario(
        "outage",
        "the engine cannot be reached, or cannot reply",
        Invariants(free_at_most=LONG, clean=False, ttl=2.1),
        NetworkFaults(delay=0.03, slow=0.05, slowest=0.5, lost=0.02),
        partitions=5,
        pauses=1,
        ttls=(1.0, 2.0),
    ),
    Scenario(
        "chaos",
        "all faults but the loss of the engine's data",
        Invariants(free_at_most=LONG, clean=False, ttl=2.1),
        ROUGH,
        names=("x", "y"),  # so that a client keeps several leases at a time
        tasks=2,
        jobs=2,
        cancels=2,
        pauses=3,
        crashes=1,
        partitions=1,
    ),
    Scenario(
        "wiped",
        "the engine loses its data, and locks are released by force",
        # A holder learns of it only when it renews. The clock does not go back, so tokens still rise.
        Invariants(exclusion=False, free_at_most=LONG, clean=False, ttl=2.1),
        NetworkFaults(delay=0.03, slow=0.1, slowest=0.8),
        wipes=2,
        forces=1,
        pauses=2,
    ),
    Scenario(
        "reborn",
        "the engine loses its data and its clock: tokens repeat",
        # The only promise is that of the fence: the resource stays correct.
        Invariants(exclusion=False, tokens=False, order=False, free_at_most=LONG, clean=False, ttl=2.1),
        NetworkFaults(delay=0.05, slow=0.1, slowest=0.8),
        wipes=2,
        rewinds=True,
        pauses=1,
    ),
)

UNFENCED = Scenario(
    "unfenced",
    "as chaos, without a fence: the checker must see the data break",
    Invariants(free_at_most=LONG, clean=False, ttl=2.1),
    ROUGH,
    fence=False,
    cancels=2,
    pauses=4,
    crashes=1,
    partitions=1,
)

REDIS = (
    # A waiter whose connection is broken is skipped, so the order is promised only where none breaks.
    *(
        replace(
            scenario, engine="redis", invariants=replace(scenario.invariants, order=scenario.name in ("calm", "drift"))
        )
        for scenario in SCENARIOS
        if scenario.name != "late"
    ),
    Scenario(
        "late",
        "requests arrive after their sender closed the connection, and repeated or abandoned them on another one",
        Invariants(free_at_most=LONG, order=False, ttl=3.1),
        NetworkFaults(delay=0.03, slow=0.12, slowest=1.8, lost=0.04),
        ttls=(2.0, 3.0),
        lapses=False,
        cancels=5,
        engine="redis",
    ),
    Scenario(
        "restarts",
        "the server is paused, and restarts with its data",
        Invariants(free_at_most=LONG, order=False, clean=False, ttl=2.1),
        NetworkFaults(delay=0.03, slow=0.05, slowest=0.5),
        cancels=1,
        pauses=1,
        stalls=2,
        restarts=3,
        engine="redis",
    ),
    Scenario(
        "set",
        "the server's clock is set, by which leases expire",
        # Leases may expire at once, or much too late; tokens still rise.
        Invariants(exclusion=False, order=False, clean=False, ttl=1100.0),
        NetworkFaults(delay=0.03),
        pauses=2,
        crashes=1,
        jumps=True,
        engine="redis",
    ),
)


def _redlock(name: str, about: str, invariants: Invariants, faults: NetworkFaults, **more: Any) -> Scenario:
    """Return a scenario for several nodes. Redlock is not fair, and a node may keep a claim for its ttl."""
    settings: dict[str, Any] = {"nodes": (3, 5), "jobs": 2, "ttls": (2.0, 3.0), **more}
    invariants = replace(invariants, order=False)
    return Scenario(name, about, invariants, faults, engine="redlock", **settings)


UNCLEAN = Invariants(free_at_most=LONG, clean=False, ttl=3.1)
UNSTEADY = NetworkFaults(delay=0.02, slow=0.04, slowest=0.7, lost=0.004)
"""Every request takes a message to each node and back, so a low probability has a large effect."""

REDLOCK = (
    _redlock(
        "calm", "clients contend, and are cancelled", Invariants(free_at_most=5.0, ttl=3.1), NetworkFaults(), cancels=3
    ),
    _redlock("late", "messages arrive late, and connections break", UNCLEAN, UNSTEADY, cancels=2),
    _redlock(
        "stops",
        "clients and nodes are paused, and clients crash",
        UNCLEAN,
        NetworkFaults(),
        pauses=4,
        crashes=1,
        stalls=3,
    ),
    _redlock(
        "drift",
        "leases expire, and are renewed at the last moment, by clocks with the largest difference in rate",
        replace(UNCLEAN, free_at_most=10 * LONG, ttl=20.1),
        NetworkFaults(delay=0.002),
        processes=2,
        ttls=(20.0,),
        pauses=2,
    ),
    _redlock(
        "outage",
        "clients are partitioned from some of the nodes",
        UNCLEAN,
        NetworkFaults(delay=0.02, slow=0.02, slowest=0.5),
        partitions=5,
        pauses=1,
    ),
    _redlock(
        "restarts",
        "nodes are paused, and restart with their data",
        UNCLEAN,
        NetworkFaults(),
        cancels=1,
        stalls=2,
        restarts=5,
    ),
    _redlock(
        "chaos",
        "all faults but the loss of data",
        UNCLEAN,
        UNSTEADY,
        names=("x", "y"),
        cancels=2,
        pauses=3,
        crashes=1,
        partitions=2,
        stalls=2,
        restarts=2,
    ),
    _redlock(
        "wiped",
        "a node loses its data, and locks are released by force",
        # Only the clock remains: tokens rise with it, and exclusion is not promised.
        replace(UNCLEAN, exclusion=False),
        NetworkFaults(delay=0.02, slow=0.02, slowest=0.5),
        wipes=2,
        forces=1,
        pauses=2,
    ),
)

ENGINES = {"memory": SCENARIOS, "redis": REDIS, "redlock": REDLOCK}

ONCE_SLOTS = ("a", "b", "c")
RECORDED = ("once", "schedule", "rate_limit", "single_flight")
"""The primitives that keep records."""
NOT_ON_REDLOCK = ("rwlock", "semaphore", *RECORDED)

PRIMITIVES: dict[str, dict[str, Any]] = {
    "lock": {},
    "rwlock": {"tasks": 2, "jobs": 2},
    "semaphore": {"tasks": 2, "jobs": 2},
    "multi": {"names": ("x", "y", "z"), "tasks": 2, "jobs": 2},
    "election": {"jobs": 2, "lag": 1.5},
    "once": {"names": tuple(f"once:x/{slot}" for slot in ONCE_SLOTS), "tasks": 2, "jobs": 4},
    "schedule": {"names": ("schedule:x",), "jobs": 2},
    "rate_limit": {"names": (), "tasks": 2, "jobs": 3},
    "single_flight": {"names": ("cache:x",), "tasks": 2, "jobs": 4},
}
"""The primitives, and what their runs have that those of a lock do not."""

FOR_PRIMITIVES = ("calm", "lossy", "late", "stops", "kept", "outage", "chaos", "restarts")
"""The scenarios of a lock in which the other primitives are played."""


def scenarios_of(engine: str = "memory", primitive: str = "lock") -> tuple[Scenario, ...]:
    """Return the scenarios that are played for a primitive on an engine; none if the engine does not have it."""
    if primitive == "lock":
        return (*ENGINES[engine], UNFENCED)
    return tuple(
        replace(scenario, primitive=primitive, **PRIMITIVES[primitive])
        for scenario in ENGINES[engine]
        if scenario.name in FOR_PRIMITIVES and not (engine == "redlock" and primitive in NOT_ON_REDLOCK)
    )


def scenario_of(seed: int, engine: str = "memory", name: str | None = None, primitive: str = "lock") -> Scenario:
    """Return the named scenario, or the one that the seed chooses."""
    scenarios = scenarios_of(engine, primitive)
    if name is not None:
        return next(scenario for scenario in scenarios if scenario.name == name)
    chosen = [scenario for scenario in scenarios if scenario.fence]
    return chosen[seed % len(chosen)]
