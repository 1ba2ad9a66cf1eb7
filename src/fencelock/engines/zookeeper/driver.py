"""kazoo, as far as we use it. All that we know of its inside is here, in `connection.py` and in `answers.py`.

kazoo connects, reconnects, and packs and unpacks messages. What we do not let it do is to speak for us: it would keep a
session alive, by pings of its own, for a program that hangs. Requests go straight to the socket, from whoever asks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from ssl import SSLContext, create_default_context

from kazoo.client import KazooClient
from kazoo.protocol.serialization import CloseInstance, Create2
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from fencelock.core.fork import silence
from fencelock.engines.zookeeper.address import Address
from fencelock.engines.zookeeper.answers import Answer
from fencelock.engines.zookeeper.connection import Connection, Handler
from fencelock.engines.zookeeper.line import Asked, Line
from fencelock.engines.zookeeper.messages import packed_acl
from fencelock.errors import EngineUnavailable

CONTAINER = 4
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two rounds of connecting to all hosts."""

LOGGER = logging.getLogger("fencelock.kazoo")
"""Where kazoo logs: nothing, unless somebody sets the level; and no requests even then, as logins are among them."""
if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.CRITICAL)
LOGGER.addFilter(lambda record: record.levelno >= logging.INFO)


class CreateContainer(Create2):  # type: ignore[misc]
    """Makes a node that ZooKeeper removes once it has had children and has none any more; kazoo lacks it."""

    type = 19


def _context(address: Address) -> SSLContext:
    try:
        context = create_default_context(cafile=address.ca)
        if address.cert is not None:
            context.load_cert_chain(address.cert, address.key)
    except (OSError, ValueError) as error:
        raise EngineUnavailable(f"{address.name}: the files for TLS are of no use: {error}") from error
    return context


class Driver:
    """One session of kazoo's. `made` is told when a connection was begun, and the seconds that were agreed on.

    `fired` is told of a node that was watched: its path, and whether it is gone.
    """

    def __init__(
        self,
        address: Address,
        seconds: float,
        now: Callable[[], float],
        made: Callable[[float, float], None],
        changed: Callable[[str], object],
        fired: Callable[[str, bool], None],
    ) -> None:
        self.acl = CREATOR_ALL_ACL if address.login is not None else OPEN_ACL_UNSAFE
        self.packed_acl = packed_acl(self.acl)
        self._client = KazooClient(
            ",".join(address.hosts),
            seconds,
            handler=Handler(max(0.5, min(5.0, seconds / 6)), _context(address) if address.tls else None),
            auth_data=set() if address.login is None else {("digest", address.login)},
            connection_retry=KazooRetry(max_tries=-1, delay=FIRST_PAUSE, max_delay=LONGEST_PAUSE),
            logger=LOGGER,
        )
        self._connection = self._client._connection = Connection(self._client, now, made, fired)
        self.turns = self._connection.turns
        """Where whoever waits for an answer comes by."""
        self._client.add_listener(changed)

    @property
    def id(self) -> int | None:
        """The session's number, which nodes that live with it carry."""
        return self._client._session_id  # type: ignore[no-any-return]

    @property
    def last(self) -> int:
        """The latest number of a change that an answer came with."""
        return self._client.last_zxid  # type: ignore[no-any-return]

    @property
    def trouble(self) -> str:
        """Why it cannot connect."""
        return self._connection.trouble

    def start(self) -> None:
        """Begin to connect."""
        self._client.start_async()

    def post(self, *asked: Asked) -> None:
        """Send requests, after those before them; they wait while there is no connection."""
        self._connection.post(*asked)

    def nudge(self) -> None:
        """Have what was asked for be sent."""
        self._connection.nudge()

    def desert(self, line: Line) -> None:
        """Give up a line at which this very thread was when it was interrupted."""
        line.deserted = True
        self.reset()

    def reset(self) -> None:
        """Break the connection, so that kazoo makes a new one for the same session."""
        line = self.turns.line
        if line is not None:
            line.kill()
            self.nudge()

    def end(self, tell: bool) -> None:
        """End the session, with a word to the server; or without: then it runs out there."""
        self._client._stopped.set()
        if tell:
            self.post((CloseInstance, Answer()))
            self.nudge()
        else:
            self.reset()
        self._connection.clean_up()

    def forget(self) -> None:
        """Let go of what a forked child inherited; kazoo's thread is not in the child."""
        line = self.turns.line
        inherited = self._connection._read_sock, self._connection._write_sock, None if line is None else line.sock
        for sock in inherited:
            if sock is not None:
                silence(sock)
