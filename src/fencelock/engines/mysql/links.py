"""All connections of a client: made, looked after, ended. Each lease and each waiter has one to itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fencelock.core.clock import PATIENT, Deadline
from fencelock.core.engine import MAX_REPLY_TIMEOUT, time_to_answer
from fencelock.core.log import WARNING, log
from fencelock.core.runtime import Event, Runtime
from fencelock.engines.mysql import statements as sql
from fencelock.engines.mysql.dial import MysqlConnector, hint
from fencelock.engines.mysql.link import Link
from fencelock.engines.mysql.login import Greeting, Login, read_greeting
from fencelock.engines.mysql.packets import Packet, Rows, ServerError
from fencelock.engines.mysql.place import Place
from fencelock.errors import ClientClosed, EngineUnavailable, OutcomeUnknown

if TYPE_CHECKING:
    from fencelock.core.adopted_client import AdoptedClient

LINKS_KEPT = 32
LOOK_SECONDS = 1.0
"""A link that was not used for so long is looked at before it is used: servers hang up on the idle."""
AIDE_TTL = 30
"""The ttl of a session that is made to look at others."""
PAUSES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.3, 0.5, 0.5)
"""How long to wait, again and again, for a session that was killed to be gone."""


class Links:
    """The connections to one server, and what is known about it."""

    def __init__(self, runtime: Runtime, place: Place | AdoptedClient[Place]) -> None:
        self.address = place.address
        self.mariadb = True
        self.created = False
        """Whether the tables were made by us."""
        self.reserved = 0
        """No token above this may be granted before it is reserved, on disk."""
        self.database: str | None = None
        """As the server writes it; None before the first connection."""
        self.weakness = ""
        """The setting that lets the server forget commits in a crash, as the last new connection found it."""
        self._runtime = runtime
        self._place = place
        self._idle: list[Link] = []
        self._all: set[Link] = set()
        self._closed = False
        self._warned = False
        self._begun: Event | None = None

    # ------------------------------------------------------------------ having one

    def check_open(self) -> None:
        """Raise if the client was closed."""
        if self._closed:
            raise ClientClosed("this client is closed; connect again")

    async def take(self, ttl: int | None = None, limit: Deadline = PATIENT) -> Link:
        """Return a link that works, as far as can be told without asking, and the right to speak on it."""
        self.check_open()
        while self._idle:
            try:
                place = next((n for n, link in enumerate(self._idle) if link.ttl == ttl), -1)
                link = self._idle.pop(place)
            except IndexError:
                break  # another thread was faster
            if self._usable(link):
                link.pooled = True
                return link
            self.drop(link)
        return await self.make(AIDE_TTL if ttl is None else ttl, limit)

    def _usable(self, link: Link) -> bool:
        idle = self._runtime.now() - link.used
        if idle >= link.ttl * 0.8 or not link.open:  # the server is about to hang up
            return False
        return idle < LOOK_SECONDS or link.connection.alive()

    def give(self, link: Link) -> None:
        """Give a link back, for the next who needs one; nothing hangs on it."""
        if not link.open or not link.idle or self._closed or len(self._idle) >= LINKS_KEPT:
            self.drop(link)
        else:
            link.used = self._runtime.now()
            self._idle.append(link)

    def drop(self, link: Link) -> None:
        """Close a link for good."""
        self._all.discard(link)
        link.close()

    async def make(self, ttl: int, limit: Deadline = PATIENT) -> Link:
        """Connect, log in, and see that the server is one that we can work with; all that within the limit."""
        if isinstance(self._place, Place):
            return await self._make(self._place, ttl, limit)
        return await self._place.connect(lambda place: self._make(place, ttl, limit), ServerError, limit)

    async def _make(self, place: Place, ttl: int, limit: Deadline) -> Link:
        self.address = place.address
        if limit.passed:
            raise EngineUnavailable(f"cannot reach MySQL at {self.address} in time")
        link = Link(self._runtime)
        connector = MysqlConnector(place, limit.at_most(place.seconds))
        link.connection = await self._runtime.connect(connector, link.heard, link.ended)
        self._all.add(link)
        try:
            until = self._runtime.now() + limit.at_most(place.seconds)
            greeting = await self._log_in(link, connector, place, until)
            self.mariadb = greeting.mariadb
            link.ttl = ttl
            await self._introduce(link, greeting.id, max(0.5, until - self._runtime.now()), limit)
        except BaseException:
            self.drop(link)
            self.check_open()  # then that is why
            raise
        if self._closed:
            self.drop(link)
            self.check_open()
        link.used = self._runtime.now()
        return link

    async def _log_in(self, link: Link, connector: MysqlConnector, place: Place, until: float) -> Greeting:
        try:
            if connector.greeting is None:
                first = await self._packet(link, link.greeting, until)
                greeting = read_greeting(first.body)
            else:
                greeting = connector.greeting
                link.expect_nothing()
            login = Login(place, greeting)
            words: bytes | None = login.begin()
            while words is not None:
                reply = link.expect()
                link.connection.tell(words)
                words = login.answer(*await self._packet(link, reply, until))
        except (ServerError, ValueError) as error:
            raise connector.unreachable(error) from error
        connector.messages.logged_in = True
        return greeting

    async def _packet(self, link: Link, reply: Any, until: float) -> Packet:
        if not await link.hear([reply], max(0.001, until - self._runtime.now())):
            why = "it does not answer" if link.open else "it hung up"
            raise EngineUnavailable(f"cannot reach MySQL at {self.address}: {why} while we log in")
        answer: Packet = reply.answer
        return answer

    async def _introduce(self, link: Link, promised: int, patience: float, limit: Deadline) -> None:
        """Settle the session, and learn what has to be known of the server."""
        host_of = sql.HOST if self.mariadb else sql.MYSQL_HOST
        asked = [
            sql.settle(link.ttl, mariadb=self.mariadb),
            sql.WHO,
            host_of,
            sql.CLUSTER,
            sql.VERSION,
            sql.FIRST,
        ]
        settled, who, host, cluster, version, first = await self.request(
            link, asked, limit.at_most(patience), check=False
        )
        for answer in (settled, who, host, cluster):
            self.check(answer)
        ((id, database, read_only, *settings),) = who.rows
        if int(id) & 0xFFFFFFFF != promised:
            raise EngineUnavailable(
                f"{self.address} is a proxy: it greets as session {promised}, and its answers come from {sql_words(id)}. A "
                "lock lives in one session, which such a proxy may change or share; connect to the server itself"
            )
        known = dict(cluster.rows)
        self._refuse_clusters(known)
        if read_only not in (b"0", b"OFF"):
            raise EngineUnavailable(f"{self.address} is read-only ({sql_words(read_only)}): {_WRITES}")
        if any(_missing(answer) for answer in (version, first)) or version == Rows([]):
            await self.create(link, patience, limit, group=bool(known.get(b"group_replication_group_name")))
            version, first = await self.request(link, [sql.VERSION, sql.FIRST], limit.at_most(patience))
        self.check(version)
        self.check(first)
        ((layout, reserved),) = rows_of(version)
        if layout != str(sql.LAYOUT).encode():
            raise EngineUnavailable(
                f"{self.address}: the tables in {sql_words(database)!r} were made by another release of fencelock (layout "
                f"{sql_words(layout)}, this one has {sql.LAYOUT}); use another database, or upgrade"
            )
        if not rows_of(first):  # the server was started anew, or is another one
            _, first = await self.request(link, [sql.begin(int(reserved or 0)), sql.FIRST], limit.at_most(patience))
        await self._begin(link, limit.at_most(patience))
        link.first = int(rows_of(first)[0][0] or 0)
        self.reserved = int(reserved or 0)
        link.id, link.host = int(id), sql_words(host.rows[0][0]) if host.rows else ""
        self.database = sql_words(database)
        self.weakness = sql.weakness(*settings)
        warned, self._warned = self._warned, True
        if self.weakness and not warned:
            clock = "after a crash of its machine only its clock keeps tokens from repeating"
            log("mysql", WARNING, f"{self.address} does not wait for its disk ({self.weakness}): {clock}")

    async def _begin(self, link: Link, patience: float) -> None:
        """See to it, once for all connections, that tokens are not below the clock: data may be from an old copy."""
        while (begun := self._begun) is not None:
            if not await begun.wait(patience):
                raise OutcomeUnknown(f"{self.address}: no answer within {patience:g} s")
            if self._begun is begun:
                return
        begun = self._begun = self._runtime.event()
        try:
            await self.request(link, [sql.SWEEP, sql.begin(0)], patience)
        except BaseException:
            self._begun = None  # the next one has to
            raise
        finally:
            begun.set()

    async def create(self, link: Link, patience: float, limit: Deadline, *, group: bool) -> None:
        """Make the tables; those of a group, and of who allows no others, are all on disk."""
        for statement in sql.schema():
            on_disk = statement.replace("ENGINE=MEMORY", "ENGINE=InnoDB")
            asked = [on_disk if group else statement]
            (answer,) = await self.request(link, asked, limit.at_most(patience), check=False)
            if isinstance(answer, ServerError) and answer.code in sql.NO_MEMORY_TABLES:
                (answer,) = await self.request(link, [on_disk], limit.at_most(patience), check=False)
            self.check(answer)
        self.created = True

    def _refuse_clusters(self, known: dict[bytes | None, bytes | None]) -> None:
        """Refuse servers whose locks are not those of the other members."""
        several = known.get(b"group_replication_group_name") and (
            known.get(b"group_replication_single_primary_mode") == b"OFF"
        )
        if known.get(b"wsrep_on") == b"ON" or several:
            kind = "a group with several primaries" if several else "a Galera cluster"
            raise EngineUnavailable(
                f"{self.address} is a member of {kind}, where GET_LOCK does not reach the other members: two could "
                "hold one lock. Use a single server, or another engine"
            )

    # ------------------------------------------------------------------ asking

    async def request(self, link: Link, asked: Sequence[str], patience: float, *, check: bool = True) -> list[Any]:
        """Ask on this link."""
        replies = link.say(asked)
        if not await link.hear(replies, patience):
            why = f"no answer within {patience:.3g} s" if link.open else "the connection broke before the answer came"
            raise OutcomeUnknown(f"{self.address}: {why}")
        answers = [reply.answer for reply in replies]
        if check:
            for answer in answers:
                self.check(answer)
        return answers

    async def run(
        self,
        *asked: str,
        check: bool = True,
        patience: float = MAX_REPLY_TIMEOUT,
        limit: Deadline = PATIENT,
        repeat: bool = True,
    ) -> list[Any]:
        """Ask on any link, which has to be there within the limit; unless `repeat` is false, again if the link broke."""
        link = await self.take(limit=limit)
        again = link.pooled and repeat
        try:
            return await self.request(link, asked, time_to_answer(limit, patience), check=check)
        except OutcomeUnknown:
            if link.open or not again:
                raise
        finally:
            self.give(link)
        link = await self.make(AIDE_TTL, limit)  # the server had hung up on the other
        try:
            return await self.request(link, asked, time_to_answer(limit, patience), check=check)
        finally:
            self.give(link)

    async def reserve(self, link: Link, token: int, patience: float) -> None:
        """See to it that a token may be granted: whatever happens to the server, none will be granted twice."""
        if token <= link.first:
            raise EngineUnavailable(
                f"{self.address}: somebody has emptied fencelock_holders, which has the tokens' number"
            )
        if token > self.reserved:
            ahead = token + sql.AHEAD
            await self.request(link, [sql.reserve(ahead)], patience)
            self.reserved = max(self.reserved, ahead)

    async def mint(self) -> int:
        """Return a number above every token and every such number so far."""
        link = await self.take()
        try:
            minted, _ = await self.request(link, sql.SKIP, MAX_REPLY_TIMEOUT)
            number: int = minted.insert_id
            await self.reserve(link, number, MAX_REPLY_TIMEOUT)
        finally:
            self.give(link)
        return number

    async def know(self, limit: Deadline = PATIENT) -> None:
        """Make sure that there was a connection: how names are written depends on the server, and so do its traits."""
        if self.database is None:
            self.give(await self.take(limit=limit))

    def check(self, answer: Any) -> None:
        """Raise what is to be raised for a server's error."""
        if isinstance(answer, ServerError):
            raise EngineUnavailable(f"{self.address} refused: {answer}{hint(answer)}") from answer

    # ------------------------------------------------------------------ sessions, seen from another

    async def session_exists(self, link: Link, patience: float, limit: Deadline) -> bool:
        """Return whether the server still has the session of a link, asked over another connection."""
        found, up = await self.run(sql.session(link.id, link.host), sql.UPTIME, patience=patience, limit=limit)
        # Over a Unix socket all sessions have the same address: after a restart of the server, another may have the number.
        restarted = ":" not in link.host and float(up.rows[0][1]) < self._runtime.now() - link.made - 1
        return bool(found.rows) and not restarted

    async def end(self, link: Link, patience: float, limit: Deadline) -> None:
        """End a session for sure, whatever it is doing; when this returns, it holds nothing and waits for nothing."""
        link.close()
        self._all.discard(link)
        if not link.id:
            return
        for pause in PAUSES:
            if pause:
                await self._runtime.sleep(pause)
                if limit.passed:
                    break
            if not await self.session_exists(link, patience, limit):
                return
            if pause in (0.0, 0.1):
                (answer,) = await self.run(sql.kill(link.id), check=False, patience=patience, limit=limit)
                if isinstance(answer, ServerError) and answer.code != sql.NO_SUCH_THREAD:
                    self.check(answer)
        raise OutcomeUnknown(f"{self.address}: a session that was killed does not end in time")

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Close all links; whoever waits on one learns of it."""
        self._closed = True
        for link in list(self._all):
            link.close()
        self._all.clear()
        self._idle.clear()

    def forget(self) -> None:
        """Begin anew in a forked child."""
        for link in self._all:
            link.connection.forget()
        self._all, self._idle, self._begun = set(), [], None


class MysqlSchema:
    """`fencelock.core.engine.Schema` of one database."""

    def __init__(self, runtime: Runtime, place: Place) -> None:
        self._links = Links(runtime, place)
        self._database = place.database

    def text(self) -> str:
        """Return the statements, for people to read and run."""
        return sql.script()

    def grants(self) -> str:
        """Return what another user needs."""
        database = self._database.replace("`", "``")
        return f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.* TO 'app'@'%';\n"

    async def apply(self) -> bool:
        """Make the tables, as every first connection does; return whether that was needed."""
        try:
            await self._links.take()
        finally:
            self._links.close()
        return self._links.created


def _missing(answer: Any) -> bool:
    return isinstance(answer, ServerError) and answer.code == sql.NO_SUCH_TABLE


_WRITES = "connect to the server that takes writes"


def sql_words(value: bytes | None) -> str:
    """Return a value as text."""
    return "" if value is None else value.decode(errors="replace")


def rows_of(answer: Any) -> list[tuple[bytes | None, ...]]:
    """Return what a query found."""
    return answer.rows if isinstance(answer, Rows) else []
