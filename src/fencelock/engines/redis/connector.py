"""Connects to a server: redis-py resolves the URL, connects, does TLS and logs in; the runtime then takes over the socket."""

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

from fencelock.core.connect_once import unreachable_hint
from fencelock.core.runtime import NO_REPLY, Command, Parser
from fencelock.core.urls import redact
from fencelock.engines.redis.scripts import packed
from fencelock.errors import EngineUnavailable, InvalidType, InvalidURL

CONNECT_TIMEOUT = 5.0
"""Seconds for connecting, and for logging in, unless the URL sets them."""
HINTS = {
    "unknown command 'HELLO'": "; fencelock needs Redis 6.2 or later",
    "unknown command `HELLO`": "; fencelock needs Redis 6.2 or later",
    "HELLO must be called with the client already authenticated": "; give the password in the URL",
    "invalid username-password pair": "; check the user and the password in the URL",
    "DB index is out of range": "; a server has the databases 0 to 15, unless its setting `databases` says otherwise",
    "No master found": "; are the Sentinels up, and is that what they call the service?",
}
"""Advice for the errors that redis-py reports when it cannot connect."""
OPTIONS = "db, socket_timeout, socket_connect_timeout and, with TLS, ssl_ca_certs, ssl_certfile and ssl_keyfile"
"""The options of a URL that users need, for messages; docs/engines/redis.md has more."""
SENTINEL_PREFIX = "sentinel_"
"""The prefix of URL options that are for the Sentinels."""


class ServerError(Exception):
    """An error reply of a server. A connection returns it like any other reply and never raises it."""

    @property
    def kind(self) -> str:
        """The first word of the error, its code."""
        return str(self).partition(" ")[0]


class RedisConnector:
    """`fencelock.core.runtime.Connector` for one Redis server, or for the current master of a Sentinel service."""

    pushes = PushNotification

    def __init__(
        self,
        address: str,
        blocking: Callable[[], Any],
        aio: Callable[[], Any],
        timeout: float = inf,
        make_error: Callable[[str], ServerError] = ServerError,
    ) -> None:
        self.address = address
        self._blocking = blocking
        self._aio = aio
        self._timeout = timeout
        self._make_error = make_error

    def with_timeout(self, timeout: float) -> RedisConnector:
        """Return a connector that gives connecting and logging in this many seconds each."""
        if timeout >= self._timeout:
            return self
        return RedisConnector(self.address, self._blocking, self._aio, timeout, self._make_error)

    def on_error(self, callback: Callable[[ServerError], None]) -> RedisConnector:
        """Return a connector whose connections report every error reply, also one that no caller waits for any more."""

        def make_error(text: str) -> ServerError:
            callback(error := ServerError(text))
            return error

        return RedisConnector(self.address, self._blocking, self._aio, self._timeout, make_error)

    def _limit_timeouts(self, connection: Any) -> Any:
        if self._timeout < inf:
            for timeout in ("socket_connect_timeout", "socket_timeout"):
                setattr(connection, timeout, min(getattr(connection, timeout), self._timeout))
        return connection

    def connect(self, open_stream: object = None) -> Any:  # noqa: ARG002
        """Connect with redis-py and return its socket."""
        connection = self._limit_timeouts(self._blocking())
        try:
            connection.connect()
        except (redis.RedisError, OSError, ValueError) as error:  # ValueError: an impossible host name
            raise self._unreachable(connection, error) from error
        finally:
            for helper in getattr(connection, "helpers", ()):
                helper.close()
        sock, connection._sock = connection._sock, None
        connection.disconnect()
        return sock

    async def aconnect(self, open_stream: object = None) -> tuple[Any, object]:  # noqa: ARG002
        """Connect with redis-py. Return its transport, and the streams: collected, they would close the transport."""
        connection = self._limit_timeouts(self._aio())
        try:
            await connection.connect()
        except BaseException as error:
            await connection.disconnect(
                nowait=True
            )  # redis-py leaves this to the garbage collector when it is cancelled
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
        """Return the command in Redis's protocol."""
        return b"*%d\r\n%b" % (len(command), packed(*command))

    def parser(self) -> Parser:
        """Return a parser of replies."""
        return hiredis.Reader(protocolError=ValueError, replyError=self._make_error, notEnoughData=NO_REPLY)

    def _unreachable(self, connection: Any, error: Exception) -> EngineUnavailable:
        words = (str(error) or type(error).__name__).removesuffix(".")
        if words.startswith("No master found"):
            words = words.partition(" : ")[0]  # the rest lists redis-py's clients of the Sentinels
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
    return unreachable_hint(words)


# These override the URL and the client: the acquire loop repeats failed requests itself, and pushes need protocol 3.
_FIXED_OPTIONS: dict[str, Any] = {"protocol": 3, "health_check_interval": 0}
try:
    from redis.driver_info import DriverInfo

    # Without it, redis-py reads its package metadata for every connection, which takes longer than connecting.
    _FIXED_OPTIONS["driver_info"] = DriverInfo()
except ImportError:  # redis-py before 7
    pass


def _settings(given: Mapping[str, Any], retry: Any, timeout: float = CONNECT_TIMEOUT) -> dict[str, Any]:
    # Without redis-py's maintenance notifications: only redis-py's own connections can handle them.
    settings = {name: value for name, value in given.items() if "maint_notifications" not in name}
    settings |= {**_FIXED_OPTIONS, "retry": retry, "retry_on_error": []}
    for name in ("socket_connect_timeout", "socket_timeout"):
        if settings.get(name) is None:
            settings[name] = timeout
    return settings


def _factory(pool: Any, retry: Any, timeout: float = CONNECT_TIMEOUT) -> Callable[[], Any]:
    """Return a function that makes a connection as the pool does."""
    settings = _settings(pool.connection_kwargs, retry, timeout)

    def make() -> Any:
        return pool.connection_class(**settings)

    return make


def _no_retry(blocking: bool) -> Any:
    return (redis.retry.Retry if blocking else redis.asyncio.retry.Retry)(NoBackoff(), 0)


def from_url(url: str, timeout: float = CONNECT_TIMEOUT, shown: str | None = None) -> RedisConnector:
    """Return the connector for `redis://`, `rediss://` or `unix://`. redis-py defines what each part means.

    `shown` is the URL that errors quote, if it is another one. Raise InvalidURL.
    """
    shown = redact(url) if shown is None else shown
    _check(url, shown)
    try:
        blocking = redis.ConnectionPool.from_url(url)
        aio = redis.asyncio.ConnectionPool.from_url(url)
        factories = _factory(blocking, _no_retry(True), timeout), _factory(aio, _no_retry(False), timeout)
        factories[0]()
    except (ValueError, TypeError, AttributeError, redis.RedisError) as error:
        raise InvalidURL(f"{shown!r} is not a Redis URL: {_without_option(error)}") from error
    return RedisConnector(_address(blocking.connection_kwargs), *factories)


def _without_option(error: Exception) -> str:
    """Return redis-py's words or, for a URL option that does not exist, a sentence with those that do."""
    _, unknown, option = str(error).partition("unexpected keyword argument ")
    return f"there is no option {option}; the options are redis-py's, such as {OPTIONS}" if unknown else str(error)


def _check(url: str, shown: str) -> None:
    """Refuse a URL with an unescaped password: redis-py would take half of it for a port, and quote it in its error."""
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
        # redis-py would ignore this part and try another socket.
        raise InvalidURL(f"{shown!r}: a socket's path begins with a slash of its own, as in unix:///run/redis.sock")
    if not is_path and not (parts.path.strip("/") or "0").isdecimal():
        advice = "the database is a number, as in" if parts.netloc else "write"
        raise InvalidURL(f"{shown!r} is not a Redis URL: {advice} redis://host:6379/0")


def from_client(client: Any, *, aio: bool) -> RedisConnector:
    """Return the connector that connects as the application's client does. Raise InvalidType for the wrong kind of client."""
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
    factory = _factory(pool, _no_retry(not aio))
    service = getattr(pool, "service_name", None)
    address = _address(pool.connection_kwargs) if service is None else f"{service} (by Sentinel)"
    return RedisConnector(address, factory, factory)


def _address(settings: Mapping[str, Any]) -> str:
    if "path" in settings:
        return str(settings["path"])
    host = settings.get("host", "localhost")
    port = settings.get("port", 6379)
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def from_sentinel(url: str) -> RedisConnector:
    """Return the connector for `redis+sentinel://[user:password@]host:port,host:port/service[/db][?options]`.

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
    for_sentinels = [
        (name.removeprefix(SENTINEL_PREFIX), value) for name, value in options if name.startswith(SENTINEL_PREFIX)
    ]
    for_servers = [(name, value) for name, value in options if not name.startswith(SENTINEL_PREFIX)]

    def make(sentinels: Any, blocking: bool) -> Any:
        no_retry = _no_retry(blocking)
        sentinel = sentinels.Sentinel(nodes, sentinel_kwargs={**watch, "retry": no_retry})
        pool = sentinels.SentinelConnectionPool(service, sentinel, ssl=tls, **settings)
        connection = pool.connection_class(**_settings(pool.connection_kwargs, no_retry))
        connection.kept = pool  # the connection itself has only a weak reference to it
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
        raise InvalidURL(f"{redact(url)!r} is not a Sentinel URL: {_without_option(error)}") from error
    return RedisConnector(
        f"{service} (by Sentinel)",
        lambda: make(redis.sentinel, True),
        lambda: make(redis.asyncio.sentinel, False),
    )


def _options(url: str, options: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the options that redis-py reads from a URL, without the address."""
    settings = redis.connection.parse_url(f"{url}?{urlencode(options)}")
    return {name: value for name, value in settings.items() if name not in ("host", "port", "connection_class")}


def _host_and_port(text: str) -> tuple[str, int]:
    """Split a Sentinel's address. Errors do not quote it: it may be half a password."""
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname:
            return parts.hostname, parts.port or 26379
    except ValueError:
        pass
    raise ValueError("every Sentinel is given as host:port") from None
