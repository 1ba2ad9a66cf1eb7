"""A small simulated Redis: it runs the production Lua scripts on the clock of a simulated host.

`tests/sim/test_redis_model.py` sends the same commands to a real server and compares every reply.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

from fencelock.core.runtime import Command
from fencelock.sim.lua import Refused, Status, digest, lua, refusal
from fencelock.sim.redis_data import OK, Data, Words


class Session(Protocol):
    """The server's side of a connection."""

    def push(self, message: list[Any]) -> None:
        """Send a published message, or the confirmation of a subscription."""
        ...


class Redis(Data):
    """One server: its data, its scripts and its subscribers."""

    def __init__(self, wall: Callable[[], int], run_id: str = "0" * 40) -> None:
        super().__init__(wall)
        self._commands: dict[bytes, Callable[[Words], Any]] = {
            name.removeprefix("_do_").upper().encode(): getattr(self, name)
            for name in dir(type(self))
            if name.startswith("_do_")
        }
        self._scripted = {name: command for name, command in self._commands.items() if name not in FORBIDDEN}
        self._scripts: dict[bytes, Any] = {}
        self._subscribers: dict[bytes, dict[Session, None]] = {}
        self.start(run_id)

    # ------------------------------------------------------------------ its life

    def start(self, run_id: str) -> None:
        """Start or restart: connections and scripts are gone, the data stays."""
        self.run_id = run_id
        self._scripts.clear()
        self._subscribers.clear()

    def forget(self, session: Session) -> None:
        """Remove the subscriptions of a connection that has ended."""
        for channel in [channel for channel, sessions in self._subscribers.items() if session in sessions]:
            self._leave(channel, session)

    # ------------------------------------------------------------------ requests

    def request(self, command: Command | bytes, session: Session | None = None) -> list[Any]:
        """Execute a command and return its replies: one, except that subscriptions push theirs. An error is a reply."""
        words = _unpacked(command) if isinstance(command, bytes) else [_word(word) for word in command]
        return self._ask(words, session)

    def _ask(self, words: Words, session: Session | None) -> list[Any]:
        self._now = self._wall() // 1000
        name = words[0].upper()
        try:
            if session is not None and name in (b"SUBSCRIBE", b"UNSUBSCRIBE"):
                return self._subscribe(name, words[1:], session)
            return [self._call(words)]
        except Refused as refused:
            return [refused]

    def _call(self, words: Words) -> Any:
        command = self._commands.get(words[0].upper())
        if command is None:
            raise Refused(f"ERR unknown command '{words[0].decode()}'")
        try:
            return command(words[1:])
        except (ValueError, IndexError) as error:
            raise refusal(words[0], error) from error

    # ------------------------------------------------------------------ scripts

    def _do_eval(self, words: Words) -> Any:
        text, count, *rest = words
        self._scripts.setdefault(digest(text).encode(), lua().load(text))
        return self._do_evalsha([digest(text).encode(), count, *rest])

    def _do_evalsha(self, words: Words) -> Any:
        sha, count, *rest = words
        script = self._scripts.get(sha.lower())
        if script is None:
            raise Refused("NOSCRIPT No matching script. Please use EVAL.")
        keys = int(count)
        if keys > len(rest):
            raise Refused("ERR Number of keys can't be greater than number of args")
        return lua().run(script, rest[:keys], rest[keys:], self._scripted)

    def _do_script(self, words: Words) -> Any:
        what, *rest = words
        match what.upper():
            case b"LOAD":
                (text,) = rest
                sha = digest(text).encode()
                self._scripts[sha] = lua().load(text)
                return sha
            case b"EXISTS":
                return [int(sha.lower() in self._scripts) for sha in rest]
            case b"FLUSH":
                self._scripts.clear()
                return OK
            case _:
                raise Refused(f"ERR unknown subcommand '{what.decode()}'. Try SCRIPT HELP.")

    # ------------------------------------------------------------------ channels

    def _subscribe(self, name: bytes, channels: Words, session: Session) -> list[Any]:
        mine = [channel for channel, sessions in self._subscribers.items() if session in sessions]
        for channel in channels or mine:
            if name == b"SUBSCRIBE":
                self._subscribers.setdefault(channel, {})[session] = None
            else:
                self._leave(channel, session)
            count = sum(session in sessions for sessions in self._subscribers.values())
            session.push([name.lower(), channel, count])
        if not (channels or mine):
            session.push([name.lower(), None, 0])
        return []

    def _leave(self, channel: bytes, session: Session) -> None:
        sessions = self._subscribers.get(channel, {})
        sessions.pop(session, None)
        if not sessions:
            self._subscribers.pop(channel, None)

    def _do_publish(self, words: Words) -> int:
        channel, message = words
        sessions = list(self._subscribers.get(channel, ()))
        for session in sessions:
            session.push([b"message", channel, message])
        return len(sessions)

    def _do_pubsub(self, words: Words) -> list[Any]:
        what, *channels = words
        if what.upper() != b"NUMSUB":
            raise Refused(f"ERR unknown subcommand '{what.decode()}'. Try PUBSUB HELP.")
        return [part for channel in channels for part in (channel, len(self._subscribers.get(channel, ())))]

    # ------------------------------------------------------------------ the server itself

    def _do_ping(self, words: Words) -> bytes:
        return words[0] if words else Status(b"PONG")

    def _do_info(self, words: Words) -> bytes:
        sections = {
            b"server": f"# Server\r\nredis_version:7.0.15\r\nredis_mode:standalone\r\nrun_id:{self.run_id}\r\n",
            b"memory": "# Memory\r\nused_memory:1000000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n",
        }
        wanted = [word.lower() for word in words] or list(sections)
        return "\r\n".join(sections[word] for word in wanted if word in sections).encode()


FORBIDDEN = {b"EVAL", b"EVALSHA", b"SCRIPT", b"SUBSCRIBE", b"UNSUBSCRIBE", b"INFO"}


def _unpacked(command: bytes) -> Words:
    """Decode a packed command; no argument of ours contains CR LF."""
    return command.split(b"\r\n")[2::2]


@lru_cache(10_000)
def _word(word: str | int) -> bytes:
    return str(word).encode()
