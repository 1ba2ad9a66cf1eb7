"""How to reach a server: redis-py connects, encrypts and logs in; from there on the wire speaks to the server directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import hiredis
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from hiredis import PushNotification
from redis.backoff import NoBackoff

from fencelock.core.runtime import NO_REPLY, Command, Parser
from fencelock.core.urls import redact
from fencelock.errors import EngineUnavailable, InvalidType, InvalidURL

DIAL_SECONDS = 5.0
"""How long connecting and logging in may take, unless the URL says otherwise."""
HINTS = {
    "unknown command 'HELLO'": "; fencelock needs Redis 6.2 or later",
    "unknown command `HELLO`": "; fencelock needs Redis 6.2 or later",
    "HELLO must be called with the client already authenticated": "; give the password in the URL",
    "invalid username-password pair": "; check the user and the password in the URL",
    "No master found": "; are the Sentinels up, and is that what they call the service?",
}
"""What to do about what redis-py says when it cannot connect."""
OF_SENTINEL = "sentinel_"
"""Options of a URL that are for the Sentinels begin so."""


class ServerError(Exception):
    """An error that a server answered with: returned as any other answer, never raised by a wire."""

    @property
    def kind(self) -> str:
        """Its first word, by which Redis tells errors apart."""
        return str(self).partition(" ")[0]


class RedisConnector:
    """`fencelock.core.runtime.Dialer` for one Redis server, or for whichever one Sentinel says is the master."""

    pushes = PushNotification

    def __init__(
        self,
        address: str,
        blocking: Callable[[], Any],
        aio: Callable[[], Any],
        seconds: float = inf,
        error: Callable[[str], ServerError] = ServerError,
    ) -> None:
        self.address = address
        self._blocking = blocking
        self._aio = aio
        self._seconds = seconds
        self._error = error

    def within(self, seconds: float) -> RedisConnector:
        """Return one that takes no longer than this for either of connecting and logging in."""
        if seconds >= self._seconds:
            return self
        return RedisConnector(self.address, self._blocking, self._aio, seconds, self._error)

    def telling(self, refused: Callable[[ServerError], None]) -> RedisConnector:
        """Return one that tells of each error that a server answers with, also when nobody waits for the answer any more."""

        def error(text: str) -> ServerError:
            refused(it := ServerError(text))
            return it

        return RedisConnector(self.address, self._blocking, self._aio, self._seconds, error)

    def _hurry(self, connection: Any) -> Any:
        if self._seconds < inf:
            for patience in ("socket_connect_timeout", "socket_timeout"):
                setattr(connection, patience, min(getattr(connection, patience), self._seconds))
        return connection

    def connect(self, open_stream: object = None) -> Any:  # noqa: ARG002
        """Connect with redis-py and take its socket."""
        connection = self._hurry(self._blocking())
        try:
            connection.connect()
        except (redis.RedisError, OSError, ValueError) as error:  # the last for a host that cannot be one
            raise self._unreachable(connection, error) from error
        finally:
            for helper in getattr(connection, "helpers", ()):
                helper.close()
        sock, connection._sock = connection._sock, None
        connection.disconnect()
        return sock

    async def aconnect(self, open_stream: object = None) -> tuple[Any, object]:  # noqa: ARG002
        """Connect with redis-py and take its transport; the stream objects would close it if they were dropped."""
        connection = self._hurry(self._aio())
        try:
            await connection.connect()
        except BaseException as error:
            await connection.disconnect(nowait=True)  # cancelled, it would leave that to the garbage collector
            if isinstance(error, redis.RedisError | OSError | ValueError):
                raise self._unreachable(connection, error) from error
            raise
        finally:
            for helper in getattr(connection, "helpers", ()):
                await helper.aclose()
        streams = connection._reader, connection._writer
        connection._reader = connection._writer = None
        return streams[1].transport, streams

    def pack(self, command: Command) -> bytes:
        """Return the command as Redis wants it. hiredis could, but an interrupt at the wrong moment crashes its packer."""
        text = "".join([f"${len(word)}\r\n{word}\r\n" for word in map(str, command)])
        if text.isascii():
            return f"*{len(command)}\r\n{text}".encode()
        words = [str(word).encode() for word in command]
        return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])

    def parser(self) -> Parser:
        """Return a parser of Redis's answers."""
        return hiredis.Reader(protocolError=ValueError, replyError=self._error, notEnoughData=NO_REPLY)

    def _unreachable(self, connection: Any, error: Exception) -> EngineUnavailable:
        words = str(error) or type(error).__name__
        if words.startswith("No master found"):
            words = words.partition(" : ")[0]  # behind that is what redis-py knows of each Sentinel's client
        tls = isinstance(connection, redis.SSLConnection | redis.asyncio.SSLConnection)
        return EngineUnavailable(f"cannot reach Redis at {self.address}: {words}{_hint(words, tls)}")


def _hint(words: str, tls: bool) -> str:
    for part, hint in HINTS.items():
        if part in words:
            return hint
    if tls and ("Timeout" in words or "SSL" in words):
        return "; does it speak TLS there? If not, the URL begins with redis://, or redlock://"
    if not tls and "reset by peer" in words:
        return "; if it wants TLS, the URL begins with rediss://, or redlocks://"
    return ""


# Ours to decide, whatever a URL or a client says: the acquire loop repeats what has to be repeated, and waiters are called
# by pushes, which need protocol 3.
_OURS: dict[str, Any] = {"protocol": 3, "health_check_interval": 0}
try:
    from redis.driver_info import DriverInfo

    # Else every connection would read redis-py's own package data anew, which takes longer than all the rest.
    _OURS["driver_info"] = DriverInfo()
except ImportError:  # redis-py before 7
    pass


def _settings(given: Mapping[str, Any], retry: Any, seconds: float = DIAL_SECONDS) -> dict[str, Any]:
    # Without redis-py's maintenance notifications: only its own connections know what to do about them.
    settings = {name: value for name, value in given.items() if "maint_notifications" not in name}
    settings |= {**_OURS, "retry": retry, "retry_on_error": []}
    for name in ("socket_connect_timeout", "socket_timeout"):
        if settings.get(name) is None:
            settings[name] = seconds
    return settings


def _making(pool: Any, retry: Any, seconds: float = DIAL_SECONDS) -> Callable[[], Any]:
    """Return what makes a connection as the pool would."""
    settings = _settings(pool.connection_kwargs, retry, seconds)

    def make() -> Any:
        return pool.connection_class(**settings)

    return make


def _never(blocking: bool) -> Any:
    return (redis.retry.Retry if blocking else redis.asyncio.retry.Retry)(NoBackoff(), 0)


def from_url(url: str, seconds: float = DIAL_SECONDS, shown: str | None = None) -> RedisConnector:
    """Return the dialer for `redis://`, `rediss://` or `unix://`, with redis-py's own meaning of every part.

    `shown` is what its user has written, for errors, if that is not this.
    """
    shown = redact(url) if shown is None else shown
    _check(url, shown)
    try:
        blocking = redis.ConnectionPool.from_url(url)
        aio = redis.asyncio.ConnectionPool.from_url(url)
        making = _making(blocking, _never(True), seconds), _making(aio, _never(False), seconds)
        making[0]()
    except (ValueError, TypeError, AttributeError, redis.RedisError) as error:
        raise InvalidURL(f"{shown!r} is not a Redis URL: {error}") from error
    return RedisConnector(_address(blocking.connection_kwargs), *making)


def _check(url: str, shown: str) -> None:
    """Refuse what others would quote in their errors: half a password taken for a port, as it was not escaped."""
    several = "," in url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    try:
        parts = urlsplit(url)
        is_path = parts.scheme == "unix"
        behind = parts.path + parts.query.partition("=")[0] + parts.fragment
        if not is_path and ("@" in behind or (parts.port or 0) < 0 or several):
            raise ValueError
    except ValueError:
        advice = "; several servers are redlock://h1:p1,h2:p2,h3:p3, or redis+sentinel://" if several else ""
        raise InvalidURL(
            f"{shown!r} is not a Redis URL: the port must be a number up to 65535, and a password's /, ?, # and @ are "
            f"written %2F, %3F, %23 and %40{advice}"
        ) from None
    if is_path and parts.netloc.rpartition("@")[2]:
        # It would be dropped, and another socket tried.
        raise InvalidURL(f"{shown!r}: a socket's path begins with a slash of its own, as in unix:///run/redis.sock")
    if not is_path and not (parts.path.strip("/") or "0").isdecimal():
        raise InvalidURL(f"{shown!r} is not a Redis URL: the database is a number, as in redis://host:6379/0")


def from_client(client: Any, *, aio: bool) -> RedisConnector:
    """Return the dialer that connects as the user's own client does, over connections of ours."""
    if isinstance(client, redis.asyncio.Redis) is not aio or not isinstance(client, redis.Redis | redis.asyncio.Redis):
        wanted, there = (
            ("redis.asyncio.Redis", "fencelock.connect") if aio else ("redis.Redis", "fencelock.aio.connect")
        )
        other = isinstance(client, redis.Redis | redis.asyncio.Redis)
        advice = f"; {there} takes this one" if other else ""
        raise InvalidType(
            f"a client must be a {wanted} here, not {type(client).__module__}.{type(client).__name__}{advice}"
        )
    pool = client.connection_pool
    if any(kind.__module__.partition(".")[0] == "fakeredis" for kind in (type(client), *pool.connection_class.__mro__)):
        raise InvalidType("fakeredis has no server behind it that could hold locks; in tests, use memory://")
    making = _making(pool, _never(not aio))
    by_sentinel = getattr(pool, "service_name", None)
    address = _address(pool.connection_kwargs) if by_sentinel is None else f"{by_sentinel} (by Sentinel)"
    return RedisConnector(address, making, making)


def _address(settings: Mapping[str, Any]) -> str:
    if "path" in settings:
        return str(settings["path"])
    host = settings.get("host", "localhost")
    port = settings.get("port", 6379)
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def from_sentinel(url: str) -> RedisConnector:
    """Return the dialer for `redis+sentinel://[user:password@]host:port,host:port/service[/db][?options]`.

    Options that begin with `sentinel_`, such as `sentinel_password`, are for the Sentinels; the rest is for the servers.
    """
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not hosts or not service or not (database or "0").isdecimal():
        raise InvalidURL(f"{redact(url)!r}: a Sentinel URL is redis+sentinel://host:port,host:port/service/db")
    service = unquote(service)
    tls = parts.scheme.startswith("rediss")
    scheme = "rediss" if tls else "redis"
    options = parse_qsl(parts.query, keep_blank_values=True)
    for_sentinels = [(name.removeprefix(OF_SENTINEL), value) for name, value in options if name.startswith(OF_SENTINEL)]
    for_servers = [(name, value) for name, value in options if not name.startswith(OF_SENTINEL)]

    def make(sentinels: Any, blocking: bool) -> Any:
        never = _never(blocking)
        sentinel = sentinels.Sentinel(nodes, sentinel_kwargs={**watch, "retry": never})
        pool = sentinels.SentinelConnectionPool(service, sentinel, ssl=tls, **settings)
        connection = pool.connection_class(**_settings(pool.connection_kwargs, never))
        connection.kept = pool  # it refers to its pool weakly
        connection.helpers = sentinel.sentinels
        return connection

    try:
        nodes = [_host_and_port(host.strip()) for host in hosts.split(",")]
        settings = _options(f"{scheme}://{login}{at}placeholder/{database}", for_servers)
        shared = {name: value for name, value in settings.items() if name.startswith("ssl_")}
        watch = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0, "ssl": tls, **shared}
        watch |= _options(f"{scheme}://placeholder", for_sentinels)
        make(redis.sentinel, True)
    except (ValueError, TypeError, redis.RedisError) as error:
        raise InvalidURL(f"{redact(url)!r} is not a Sentinel URL: {error}") from error
    return RedisConnector(
        f"{service} (by Sentinel)",
        lambda: make(redis.sentinel, True),
        lambda: make(redis.asyncio.sentinel, False),
    )


def _options(url: str, options: list[tuple[str, str]]) -> dict[str, Any]:
    """Return what redis-py makes of a URL, but for the address."""
    settings = redis.connection.parse_url(f"{url}?{urlencode(options)}")
    return {name: value for name, value in settings.items() if name not in ("host", "port", "connection_class")}


def _host_and_port(text: str) -> tuple[str, int]:
    """Take a Sentinel's address apart; errors do not quote it, as it may be half a password."""
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname:
            return parts.hostname, parts.port or 26379
    except ValueError:
        pass
    raise ValueError("every Sentinel is given as host:port") from None
