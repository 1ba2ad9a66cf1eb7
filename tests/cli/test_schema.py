"""`fencelock schema`: prints what makes the tables of PostgreSQL or MySQL, or makes them; changes nothing that is there."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import psycopg
import pytest

from fencelock.engines.postgres.schema import LAYOUT
from tests.cli.conftest import Cli
from tests.engines.mysql_server import own_database
from tests.engines.postgres_server import ask, empty
from tests.servers.mariadb import MariaDB
from tests.servers.postgres import Postgres


@pytest.fixture
def pg(cli: Cli, postgres: Postgres) -> Postgres:
    """The PostgreSQL that all tests share, empty, and the one that the command is about."""
    cli.env["FENCELOCK_URL"] = postgres.url
    return empty(postgres)


def test_apply_creates_the_schema_once(cli: Cli, pg: Postgres) -> None:
    """`--apply` creates the schema once, and prints where, whether it did, and where the grants are."""
    for words in ("was made", "was there already"):
        done = cli("schema", "--apply")
        assert (done.returncode, done.stdout) == (0, "")
        assert f"the schema {words}" in done.stderr
        assert f":{pg.port}/" in done.stderr
        assert "--print" in done.stderr
    assert ask(pg, "SELECT version FROM fencelock.layout") == [(LAYOUT,)]
    assert cli("run", "x", "--", "true").returncode == 0


def test_print(cli: Cli, pg: Postgres) -> None:
    """What `--print` writes makes the schema when others run it, twice even; by itself it changes nothing."""
    script = cli("schema", "--print").stdout
    assert ask(pg, "SELECT to_regnamespace('fencelock')") == [(None,)]
    for _ in range(2):
        with psycopg.connect(pg.url, autocommit=True) as connection:
            connection.execute(script.encode())
    assert cli("run", "x", "--", "true").returncode == 0


def test_grants(cli: Cli, pg: Postgres) -> None:
    """The grants at the end of what `--print` writes are what another role needs, and enough."""
    _, _, comments = cli("schema", "--print").stdout.rpartition("needs to work with it:\n")
    cli("schema", "--apply")
    role = f"r{os.getpid()}"
    ask(pg, f"CREATE ROLE {role} LOGIN PASSWORD 's3cr3t'")
    try:
        cli.env["FENCELOCK_URL"] = pg.url.replace("postgres@", f"{role}:s3cr3t@")
        assert cli("run", "x", "--", "true").returncode == 69
        for line in comments.splitlines():
            ask(pg, line.removeprefix("-- ").replace(" app;", f" {role};"))
        done = cli("run", "x", "--", "true")
        assert done.returncode == 0, done.stderr
    finally:
        ask(pg, f"DROP OWNED BY {role}")
        ask(pg, f"DROP ROLE {role}")


def test_other_layout(cli: Cli, pg: Postgres) -> None:
    """A schema of another release is refused and stays as it is."""
    cli("schema", "--apply")
    ask(pg, "UPDATE fencelock.layout SET version = 7")
    done = cli("schema", "--apply")
    assert done.returncode == 69
    assert "layout 7" in done.stderr
    assert ask(pg, "SELECT version FROM fencelock.layout") == [(7,)]


def test_mysql(cli: Cli, mariadb: MariaDB) -> None:
    """MySQL's tables are printed, for an administrator to make them, or made: then a user who may make none gets along."""
    url = own_database(mariadb)
    name = url.rpartition("/")[2]
    mariadb.query(f"CREATE USER c{name} IDENTIFIED BY 's3cr3t'")
    mariadb.query(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name}.* TO c{name}")
    cli.env["FENCELOCK_URL"] = url
    script = cli("schema", "--print").stdout
    assert script.endswith(f"-- GRANT SELECT, INSERT, UPDATE, DELETE ON `{name}`.* TO 'app'@'%';\n")
    assert mariadb.query(f"SHOW TABLES FROM {name}") == ""
    for _ in range(2):
        mariadb.query(f"USE {name};\n{script}")
    cli.env["FENCELOCK_URL"] = url.replace("root@", f"c{name}:s3cr3t@")
    assert cli("run", "x", "--", "true").returncode == 0
    mariadb.query(f"DROP DATABASE {name}; CREATE DATABASE {name}")
    assert cli("schema", "--apply").returncode == 69
    for words in ("was made", "was there already"):
        done = cli("schema", "--apply", "--url", url)
        assert (done.returncode, done.stdout) == (0, "")
        assert f"the schema {words}" in done.stderr
    assert cli("run", "x", "--", "true").returncode == 0
    mariadb.query(f"UPDATE {name}.fencelock_layout SET version = 7")
    done = cli("schema", "--apply")
    assert done.returncode == 69
    assert "layout 7" in done.stderr


def test_engine_without_a_schema(cli: Cli) -> None:
    """An engine that needs no schema says so."""
    done = cli("schema", "--apply", "--url", "memory://")
    assert done.returncode == 0
    assert "only PostgreSQL and MySQL need a schema" in done.stderr
    assert "FENCELOCK_URL" not in done.stderr
    del cli.env["FENCELOCK_URL"]
    assert "set $FENCELOCK_URL or give --url" in cli("schema", "--print").stderr


def fence_table(url: str) -> list[str]:
    """Return the fence's resources; fails if there is no table."""
    from fencelock.cli.database import connect

    with connect(url) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT resource FROM fencelock_fence")
        return [str(row[0]) for row in cursor.fetchall()]


def run(url: str, statement: str) -> None:
    """Run a statement as the application's owner."""
    from fencelock.cli.database import connect

    with connect(url) as connection:
        connection.cursor().execute(statement)


def drop(url: str, table: str) -> None:
    """Remove a table, of which MariaDB warns if it is not there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(url, f"DROP TABLE IF EXISTS {table}")


@pytest.mark.parametrize("kind", ["postgres", "mariadb", "sqlite"])
def test_fence(cli: Cli, pg: Postgres, mariadb: MariaDB, tmp_path: Path, kind: str) -> None:
    """`--fence` is about the table of the SQL fence: `--apply` makes it, twice even, and `--print` says how."""
    urls = {"postgres": pg.url, "mariadb": mariadb.url, "sqlite": f"sqlite:///{tmp_path}/my%20app.db"}
    url = cli.env["FENCELOCK_URL"] = urls[kind]
    drop(url, "fencelock_fence")
    for words in ("there now", "there already, and right"):
        done = cli("schema", "--fence", "--apply")
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert f"the fence's table is {words}" in done.stderr
    assert fence_table(url) == (["b''"] if kind == "mariadb" else [])  # the floor
    script = cli("schema", "--fence", "--print").stdout
    assert script.startswith("CREATE TABLE IF NOT EXISTS fencelock_fence")
    assert script.endswith(";\n")
    assert ("-- GRANT SELECT, INSERT, UPDATE, DELETE ON fencelock_fence TO" in script) == (kind != "sqlite")
    drop(url, "fencelock_fence")
    run(url, "CREATE TABLE fencelock_fence (a INT)")
    done = cli("schema", "--fence", "--apply")
    drop(url, "fencelock_fence")
    assert done.returncode == 69
    assert "there is a table fencelock_fence, but not with the columns resource, token, id" in done.stderr


def test_fence_over_a_unix_socket(cli: Cli, mariadb: MariaDB) -> None:
    """The options of a MySQL URL count: the database is the one behind the socket, not the one at localhost:3306."""
    name = own_database(mariadb).rpartition("/")[2]
    done = cli("schema", "--fence", "--apply", "--url", f"mysql://root@/{name}?unix_socket={mariadb.folder}/socket")
    assert done.returncode == 0, done.stderr
    assert mariadb.query(f"SHOW TABLES FROM {name}") == "fencelock_fence"
    done = cli("schema", "--fence", "--apply", "--url", f"{mariadb.url}?ssl-mode=required")
    assert done.returncode == 69
    assert "TLS" in done.stderr or "SSL" in done.stderr


def test_fence_in_a_file_of_the_home_folder(cli: Cli) -> None:
    """A path in the home folder means the same as for an engine; options that SQLite has elsewhere are refused."""
    cli.env["HOME"] = str(cli.folder)
    done = cli("schema", "--fence", "--apply", "--url", "sqlite:~/app.db")
    assert done.returncode == 0, done.stderr
    assert fence_table(f"sqlite:///{cli.folder}/app.db") == []
    done = cli("schema", "--fence", "--apply", "--url", "sqlite:new.db?mode=ro")
    assert done.returncode == 64
    assert "sqlite takes no options" in done.stderr
    assert [path.name for path in cli.folder.iterdir()] == ["app.db"]


@pytest.mark.parametrize("kind", ["postgres", "mariadb", "sqlite"])
def test_lockfree(cli: Cli, pg: Postgres, mariadb: MariaDB, tmp_path: Path, kind: str) -> None:
    """`--lockfree` is about the tables of what needs no lock: `--apply` makes them, twice even, and `--print` says how."""
    from fencelock.cli.database import connect
    from fencelock.lockfree.outbox import Outbox

    urls = {"postgres": pg.url, "mariadb": own_database(mariadb), "sqlite": f"sqlite:///{tmp_path}/app.db"}
    url = cli.env["FENCELOCK_URL"] = urls[kind]
    for table in ("fencelock_idempotency", "fencelock_outbox", "fencelock_outbox_turn", "fencelock_fence"):
        drop(url, table)
    for words in ("there now", "there already, and right"):
        done = cli("schema", "--lockfree", "--apply")
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert f"the tables of fencelock.lockfree are {words}" in done.stderr
    assert fence_table(url) == (["b''"] if kind == "mariadb" else [])  # which the outbox's relay needs
    with connect(url) as connection:
        assert Outbox("of the test of the schema").pending(connection) == 0
    assert "CREATE TABLE IF NOT EXISTS fencelock_outbox" in cli("schema", "--lockfree", "--print").stdout
    assert cli("schema", "--lockfree", "--fence", "--print").returncode == 64


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("memory://", 64, "names no database"),
        ("sqlite://", 64, "names no file"),
        ("mysql://root@127.0.0.1:1/x", 69, "127.0.0.1"),
        ("mysql://root@127.0.0.1:1", 64, "name the database"),
        ("postgresql://root@127.0.0.1:1/x", 69, "Make sure that the server runs there"),
        ("sqlite:/no/such/folder/app.db", 69, "Make sure that its folder and file are there"),
    ],
)
def test_fence_refused(cli: Cli, url: str, code: int, words: str) -> None:
    """What is no database, or cannot be reached, is said so."""
    done = cli("schema", "--fence", "--apply", "--url", url)
    assert done.returncode == code
    assert words in done.stderr


@pytest.mark.parametrize("what", ["--fence", "--lockfree"])
@pytest.mark.parametrize("how", ["--print", "--apply"])
def test_schema_needs_a_url(cli: Cli, what: str, how: str) -> None:
    """Without a URL the command asks for one and guesses nothing."""
    del cli.env["FENCELOCK_URL"]
    done = cli("schema", what, how)
    assert (done.returncode, done.stdout) == (64, "")
    assert "give its URL with --url" in done.stderr


def test_database_or_rights_that_are_missing(cli: Cli, pg: Postgres, mariadb: MariaDB) -> None:
    """What a database says comes with the next step: a database to make, a password to look at, a user who may."""
    role = f"n{os.getpid()}"
    missing = "Make the database first"
    for url in (f"{pg.url.rpartition('/')[0]}/nowhere", f"{mariadb.url.rpartition('/')[0]}/nowhere"):
        done = cli("schema", "--fence", "--apply", "--url", url)
        assert done.returncode == 69
        assert missing in done.stderr
    name = own_database(mariadb).rpartition("/")[2]
    mariadb.query(f"CREATE USER {role} IDENTIFIED BY 's3cr3t'; GRANT SELECT ON {name}.* TO {role}")
    ask(pg, f"CREATE ROLE {role} LOGIN PASSWORD 's3cr3t'")
    try:
        server = mariadb.url.rpartition("/")[0].replace("root@", f"{role}:s3cr3t@")
        for url in (f"{server}/{name}", pg.url.replace("postgres@", f"{role}:s3cr3t@")):
            cli.env["FENCELOCK_URL"] = url
            done = cli("schema", "--fence", "--apply")
            assert done.returncode == 69, done.stderr
            assert "what --print writes" in done.stderr
            assert "s3cr3t" not in done.stderr
    finally:
        ask(pg, f"DROP OWNED BY {role}")
        ask(pg, f"DROP ROLE {role}")
        mariadb.query(f"DROP USER {role}")
