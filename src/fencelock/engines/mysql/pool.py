"""The connections of a client: opened, prepared, reused and ended. Each lease and each waiter has one of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fencelock.core.clock import NO_DEADLINE, Deadline
from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.core.log import WARNING, log
from fencelock.core.runtime import Runtime
from fencelock.engines.mysql import statements as sql
from fencelock.engines.mysql.connection import MySQLConnection, Reply
from fencelock.engines.mysql.connector import MySQLConnector, hint
from fencelock.engines.mysql.login import Greeting, Login, read_greeting
from fencelock.engines.mysql.packets import Packet, Rows, ServerError
from fencelock.engines.mysql.url import MySQLUrl
from fencelock.errors import ClientClosed, EngineUnavailable, OutcomeUnknown

if TYPE_CHECKING:
    from fencelock.core.adopted_client import AdoptedClient

MAX_IDLE = 32
CHECK_AFTER = 1.0
"""A connection that was idle for so many seconds is checked before it is used: servers close idle connections."""
ADMIN_TTL = 30
"""The ttl of a connection that is opened for lookups and administration."""
KILL_PAUSES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.3, 0.5, 0.5)
"""Seconds to wait before each check whether a killed session has ended."""


class MySQLPool:
    """The connections to one server, and what is known about that server."""

    def __init__(self, runtime: Runtime, url: MySQLUrl | AdoptedClient[MySQLUrl], namespace: str = "") -> None:
        self.address = url.address
        self.mariadb = True
        self.created = False
        """Whether this client created the tables."""
        self.reserved = 0
        """The highest token that is reserved on disk. A higher one must not be granted."""
        self.weakness = ""
        """The setting that lets the server lose commits in a crash, as the last new connection found it."""
        self._runtime = runtime
        self._url = url
        self._namespace = namespace
        self._names: sql.Names | None = None
        self._idle: list[MySQLConnection] = []
        self._all: set[MySQLConnection] = set()
        self._closed = False
        self._warned = False
        self._counter_started = False

    # ------------------------------------------------------------------ connections

    def check_open(self) -> None:
        """Raise ClientClosed if the client was closed."""
        if self._closed:
            raise ClientClosed("this client is closed; connect again")

    async def get(self, ttl: int | None = None, deadline: Deadline = NO_DEADLINE) -> MySQLConnection:
        """Return an idle connection, if possible with this ttl, or a new one. Only the caller may use it until `put`."""
        self.check_open()
        while self._idle:
            try:
                index = next((n for n, connection in enumerate(self._idle) if connection.ttl == ttl), -1)
                connection = self._idle.pop(index)
            except IndexError:
                break  # another thread took the last one
            if self._is_usable(connection):
                return connection
            self.discard(connection)
        return await self.connect(ADMIN_TTL if ttl is None else ttl, deadline)

    def _is_usable(self, connection: MySQLConnection) -> bool:
        idle = self._runtime.now() - connection.used_at
        if idle >= connection.ttl * 0.8 or not connection.open:  # the server is about to close it
            return False
        return idle < CHECK_AFTER or connection.transport.alive()

    def put(self, connection: MySQLConnection) -> None:
        """Return a connection whose session neither holds a lock nor waits for one."""
        if not connection.open or not connection.idle or self._closed or len(self._idle) >= MAX_IDLE:
            self.discard(connection)
        else:
            connection.used_at = self._runtime.now()
            self._idle.append(connection)

    def discard(self, connection: MySQLConnection) -> None:
        """Close a connection."""
        self._all.discard(connection)
        connection.close()

    async def connect(self, ttl: int, deadline: Deadline = NO_DEADLINE) -> MySQLConnection:
        """Connect, log in and prepare the session. Raises EngineUnavailable, also if the server is unsuitable."""
        if isinstance(self._url, MySQLUrl):
            return await self._connect(self._url, ttl, deadline)
        return await self._url.connect(lambda url: self._connect(url, ttl, deadline), ServerError, deadline)

    async def _connect(self, url: MySQLUrl, ttl: int, deadline: Deadline) -> MySQLConnection:
        self.address = url.address
        if deadline.passed:
            raise EngineUnavailable(f"cannot reach MySQL at {self.address} in time")
        connection = MySQLConnection(self._runtime)
        connector = MySQLConnector(url, deadline.at_most(url.seconds))
        connection.transport = await self._runtime.connect(connector, connection.on_reply, connection.on_end)
        self._all.add(connection)
        try:
            until = self._runtime.now() + deadline.at_most(url.seconds)
            greeting = await self._log_in(connection, connector, url, until)
            self.mariadb = greeting.mariadb
            connection.ttl = ttl
            timeout = max(0.5, until - self._runtime.now())
            await self._prepare_session(connection, greeting.session_id, timeout, deadline)
        except BaseException:
            self.discard(connection)
            self.check_open()  # close() broke the connection: say so
            raise
        if self._closed:
            self.discard(connection)
            self.check_open()
        connection.used_at = self._runtime.now()
        return connection

    async def _log_in(
        self, connection: MySQLConnection, connector: MySQLConnector, url: MySQLUrl, until: float
    ) -> Greeting:
        try:
            if connector.greeting is None:
                first = await self._receive_packet(connection, connection.greeting, until)
                greeting = read_greeting(first.body)
            else:
                greeting = connector.greeting
                connection.skip_greeting()
            login = Login(url, greeting)
            response: bytes | None = login.first_packet()
            while response is not None:
                reply = connection.expect_reply()
                connection.transport.send(response)
                response = login.respond(*await self._receive_packet(connection, reply, until))
        except (ServerError, ValueError) as error:
            raise connector.unreachable(error) from error
        connector.replies.logged_in = True
        return greeting

    async def _receive_packet(self, connection: MySQLConnection, reply: Reply, until: float) -> Packet:
        if not await connection.receive([reply], max(0.001, until - self._runtime.now())):
            cause = "it does not reply" if connection.open else "it closed the connection"
            raise EngineUnavailable(f"cannot reach MySQL at {self.address}: {cause} during the login")
        packet: Packet = reply.value
        return packet

    # ------------------------------------------------------------------ what a new session needs

    async def _prepare_session(
        self, connection: MySQLConnection, promised_id: int, timeout: float, deadline: Deadline
    ) -> None:
        """Set the session's variables, create missing tables, and read the server's settings."""
        statements = [
            sql.configure_session(connection.ttl, mariadb=self.mariadb),
            sql.SESSION_INFO,
            sql.HOST if self.mariadb else sql.MYSQL_HOST,
            sql.CLUSTER_VARIABLES,
            sql.VERSION,
            sql.FIRST_TOKEN,
        ]
        configured, info, host, cluster, version, first = await self.request(
            connection, statements, deadline.at_most(timeout), check=False
        )
        for value in (configured, info, host, cluster):
            self.check(value)
        ((id, database, read_only, *settings),) = info.rows
        if int(id) & 0xFFFFFFFF != promised_id:
            raise EngineUnavailable(
                f"{self.address} is a proxy: it greets as session {promised_id}, and its replies come from {decode(id)}. A "
                "lock lives in one session, which such a proxy may change or share; connect to the server itself"
            )
        variables = dict(cluster.rows)
        self._refuse_clusters(variables)
        if read_only not in (b"0", b"OFF"):
            raise EngineUnavailable(
                f"{self.address} is read-only ({decode(read_only)}): connect to the server that takes writes"
            )
        if any(_is_missing(value) for value in (version, first)) or version == Rows([]):
            group = bool(variables.get(b"group_replication_group_name"))
            await self._create_tables(connection, timeout, deadline, group=group)
            version, first = await self.request(connection, [sql.VERSION, sql.FIRST_TOKEN], deadline.at_most(timeout))
        self.check(version)
        self.check(first)
        ((layout, reserved),) = rows_of(version)
        if layout != str(sql.LAYOUT).encode():
            raise EngineUnavailable(
                f"{self.address}: the tables in {decode(database)!r} were made by another release of fencelock (layout "
                f"{decode(layout)}, this one has {sql.LAYOUT}); use another database, or upgrade"
            )
        if not rows_of(first):  # the server was restarted, or a replica took its place
            _, first = await self.request(
                connection, [sql.start_tokens(int(reserved or 0)), sql.FIRST_TOKEN], deadline.at_most(timeout)
            )
        if not self._counter_started:
            # The tables may come from an old backup: raise the counter to the clock, at least once per client.
            await self.request(connection, [sql.DELETE_STALE_HOLDERS, sql.start_tokens(0)], deadline.at_most(timeout))
            self._counter_started = True
        connection.first_token = int(rows_of(first)[0][0] or 0)
        self.reserved = int(reserved or 0)
        connection.id, connection.host = int(id), decode(host.rows[0][0]) if host.rows else ""
        self._names = sql.Names(decode(database), self._namespace)
        self.weakness = sql.weakness(*settings)
        warned, self._warned = self._warned, True
        if self.weakness and not warned:
            clock = "after a crash of its machine only its clock keeps tokens from repeating"
            log("mysql", WARNING, f"{self.address} does not wait for its disk ({self.weakness}): {clock}")

    async def _create_tables(
        self, connection: MySQLConnection, timeout: float, deadline: Deadline, *, group: bool
    ) -> None:
        """Create the tables. A replication group, and a server that allows no MEMORY tables, gets InnoDB tables only."""
        for statement in sql.schema():
            on_disk = statement.replace("ENGINE=MEMORY", "ENGINE=InnoDB")
            (value,) = await self.request(
                connection, [on_disk if group else statement], deadline.at_most(timeout), check=False
            )
            if isinstance(value, ServerError) and value.code in sql.NO_MEMORY_TABLES:
                (value,) = await self.request(connection, [on_disk], deadline.at_most(timeout), check=False)
            self.check(value)
        self.created = True

    def _refuse_clusters(self, variables: dict[bytes | None, bytes | None]) -> None:
        """Raise EngineUnavailable if GET_LOCK on this server does not exclude sessions of other members."""
        multi_primary = variables.get(b"group_replication_group_name") and (
            variables.get(b"group_replication_single_primary_mode") == b"OFF"
        )
        if variables.get(b"wsrep_on") == b"ON" or multi_primary:
            kind = "a group with several primaries" if multi_primary else "a Galera cluster"
            raise EngineUnavailable(
                f"{self.address} is a member of {kind}, where GET_LOCK does not reach the other members: two could "
                "hold one lock. Use a single server, or another engine"
            )

    # ------------------------------------------------------------------ statements

    async def request(
        self, connection: MySQLConnection, statements: Sequence[str], timeout: float, *, check: bool = True
    ) -> list[Any]:
        """Run statements on this connection; raise OutcomeUnknown without a reply, with `check` also on an error."""
        replies = connection.send(statements)
        if not await connection.receive(replies, timeout):
            cause = (
                f"no reply within {timeout:.3g} s" if connection.open else "the connection broke before the reply came"
            )
            raise OutcomeUnknown(f"{self.address}: {cause}")
        values = [reply.value for reply in replies]
        if check:
            for value in values:
                self.check(value)
        return values

    async def run(
        self,
        *statements: str,
        check: bool = True,
        timeout: float = MAX_REPLY_TIMEOUT,
        deadline: Deadline = NO_DEADLINE,
        repeat: bool = True,
    ) -> list[Any]:
        """Run statements on any connection; with `repeat`, run them once more if the connection was broken."""
        connection = await self.get(deadline=deadline)
        while True:
            try:
                return await self.request(connection, statements, deadline.at_most(timeout), check=check)
            except OutcomeUnknown:
                if connection.open or not repeat:
                    raise
                repeat = False
            finally:
                self.put(connection)
            connection = await self.connect(ADMIN_TTL, deadline)

    async def reserve(self, connection: MySQLConnection, token: int, timeout: float) -> None:
        """Make sure that a token may be granted: it is reserved on disk, so a restarted server cannot grant it again."""
        if token <= connection.first_token:
            raise EngineUnavailable(f"{self.address}: somebody has emptied fencelock_holders, which counts the tokens")
        if token > self.reserved:
            ahead = token + sql.RESERVED_AHEAD
            await self.request(connection, [sql.reserve_tokens(ahead)], timeout)
            self.reserved = max(self.reserved, ahead)

    async def mint_token(self) -> int:
        """Return a number above every token so far."""
        connection = await self.get()
        try:
            minted, _ = await self.request(connection, sql.SKIP_TOKEN, MAX_REPLY_TIMEOUT)
            token: int = minted.insert_id
            await self.reserve(connection, token, MAX_REPLY_TIMEOUT)
        finally:
            self.put(connection)
        return token

    async def names(self, deadline: Deadline = NO_DEADLINE) -> sql.Names:
        """Return how lock names are written. Connect, unless this client has connected before: the server knows that."""
        while self._names is None:
            self.put(await self.get(deadline=deadline))
        return self._names

    def check(self, value: Any) -> None:
        """Raise EngineUnavailable if a reply is an error of the server."""
        if isinstance(value, ServerError):
            raise EngineUnavailable(f"{self.address} refused: {value}{hint(value)}") from value

    # ------------------------------------------------------------------ sessions of other connections

    async def session_exists(self, connection: MySQLConnection, timeout: float, deadline: Deadline) -> bool:
        """Ask over another connection whether the server still has the session of this one."""
        lookup = sql.session(connection.id, connection.host), sql.UPTIME
        found, uptime = await self.run(*lookup, timeout=timeout, deadline=deadline)
        # Over a Unix socket all sessions have the same host: after a restart of the server, another may have the id.
        age = self._runtime.now() - connection.created_at
        restarted = ":" not in connection.host and float(uptime.rows[0][1]) < age - 1
        return bool(found.rows) and not restarted

    async def end_session(self, connection: MySQLConnection, timeout: float, deadline: Deadline) -> None:
        """Close a connection and kill its session; when this returns, the session holds nothing and waits for nothing.

        Raises OutcomeUnknown if the session does not end in time.
        """
        self.discard(connection)
        if not connection.id:
            return
        for pause in KILL_PAUSES:
            if pause:
                await self._runtime.sleep(pause)
                if deadline.passed:
                    break
            if not await self.session_exists(connection, timeout, deadline):
                return
            if pause in (0.0, 0.1):
                kill = sql.kill(connection.id)
                (value,) = await self.run(kill, check=False, timeout=timeout, deadline=deadline)
                if isinstance(value, ServerError) and value.code != sql.NO_SUCH_THREAD:
                    self.check(value)
        raise OutcomeUnknown(f"{self.address}: a session that was killed does not end in time")

    # ------------------------------------------------------------------ end and fork

    def close(self) -> None:
        """Close all connections; calls that wait on one fail."""
        self._closed = True
        for connection in list(self._all):
            connection.close()
        self._all.clear()
        self._idle.clear()

    def detach_after_fork(self) -> None:
        """Drop the parent's connections in a forked child without sending anything on them."""
        for connection in self._all:
            connection.transport.detach_after_fork()
        self._all, self._idle, self._counter_started = set(), [], False


def _is_missing(value: Any) -> bool:
    return isinstance(value, ServerError) and value.code == sql.NO_SUCH_TABLE


def decode(value: bytes | None) -> str:
    """Return a value as text; NULL is empty."""
    return "" if value is None else value.decode(errors="replace")


def rows_of(value: Any) -> list[tuple[bytes | None, ...]]:
    """Return the rows of a reply; an error has none."""
    return value.rows if isinstance(value, Rows) else []
