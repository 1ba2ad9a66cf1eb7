"""Several servers that make one engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tests.servers import packages
from tests.servers.managed import Startable
from tests.servers.server import TRIES, PortTaken, Server

S = TypeVar("S", bound=Server)


class Cluster(Startable, Generic[S]):
    """Members that start together; a test can break each of them as `members[i]`."""

    def __init__(self, members: Sequence[S]) -> None:
        self.members = tuple(members)
        self.started_in = 0.0

    @property
    def family(self) -> str:
        """The engine's name."""
        return self.members[0].family

    @property
    def host(self) -> str:
        """The first member's host."""
        return self.members[0].host

    @property
    def port(self) -> int:
        """The first member's port."""
        return self.members[0].port

    @property
    def address(self) -> str:
        """Every member's `host:port`, with commas between."""
        return ",".join(member.address for member in self.members)

    @property
    def url(self) -> str:
        """One URL that names all members."""
        return self.url_at(self.address)

    @property
    def is_alive(self) -> bool:
        """Whether the process of every member exists."""
        return all(member.is_alive for member in self.members)

    def url_at(self, address: str) -> str:
        """Return the URL for other addresses, such as those of proxies."""
        return self.members[0].url_at(address)

    def answers(self, timeout: float = 1.0) -> bool:
        """Whether every member serves clients."""
        return all(member.answers(timeout) for member in self.members)

    def leader(self) -> S:
        """Return the current leader; raise TimeoutError if there is none for ten seconds."""
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            for member in self.members:
                if not member.is_paused and member.is_alive and self._leads(member):
                    return member
            time.sleep(0.05)
        raise TimeoutError(f"{self!r} has no leader")

    def start(self) -> None:
        """Start every member that is not running, and wait until all of them serve."""
        began = time.monotonic()
        packages.ensure([self.family])
        for attempt in range(TRIES):
            asleep = [member for member in self.members if not member.is_alive]
            try:
                # Start all members before waiting for one: none serves until a majority runs.
                for member in asleep:
                    member.launch()
                for member in self.members:
                    member.resume()
                _all_at_once([member.wait_ready for member in asleep])
                break
            except PortTaken:
                # Members find each other by their ports, so a new port for one member needs a new cluster.
                if attempt == TRIES - 1 or len(asleep) < len(self.members):
                    raise
                self.kill()
                self.wipe()
                for member in self.members:
                    member.ports = ()
        self.started_in = time.monotonic() - began

    def stop(self) -> None:
        """Stop every member."""
        _all_at_once([member.stop for member in self.members])

    def kill(self) -> None:
        """Kill -9 every member."""
        for member in self.members:
            member.kill()

    def pause(self) -> None:
        """SIGSTOP every member."""
        for member in self.members:
            member.pause()

    def resume(self) -> None:
        """SIGCONT every member."""
        for member in self.members:
            member.resume()

    def wipe(self) -> None:
        """Remove the data of a cluster that is not running."""
        for member in self.members:
            member.wipe()

    def restart(self, *, wipe: bool = False) -> None:
        """Stop all and start all, with their data or without."""
        self.stop()
        if wipe:
            self.wipe()
        self.start()

    def ensure_healthy(self) -> None:
        """Restore it after a test: every member running, not paused, answering."""
        if not all(member.is_alive and not member.is_paused for member in self.members):
            self.start()
        until = time.monotonic() + 15.0
        while not self.answers(timeout=2.0):
            if time.monotonic() > until:
                self.kill()
                self.start()
                return
            time.sleep(0.05)

    def close(self) -> None:
        """Kill every member and remove its folder."""
        self.kill()
        for member in self.members:
            member.close()

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of every member's log."""
        return "\n".join(f"{member!r}:\n{member.log_tail(lines)}" for member in self.members)

    def _leads(self, member: S) -> bool:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.members)}: {self.address}>"


def _all_at_once(calls: Sequence[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A taken port explains the failures of the other members, so raise it first.
    for error in sorted(errors, key=lambda error: not isinstance(error, PortTaken)):
        raise error
