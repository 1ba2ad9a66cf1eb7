"""The base class of all servers: start, stop, pause, kill, restart, remove."""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tests.servers import packages, ports_and_folders
from tests.servers.managed import Startable
from tests.servers.process import Account, Order, Running

KEEP = "FENCELOCK_KEEP_ENGINES"
TRIES = 5


class StartFailed(RuntimeError):
    """A server did not start; the message ends with the last lines of its log."""


class PortTaken(StartFailed):
    """Another process has taken the port since it was chosen."""


class Server(Startable):
    """One real server, with its own loopback port and its own data folder.

    `settings` are added to the engine's configuration and `environment` to the process's, for a test that needs a
    server to be different. Used as a context manager it is started, and in the end removed with all its data.
    """

    family: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    start_limit: ClassVar[float] = 60.0
    stop_limit: ClassVar[float] = 10.0
    ports_needed: ClassVar[int] = 1

    host = ports_and_folders.HOST

    def __init__(
        self, *, settings: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.settings = dict(settings or {})
        self.environment = dict(environment or {})
        self.ports: tuple[int, ...] = ()
        self.started_in = 0.0
        self._folder: Path | None = None
        self._running: Running | None = None
        self._paused = False
        self._was_ready = False
        self._log_start = 0
        self._launched_at = 0.0
        self._lock = threading.RLock()

    # Each kind of server implements these.

    @abstractmethod
    def url_at(self, address: str) -> str:
        """Return fencelock's URL for `host:port`, or for several of them with commas between."""

    @abstractmethod
    def _prepare(self) -> None:
        """Write the configuration, and the initial data if there are none."""

    @abstractmethod
    def _command(self) -> tuple[list[str], packages.Program]:
        """Return the command line, and the program whose libraries it needs."""

    @abstractmethod
    def _probe(self, timeout: float) -> None:
        """Send a request to the server; any exception means that it is not ready."""

    def _listening_ports(self) -> tuple[int, ...]:
        """The ports on which it listens when it is ready."""
        return self.ports

    def _account(self) -> Account | None:
        """Return the user to run as, if it is another one."""
        return None

    def _clean_up(self) -> None:
        """Free what a killed server left outside its folder."""

    # For tests.

    @property
    def port(self) -> int:
        """The port for clients; it stays the same over restarts."""
        if not self.ports:
            self.ports = ports_and_folders.free_ports(self.ports_needed)
        return self.ports[0]

    @property
    def address(self) -> str:
        """`host:port`, as clients write it."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL that fencelock connects to."""
        return self.url_at(self.address)

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._running is None:
            raise RuntimeError(f"{self!r} was never started")
        return self._running.pid

    @property
    def folder(self) -> Path:
        """The folder with the server's `data`, its configuration and its `log`."""
        if self._folder is None:
            self._folder = ports_and_folders.new_folder(self.family, self._owner())
        return self._folder

    @property
    def data(self) -> Path:
        """The folder of the data that survives a restart."""
        return self.folder / "data"

    @property
    def is_alive(self) -> bool:
        """Whether the process exists, running or paused."""
        return self._running is not None and self._running.is_alive

    @property
    def is_paused(self) -> bool:
        """Whether it is running but paused."""
        return self._paused and self.is_alive

    def answers(self, timeout: float = 1.0) -> bool:
        """Return whether the server answers a client within `timeout`."""
        try:
            self._probe(timeout)
        except Exception:
            return False
        return True

    def start(self) -> None:
        """Start it and wait until it serves; nothing happens to one that already runs."""
        with self._lock:
            if self.is_alive:
                self.resume()
                return
            packages.ensure([self.family])
            for attempt in range(TRIES):
                try:
                    self.launch()
                    self.wait_ready()
                    return
                except PortTaken:
                    if attempt == TRIES - 1:
                        raise
                    self.wipe()
                    self.ports = ()

    def launch(self) -> None:
        """Start the process without waiting for it to serve."""
        with self._lock:
            if self._running is not None:
                self.kill()
            _ = self.port
            self.data.mkdir(exist_ok=True)
            ports_and_folders.give(self.data, self._owner() if not any(self.data.iterdir()) else None)
            self._prepare()
            command, program = self._command()
            environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "TZ": "UTC", "HOME": str(self.folder)}
            order = Order(
                command=tuple(command),
                folder=self.folder,
                log=self.folder / "log",
                environment={**environment, **program.environment(), **self.environment},
                account=self._account(),
                stop_signal=self.stop_signal,
                keep=bool(os.environ.get(KEEP)),
            )
            self._launched_at = time.monotonic()
            self._log_start = order.log.stat().st_size if order.log.exists() else 0
            self._running = Running(order)
            self._paused = False

    def wait_ready(self) -> None:
        """Wait until it serves, at most `start_limit` seconds."""
        until = self._launched_at + self.start_limit
        pause = 0.005
        while True:
            alive = self.is_alive
            if alive and self.answers(timeout=1.0) and self._listens():
                break
            if not alive:
                status = self._running.status if self._running is not None else None
                kind = PortTaken if not self._was_ready and self._port_was_taken() else StartFailed
                raise kind(f"{self!r} ended with status {status} while it was starting.\n{self.log_tail()}")
            if time.monotonic() > until:
                self.kill()
                raise StartFailed(f"{self!r} did not serve within {self.start_limit:.0f} s.\n{self.log_tail()}")
            time.sleep(pause)
            pause = min(0.1, pause * 1.5)
        self._was_ready = True
        self.started_in = time.monotonic() - self._launched_at

    def stop(self) -> None:
        """Stop it; kill it if that takes too long."""
        with self._lock:
            if self._running is not None:
                self._running.stop(self.stop_limit)
            self._paused = False

    def kill(self) -> None:
        """Kill -9, with all its children."""
        with self._lock:
            if self._running is not None:
                self._running.kill()
            self._paused = False

    def pause(self) -> None:
        """SIGSTOP all its processes; its connections stay open and silent."""
        with self._lock:
            if self._running is None or not self.is_alive:
                raise RuntimeError(f"{self!r} does not run and cannot be paused")
            self._paused = True
            self._running.pause()

    def resume(self) -> None:
        """Resume a paused server."""
        with self._lock:
            # Only for a paused one: finding its tree reads the data of every process of the machine.
            if self._running is not None and self.is_paused:
                self._running.resume()
            self._paused = False

    def restart(self, *, wipe: bool = False) -> None:
        """Stop it and start it on the same port, with its data or without."""
        with self._lock:
            self.stop()
            if wipe:
                self.wipe()
            self.start()

    def wipe(self) -> None:
        """Remove the data of a server that is not running."""
        with self._lock:
            if self.is_alive:
                raise RuntimeError(f"{self!r} is running: stop or kill it before its data are wiped")
            self._clean_up()
            ports_and_folders.remove(self.data)

    def ensure_healthy(self) -> None:
        """Restore it after a test: running, not paused, ready."""
        with self._lock:
            self.start()
            if not self.answers(timeout=5.0):
                self.kill()
                self.start()

    def close(self) -> None:
        """Kill it and remove its folder."""
        with self._lock:
            self.kill()
            if self._folder is not None and not os.environ.get(KEEP):
                self._clean_up()
                ports_and_folders.remove(self._folder)
                self._folder = None

    def log_tail(self, lines: int = 30) -> str:
        """Return the last lines of the log since the last start."""
        return "\n".join(self._log().splitlines()[-lines:]) or "(the log is empty)"

    def _log(self) -> str:
        try:
            with (self.folder / "log").open("rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _listens(self) -> bool:
        try:
            return self._running is not None and self._running.listens_on(self._listening_ports())
        except OSError:
            return False

    def _port_was_taken(self) -> bool:
        return "address already in use" in self._log().lower()

    def _owner(self) -> tuple[int, int] | None:
        account = self._account()
        return None if account is None else (account.uid, account.gid)

    def __repr__(self) -> str:
        port = self.ports[0] if self.ports else "no port yet"
        return f"<{type(self).__name__} {self.host}:{port}>"
