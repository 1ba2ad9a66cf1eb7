"""What is peculiar to SQLite: the file, the disk under it, power cuts, boots, clocks, and many processes at once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

import fencelock
from fencelock import EngineUnavailable, InvalidURL, LockTimeout, LossReason
from fencelock.core import wakeup
from fencelock.engines.sqlite import database as database_module
from fencelock.engines.sqlite import engine as engine_module
from fencelock.engines.sqlite import opening as opening_module
from fencelock.engines.sqlite.database import Database
from fencelock.engines.sqlite.engine import SqliteEngine
from fencelock.engines.sqlite.opening import APPLICATION_ID
from fencelock.engines.sqlite.paths import network_file_system, path_of
from fencelock.engines.sqlite.transactions import BUSY_TIMEOUT
from tests.contract.worker import Worker
from tests.servers import packages
from tests.support.processes import Child

SOON = 15.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the database of the test is."""
    return tmp_path / "locks.db"


@pytest.fixture
def url(path: Path) -> str:
    """Its URL."""
    return f"sqlite:///{path}"


@pytest.fixture
def locks(url: str) -> Iterator[fencelock.Locks]:
    """A blocking client."""
    with fencelock.connect(url) as client:
        yield client


def database_of(locks: fencelock.Locks) -> Database:
    """Return the connection behind a client."""
    engine = locks._client.engine
    assert isinstance(engine, SqliteEngine)
    return engine._database


def set_wall_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], int]) -> None:
    """Have everything that looks at the wall clock look at this one."""
    monkeypatch.setattr(database_module, "wall_us", clock)
    monkeypatch.setattr(opening_module, "wall_us", clock)


def take(locks: fencelock.Locks, name: str = "x") -> int:
    """Take the lock and give it back; return its token."""
    with locks.lock(name, timeout=SOON) as lease:
        return lease.token


def counter(path: Path) -> tuple[int, int, str]:
    """Return token, reserved and boot as they are in the database."""
    connection = sqlite3.connect(path)
    try:
        token, reserved, boot = connection.execute("SELECT token, reserved, boot FROM counter").fetchone()
    finally:
        connection.close()
    return token, reserved, boot


def run(source: str, *args: str, prefix: tuple[str, ...] = ()) -> Any:
    """Run a program in a process of its own; return what it printed, read as JSON."""
    outcome = subprocess.run(
        [*prefix, sys.executable, "-c", source, *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return json.loads(outcome.stdout)


# ---------------------------------------------------------------------------- tokens: power cuts, boots, clocks


def snapshot(path: Path, to: Path) -> None:
    """Copy the database and its log, as a disk would have them if it had everything that was synced and no more."""
    to.mkdir()
    for suffix in ("", "-wal"):
        if Path(f"{path}{suffix}").exists():
            shutil.copy(f"{path}{suffix}", to / f"{path.name}{suffix}")


def test_tokens_stay_within_what_is_synced(locks: fencelock.Locks, path: Path) -> None:
    """At any moment, every token handed out is at or below the reserve that was synced."""
    for _ in range(50):
        token = take(locks)
        assert token <= counter(path)[1]


def test_reserve_is_synced_before_it_is_used(path: Path, url: str) -> None:
    """The log is synced after the reserve was written and before the first token above the old one is handed out."""
    packages.ensure(["tools"])
    strace = str(packages.find("tools", "strace").path)
    trace = path.parent / "trace"
    run(
        "import sys, json, os, fencelock\n"
        "locks = fencelock.connect(sys.argv[1])\n"
        "with locks.lock('x') as lease: os.write(2, b'GRANTED %d' % lease.token); print(lease.token)\n",
        url,
        prefix=(strace, "-f", "-y", "-e", "trace=pwrite64,fdatasync,fsync,write", "-o", str(trace)),
    )
    lines = trace.read_text("utf-8", "replace").splitlines()
    (granted,) = [number for number, line in enumerate(lines) if "GRANTED" in line]
    writes = [number for number, line in enumerate(lines[:granted]) if "pwrite64" in line and "-wal" in line]
    syncs = [number for number, line in enumerate(lines[:granted]) if "sync" in line and "-wal" in line]
    assert syncs, "the log was never synced"
    reserve = counter(path)[1]
    token = int(lines[granted].split("GRANTED ")[1].split('"')[0])
    assert token <= reserve
    # What follows the last sync is the grant itself; the reserve lies before it.
    assert writes
    assert any(number < syncs[-1] for number in writes)


def test_power_cut(path: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut that loses all that was not synced, tokens go on above every one that was handed out."""
    stuck = int(time.time() * 1e6)
    set_wall_clock(monkeypatch, lambda: stuck)  # a clock that does not help
    with fencelock.connect(url) as locks:
        take(locks)
        snapshot(path, tmp_path / "synced")  # the reserve is in here; the grants that follow are not
        highest = max(take(locks) for _ in range(500))
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    for copy in (tmp_path / "synced").iterdir():
        shutil.copy(copy, path.parent / copy.name)
    with fencelock.connect(url) as locks:
        database_of(locks).boot = "another boot"
        assert take(locks) > highest
    assert counter(path)[2] == "another boot"


def test_another_boot_voids_all_claims(url: str) -> None:
    """After another start of the machine nobody holds or waits, as all times have lost their meaning; tokens rise."""
    with fencelock.connect(url) as before, fencelock.connect(url) as after:
        lease = before.lock("x", ttl=3600).acquire()
        database_of(after).boot = "another boot"
        assert after.inspect("x").holders == ()
        assert take(after) > lease.token
        lease.release()


def test_clock_set_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that is set back, to before the epoch even, or far ahead and back, does not lower a token."""
    clock = [int(time.time() * 1e6)]
    set_wall_clock(monkeypatch, lambda: clock[0])
    with fencelock.connect(url) as locks:
        tokens = []
        for step in (0, -3600, -(10**9), 10**7, -(10**7), 4 * 10**9, -(4 * 10**9)):
            clock[0] += step * 1_000_000
            tokens += [take(locks), take(locks)]
        assert tokens == sorted(set(tokens))
        assert tokens[-1] < 2**53


def test_database_deleted_while_held(path: Path, url: str) -> None:
    """A holder whose database is deleted learns of it by its next renewal, and the next token is higher."""
    with fencelock.connect(url) as locks, fencelock.connect(url) as other:
        lease = locks.lock("x", ttl=6).acquire()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink()
        time.sleep(0.2)
        assert take(other) > lease.token
        assert lease.lost.wait(SOON)
        assert lease.reason is LossReason.GONE
        assert take(locks) > lease.token


def test_database_replaced_while_held(path: Path, url: str, tmp_path: Path) -> None:
    """A database that is replaced by another is used from then on; the old one's holders learn of it."""
    with fencelock.connect(f"sqlite:///{tmp_path}/new.db") as new:
        take(new)
    with fencelock.connect(url) as locks:
        lease = locks.lock("x", ttl=0.9).acquire()
        os.replace(tmp_path / "new.db", path)
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink()
        assert lease.lost.wait(SOON)
        assert lease.reason in (LossReason.GONE, LossReason.EXPIRED)
        assert take(locks) > lease.token


def test_folder_deleted_while_held(url: str, path: Path) -> None:
    """When the whole folder is gone, the lease is lost at its deadline and acquiring says what is wrong."""
    with fencelock.connect(url) as locks:
        lease = locks.lock("x", ttl=0.6).acquire()
        shutil.rmtree(path.parent)
        assert lease.lost.wait(SOON)
        with pytest.raises(EngineUnavailable, match="folder"):
            locks.lock("x").acquire()


# ---------------------------------------------------------------------------- files that are not ours


def checksum(path: Path) -> str:
    """Return what tells whether a file was touched."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refused(url: str, match: str) -> None:
    """Make sure that the engine refuses the file, at once, with the path and the name of the lock."""
    begun = time.monotonic()
    with fencelock.connect(url) as locks:
        with pytest.raises(EngineUnavailable, match=match) as caught:
            locks.lock("x").acquire()
        assert caught.value.name == "x"
        assert path_of(url) in str(caught.value)
        with pytest.raises(EngineUnavailable, match=match):
            locks.inspect("x")
    assert time.monotonic() - begun < SOON


@pytest.mark.parametrize(
    "content", [b"hello, world\n", b"\0" * 100, b"x" * 10_000, b"SQLite format 3\0" + b"junk" * 2000]
)
def test_file_that_is_no_database(path: Path, url: str, content: bytes) -> None:
    """A file that is not a SQLite database is refused and not touched."""
    path.write_bytes(content)
    refused(url, "not a SQLite database|damaged")
    assert path.read_bytes() == content


@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
@pytest.mark.parametrize("application", [0, 0x12345678])
def test_database_of_another_program(path: Path, url: str, mode: str, application: int) -> None:
    """A database of another application is refused, and its bytes are the same afterwards."""
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode = {mode}")
    connection.execute("CREATE TABLE claim (what TEXT)")
    connection.execute("INSERT INTO claim VALUES ('mine')")
    connection.execute(f"PRAGMA application_id = {application}")
    connection.commit()
    connection.close()
    before = checksum(path)
    refused(url, "another program")
    assert checksum(path) == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_database_of_another_program_in_use(path: Path, url: str) -> None:
    """A database that another application has open, in the middle of a transaction, is refused and goes on."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t (a)")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO t VALUES (1)")
    refused(url, "another program")
    connection.execute("COMMIT")
    assert connection.execute("SELECT a FROM t").fetchall() == [(1,)]
    connection.close()


def test_unknown_layout(path: Path, url: str) -> None:
    """A database with a layout of another release is refused and not touched."""
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 7")
    connection.execute("CREATE TABLE future (a)")
    connection.commit()
    connection.close()
    before = checksum(path)
    refused(url, "layout 7")
    assert checksum(path) == before


def test_empty_file(path: Path, url: str) -> None:
    """An empty file becomes a database, as one that does not exist does."""
    path.touch()
    with fencelock.connect(url) as locks:
        assert take(locks) > 0


@pytest.mark.parametrize("place", ["missing/locks.db", "."])
def test_place_that_cannot_be_a_database(tmp_path: Path, place: str) -> None:
    """A folder that does not exist, or a path that is a folder, is refused with advice."""
    refused(f"sqlite:///{tmp_path}/{place}", "folder")


# ---------------------------------------------------------------------------- disks that cannot be written

# In mount namespaces of their own, so that nothing of this machine changes.
TRY = """
import sys, json, time, fencelock
begun = time.monotonic()
locks = fencelock.connect("sqlite:///" + sys.argv[1])
try:
    locks.lock("x").acquire()
    answer = "granted"
except fencelock.EngineUnavailable as error:
    answer = str(error)
print(json.dumps([answer, time.monotonic() - begun]))
"""

ON_A_DISK = """
import subprocess, sys
folder, size, options, prepare, source = sys.argv[1:6]
def shell(*command): subprocess.run(command, check=True, stdout=sys.stderr)
shell("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
exec(prepare)
if options: shell("mount", "-o", f"remount,{options}", folder)
sys.argv = ["", f"{folder}/locks.db"]
exec(source, {"__name__": "__main__"})
"""


def on_a_disk(folder: Path, source: str, *, prepare: str = "", options: str = "", size: str = "256k") -> Any:
    """Run a program with a small disk of its own mounted on the folder."""
    prefix = ("unshare", "--mount", "--propagation", "private")
    return run(ON_A_DISK, str(folder), size, options, prepare, source, prefix=prefix)


MAKE = """
import fencelock
with fencelock.connect(f"sqlite:///{folder}/locks.db") as locks, locks.lock("x"): pass
"""


@pytest.mark.parametrize("prepare", ["", MAKE], ids=["new", "existing"])
def test_read_only_disk(tmp_path: Path, prepare: str) -> None:
    """On a read-only disk the engine says so, soon, whether the database is there already or not."""
    answer, seconds = on_a_disk(tmp_path, TRY, prepare=prepare, options="ro")
    assert "locks.db" in answer
    assert "write" in answer
    assert seconds < SOON


FILL = """
import os
filler = os.open(f"{folder}/filler", os.O_WRONLY | os.O_CREAT)
try:
    while True: os.write(filler, b"x" * 4096)
except OSError: pass
os.close(filler)
"""


@pytest.mark.parametrize("prepare", [FILL, MAKE + FILL], ids=["new", "existing"])
def test_full_disk(tmp_path: Path, prepare: str) -> None:
    """On a full disk the engine says so, soon."""
    answer, seconds = on_a_disk(tmp_path, TRY, prepare=prepare)
    assert "full" in answer, answer
    assert seconds < SOON


def test_disk_that_fills_up(tmp_path: Path) -> None:
    """A disk that fills up while locks are in use: errors, nothing half done, and all is well once there is space."""
    source = (
        """
import sys, json, os, fencelock
path = sys.argv[1]; folder = os.path.dirname(path)
locks = fencelock.connect("sqlite:///" + path)
held = locks.lock("held", ttl=60).acquire()
"""
        + FILL
        + """
errors, tokens = set(), [held.token]
for number in range(300):
    try:
        with locks.lock(f"n{number}") as lease: tokens.append(lease.token)
    except fencelock.EngineUnavailable as error:
        errors.add(str(error))
os.unlink(f"{folder}/filler")
held.check()
held.renew()
for number in range(50):
    with locks.lock(f"n{number}", timeout=5) as lease: tokens.append(lease.token)
names = list(locks.names())
released = held.release()
locks.close()
print(json.dumps([sorted(errors), tokens == sorted(set(tokens)), names, released]))
"""
    )
    errors, rising, names, released = on_a_disk(tmp_path, source, size="8m")
    assert errors
    assert all("full" in error for error in errors), errors
    assert rising
    assert names == ["held"]
    assert released is True


def test_no_permission() -> None:
    """A user who may not write there is told so."""
    with tempfile.TemporaryDirectory(prefix="fencelock-test-") as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o755)
        with fencelock.connect(f"sqlite:///{folder}/locks.db") as locks:
            take(locks)
        nobody = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
        answer, seconds = run(TRY, f"{folder}/locks.db", prefix=nobody)
    assert "belongs to user root and user nobody may not write it" in answer, answer
    assert seconds < SOON


# ---------------------------------------------------------------------------- network file systems

MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:26 / /mnt/nfs rw,relatime shared:9 - nfs4 server:/export rw,vers=4.2
31 22 0:27 / /mnt/nfs/local rw,relatime - ext4 /dev/vdb rw
32 22 0:28 / /mnt/with\\040space rw - cifs //server/share rw
33 22 0:29 / /mnt/ssh rw,nosuid - fuse.sshfs me@host: rw
34 22 0:30 / /mnt/nfsx rw - xfs /dev/vdc rw
35 22 0:31 / /mnt/over rw - nfs server:/x rw
36 35 0:32 / /mnt/over rw - tmpfs tmpfs rw
37 22 0:33 / /mnt/fuse rw - fuse.gocryptfs /x rw
"""


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("/mnt/nfs", "nfs4"),
        ("/mnt/nfs/deep/down", "nfs4"),
        ("/mnt/nfs/local/x", None),
        ("/mnt/nfsx/x", None),
        ("/mnt/with space/x", "cifs"),
        ("/mnt/ssh", "fuse.sshfs"),
        ("/mnt/over/x", None),
        ("/mnt/fuse/x", None),
        ("/home/me", None),
        ("/", None),
    ],
)
def test_network_file_system(where: str, kind: str | None) -> None:
    """Which file system a path is on is read from the table of mounts: the longest mount point, the last one on it."""
    assert network_file_system(where, MOUNTS) == kind


def test_network_file_system_is_refused(url: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database on a network file system is refused before it is opened."""
    monkeypatch.setattr(opening_module, "network_file_system", lambda folder: "nfs4")
    refused(url, "network file system \\(nfs4\\)")
    assert not path.exists()


def test_this_machine_has_a_table_of_mounts(tmp_path: Path) -> None:
    """The real table can be read, and the tests do not run on a network file system."""
    assert network_file_system(str(tmp_path)) is None


def test_link_to_a_network_file_system(tmp_path: Path) -> None:
    """A link is followed before the table is asked."""
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    mounts = f"22 1 254:1 / / rw - ext4 /dev/vda1 rw\n23 22 0:9 / {os.path.realpath(real)} rw - nfs server:/x rw\n"
    assert network_file_system(str(tmp_path / "link"), mounts) == "nfs"


# ---------------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:////var/lib/app/locks.db", "/var/lib/app/locks.db"),
        ("sqlite://///var/lib/locks.db", "/var/lib/locks.db"),
        ("sqlite:/var/locks.db", "/var/locks.db"),
        ("sqlite:////a%20b/%3F%23.db", "/a b/?#.db"),
        ("sqlite:////a/../b.db", "/b.db"),
        ("sqlite:////é/🔒.db", "/é/🔒.db"),
    ],
)
def test_path_of(url: str, path: str) -> None:
    """Four slashes begin an absolute path."""
    assert path_of(url) == path


def test_relative_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without slashes, or with three, a path is relative to the current folder, or to the home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for url in ("sqlite:locks.db", "sqlite:///locks.db", "sqlite:///a/../locks.db"):
        assert path_of(url) == str(tmp_path / "locks.db")
    assert path_of("sqlite:~/locks.db") == "/home/me/locks.db"


@pytest.mark.parametrize("url", ["sqlite:///locks.db", "sqlite:///a/locks.db", "sqlite:////var/lib/locks.db"])
def test_sqlalchemy_means_the_same_file(url: str) -> None:
    """A URL names the file that SQLAlchemy would open."""
    assert path_of(url) == os.path.abspath(make_url(url).database or "")


def test_three_slashes_before_an_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A URL with three slashes and a path that exists only from the root is refused; the error says to write four."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    refused(f"sqlite://{tmp_path}/locks.db", re.escape(f"or write four slashes for {tmp_path}: sqlite:///{tmp_path}/"))
    assert list(tmp_path.rglob("*")) == [elsewhere]


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://host/x.db",
        "sqlite://localhost/x.db",
        "sqlite://locks.db",
        "sqlite:///x?mode=ro",
        "sqlite:///x#y",
        "sqlite:////",
        "sqlite:///%00",
    ],
)
def test_bad_url(url: str) -> None:
    """A URL with a host, options, or no file is refused when the client is made."""
    with pytest.raises(InvalidURL):
        fencelock.connect(url)


# ---------------------------------------------------------------------------- many processes

CREATE = """
import sys, json, time, fencelock
url, at = sys.argv[1], float(sys.argv[2])
while time.time() < at: pass
tokens = []
with fencelock.connect(url) as locks:
    for _ in range(20):
        with locks.lock("x", timeout=50) as lease: tokens.append(lease.token)
print(json.dumps(tokens))
"""


def test_created_by_many_at_once(url: str, path: Path) -> None:
    """Eight processes that create the database at the same moment all work, on one and the same."""
    for attempt in range(3):
        at = time.time() + 0.6
        processes = [Child.of_source(CREATE, f"{url}{attempt}", str(at)) for _ in range(8)]
        tokens: list[int] = []
        for process in processes:
            status, out = process.ends()
            assert status == 0
            tokens += json.loads(out)
        assert len(set(tokens)) == len(tokens) == 8 * 20


HOLD_THE_WRITE_LOCK = """
import sys, sqlite3
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("in", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
print("out", flush=True)
sys.stdin.readline()
"""


def test_stopped_in_the_middle_of_a_transaction(url: str, path: Path) -> None:
    """While a process is stopped inside a transaction the others say so soon after their timeout; then they go on."""
    with ExitStack() as stack, fencelock.connect(url) as locks:
        lease = locks.lock("held", ttl=8).acquire()  # more than enough for all that comes before it is lost
        process = stack.enter_context(Child.of_source(HOLD_THE_WRITE_LOCK, str(path)))
        assert process.read_line() == "in"
        process.stop()
        begun = time.monotonic()
        with pytest.raises((EngineUnavailable, LockTimeout)) as caught:
            locks.lock("x").acquire(timeout=0.5)
        assert time.monotonic() - begun < BUSY_TIMEOUT / 2
        assert caught.value.name == "x"
        if isinstance(caught.value, EngineUnavailable):
            assert "middle of a transaction" in str(caught.value)
        assert [holder.token for holder in locks.inspect("held").holders] == [lease.token]  # reading goes on
        assert lease.lost.wait(SOON)
        assert lease.reason is LossReason.EXPIRED
        process.resume()
        assert process.request("x") == "out"
        assert take(locks) > lease.token


def test_killed_in_the_middle_of_a_transaction(url: str, path: Path) -> None:
    """A process that is killed inside a transaction leaves the database as it was, and unlocked."""
    with fencelock.connect(url) as locks:
        before = take(locks)
        with Child.of_source(HOLD_THE_WRITE_LOCK, str(path)) as process:
            assert process.read_line() == "in"
        assert take(locks) > before


def test_killed_at_any_moment(url: str) -> None:
    """Processes that are killed while they hammer on the database leave it whole; tokens go on."""
    source = (
        "import sys, fencelock\n"
        "locks = fencelock.connect(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    with locks.lock('x', ttl=0.1): pass\n"
    )
    highest = 0
    with fencelock.connect(url) as locks:
        for number in range(6):
            with Child.of_source(source, url) as process:
                assert process.read_line() == "ready"
                time.sleep(number * 0.013)
            token = take(locks)
            assert token > highest
            highest = token
    connection = sqlite3.connect(path_of(url))
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


# ---------------------------------------------------------------------------- wake-ups


def test_only_the_next_is_woken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While 20 wait, a release wakes the next one only: the others do not even look."""
    monkeypatch.setattr(engine_module, "POLL_WITH_WAKEUP", 300.0)  # so that only a wake-up ends the wait
    woken: list[int] = []
    served: list[int] = []
    clients = [fencelock.connect(url, ttl=300) for _ in range(21)]
    holder = clients[20].lock("x").acquire()
    threads, gates = [], [threading.Event() for _ in range(20)]
    for number in range(20):
        engine = clients[number]._client.engine
        assert isinstance(engine, SqliteEngine)

        def look(*args: Any, number: int = number, real: Any = engine._queue.peek) -> Any:
            woken.append(number)
            return real(*args)

        def work(number: int = number) -> None:
            lease = clients[number].lock("x").acquire()
            served.append(number)
            gates[number].wait(SOON)
            lease.release()

        monkeypatch.setattr(engine._queue, "peek", look)
        threads.append(threading.Thread(target=work))
        threads[-1].start()
        while len(clients[20].inspect("x").waiters) <= number:
            time.sleep(0.002)
    woken.clear()
    holder.release()
    while not served:
        time.sleep(0.001)
    looked = set(woken)
    assert looked == {0}
    for gate in gates:
        gate.set()
    for thread in threads:
        thread.join(SOON)
    assert served == list(range(20))
    for client in clients:
        client.close()


def test_lost_wakeup(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When every ring gets lost, a waiter still gets the lock, after a bounded delay."""
    monkeypatch.setattr(wakeup.WakeupSender, "wake", lambda self, address: None)
    with fencelock.connect(url) as locks, fencelock.connect(url) as other:
        lease = locks.lock("x").acquire()
        got: list[float] = []

        def wait() -> None:
            with other.lock("x", timeout=SOON):
                got.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        while not locks.inspect("x").waiters:
            time.sleep(0.002)
        released = time.monotonic()
        lease.release()
        thread.join(SOON)
        assert got
        assert got[0] - released < SOON


def test_without_wakeups(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes cannot ring each other, waiters poll, and get the lock all the same."""
    monkeypatch.setattr(wakeup, "AVAILABLE", False)
    with fencelock.connect(url) as locks, fencelock.connect(url) as other:
        lease = locks.lock("x").acquire()
        got: list[int] = []
        thread = threading.Thread(target=lambda: got.append(take(other)))
        thread.start()
        time.sleep(0.3)
        lease.release()
        thread.join(SOON)
        assert got[0] > lease.token


# ---------------------------------------------------------------------------- the log


def test_log_does_not_grow(url: str, path: Path) -> None:
    """Over 10,000 pairs the log stays small."""
    largest = 0
    with fencelock.connect(url) as locks:
        lock = locks.lock("x")
        for number in range(10_000):
            with lock:
                pass
            if number % 1000 == 0:
                largest = max(largest, Path(f"{path}-wal").stat().st_size)
    assert largest < 50_000_000
    assert path.stat().st_size < 1_000_000


HAMMER = """
import sys, time, fencelock
url, end = sys.argv[1], time.monotonic() + 5
with fencelock.connect(url) as locks:
    number = 0
    while time.monotonic() < end:
        with locks.lock(f"n{sys.argv[2]}-{number % 7}"): number += 1
"""


def test_log_does_not_grow_under_load(url: str, path: Path) -> None:
    """Nor does it when several processes write without a pause."""
    processes = [Child.of_source(HAMMER, url, str(number)) for number in range(4)]
    largest = 0
    while any(child.process.poll() is None for child in processes):
        time.sleep(0.05)
        try:
            largest = max(largest, Path(f"{path}-wal").stat().st_size)
        except OSError:
            pass
    assert [child.ends()[0] for child in processes] == [0] * 4
    assert largest < 50_000_000


async def test_child_inherits_no_connection(url: str) -> None:
    """A forked child has no descriptor of its parent's database: it could not speak on one even by mistake."""
    worker = await Worker.start(url, "blocking")
    try:
        await worker.acquire("x", ttl=5)
        seen = await worker.do(
            """
def descriptors():
    links = [os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')]
    return [link for link in links if 'locks.db' in link]
result = [len(descriptors()), forked(descriptors)]
"""
        )
        assert seen[0] > 0
        assert seen[1] == []
        assert await worker.do("lease.check(); result = await lease.release()") is True
    finally:
        await worker.kill()


def test_nothing_is_left(url: str, path: Path) -> None:
    """After the last client has gone, there is one file, without claims."""
    with fencelock.connect(url) as locks:
        take(locks)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM claim").fetchone() == (0,)
    connection.close()


async def test_worker_sees_the_same_file(url: str) -> None:
    """Another process with the same URL means the same locks, and its claims run out by the same clock."""
    worker = await Worker.start(url, "blocking")
    try:
        await worker.acquire("x", ttl=5)
        with fencelock.connect(url) as locks:
            (holder,) = locks.inspect("x").holders
            assert 0 < holder.expires_in <= 5.001
    finally:
        await worker.kill()
