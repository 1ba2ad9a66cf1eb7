"""A fault injector around a real engine: it loses replies, delays them, or refuses requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fencelock.core.clock import Deadline
from fencelock.core.engine import Engine
from fencelock.core.records import Record, Records, Written
from fencelock.core.runtime import Runtime
from fencelock.errors import EngineUnavailable, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Snapshot, Waiting
from tests.contract.runtimes import client_of

T = TypeVar("T")


class Faulty:
    """Forwards each call to the engine, except for the requested faults: one for each call, in order."""

    def __init__(self, inner: Engine, runtime: Runtime) -> None:
        self.inner = inner
        self.traits = inner.traits
        self.calls: dict[str, int] = defaultdict(int)
        self.answers: dict[str, list[Any]] = defaultdict(list)
        self._runtime = runtime
        self._faults: dict[str, list[tuple[str, float]]] = defaultdict(list)
        self._before: dict[str, Callable[[], None]] = {}

    @classmethod
    def around(cls, locks: Any) -> Faulty:
        """Put a fault injector between a client and its engine."""
        client = client_of(locks)
        faulty = cls(client.engine, client.runtime)
        client.engine = faulty
        return faulty

    def allow(self, call: str, times: int = 1) -> None:
        """Forward the next calls; faults that are requested later apply after them."""
        self._faults[call] += [("", 0.0)] * times

    def lose(self, call: str, times: int = 1) -> None:
        """Forward the next calls and lose their replies."""
        self._faults[call] += [("lose", 0.0)] * times

    def slow(self, call: str, times: int, seconds: float) -> None:
        """Forward the next calls and return their replies late."""
        self._faults[call] += [("slow", seconds)] * times

    def late(self, call: str, times: int, seconds: float) -> None:
        """Forward the next calls late, as if the requests took long on their way."""
        self._faults[call] += [("late", seconds)] * times

    def refuse(self, call: str, times: int = 1, seconds: float = 0.0) -> None:
        """Refuse the next calls: the engine does not get them, and the client knows it."""
        self._faults[call] += [("refuse", seconds)] * times

    def drop(self, call: str, times: int = 1) -> None:
        """Drop the next calls: the engine does not get them, and the client gets no reply."""
        self._faults[call] += [("drop", 0.0)] * times

    def before(self, call: str, function: Callable[[], None]) -> None:
        """Call a function before the next call is forwarded."""
        self._before[call] = function

    def heal(self) -> None:
        """Remove all faults."""
        self._faults.clear()

    async def _through(self, call: str, work: Awaitable[T]) -> T:
        self.calls[call] += 1
        self._before.pop(call, lambda: None)()
        fault, seconds = self._faults[call].pop(0) if self._faults[call] else ("", 0.0)
        if fault in ("refuse", "drop"):
            work.close()  # type: ignore[attr-defined]
            raise (EngineUnavailable if fault == "refuse" else OutcomeUnknown)(f"{call} failed on purpose")
        if fault == "late":
            await self._runtime.sleep(seconds)
        answer = await work
        self.answers[call].append(answer)
        if fault == "lose":
            raise OutcomeUnknown(f"the answer to {call} was lost on purpose")
        if fault == "slow":
            await self._runtime.sleep(seconds)
        return answer

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        async def attempt() -> Grant | Waiting:
            return await self.inner.attempt(claim, enqueue=enqueue, deadline=deadline)

        return await self._through("attempt", attempt())

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        return await self._through("wait", self.inner.wait(waiting, timeout))

    async def abandon(self, claim: Claim) -> None:
        await self._through("abandon", self.inner.abandon(claim))

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        return await self._through("renew", self.inner.renew(grants))

    async def release(self, grant: Grant) -> bool:
        async def release() -> bool:
            return await self.inner.release(grant)

        return await self._through("release", release())

    async def downgrade(self, grant: Grant) -> Grant:
        return await self._through("downgrade", self.inner.downgrade(grant))

    @property
    def records(self) -> FaultyRecords:
        return FaultyRecords(self)

    @property
    def rates(self) -> FaultyRates:
        return FaultyRates(self)

    async def inspect(self, name: str) -> Snapshot:
        return await self._through("inspect", self.inner.inspect(name))

    def names(self, prefix: str) -> AsyncIterator[str]:
        return self.inner.names(prefix)

    async def force_release(self, name: str) -> int:
        return await self._through("force_release", self.inner.force_release(name))

    async def close(self) -> None:
        await self.inner.close()

    def before_fork(self) -> None:
        if hasattr(self.inner, "before_fork"):
            self.inner.before_fork()

    def after_fork_in_parent(self) -> None:
        if hasattr(self.inner, "after_fork_in_parent"):
            self.inner.after_fork_in_parent()

    def after_fork(self) -> None:
        self.inner.after_fork()


class FaultyRecords:
    """The records of the engine, with the faults of `read` and `write`."""

    def __init__(self, faulty: Faulty) -> None:
        self._through = faulty._through
        self._inner: Records = faulty.inner.records  # type: ignore[attr-defined]

    async def read(self, key: str) -> Record | None:
        return await self._through("read", self._inner.read(key))

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        return await self._through("write", self._inner.write(key, value, token=token, ttl=ttl, expect=expect))


class FaultyRates:
    """The rates of the engine, with the faults of `reserve`."""

    def __init__(self, faulty: Faulty) -> None:
        self._faulty = faulty
        self._inner = faulty.inner.rates  # type: ignore[attr-defined]

    async def reserve(self, requests: Any, max_wait: float) -> Any:
        return await self._faulty._through("reserve", self._inner.reserve(requests, max_wait))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
