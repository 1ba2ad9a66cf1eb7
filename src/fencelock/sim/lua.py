"""Lua as in Redis: version 5.1, no new globals, and Redis's conversion of values and replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from hashlib import sha1
from typing import Any


class Status(bytes):
    """A reply such as OK: bytes for a client, a table with the field `ok` for a script."""


class Refused(Exception):
    """An error reply; its text begins with its code."""


Commands = Mapping[bytes, Callable[[list[bytes]], Any]]
"""The function of each command; it may raise Refused."""

NOT_A_NUMBER = "ERR value is not an integer or out of range"


def refusal(name: bytes, error: Exception) -> Refused:
    """Return the error of Redis for a wrong number of arguments, or for an argument that is not a number."""
    if isinstance(error, IndexError) or "unpack" in str(error):
        return Refused(f"ERR wrong number of arguments for '{name.decode().lower()}' command")
    return Refused(NOT_A_NUMBER)


PRELUDE = """
local invoke, sha1hex = ...
local globals = _G
local redis = {LOG_DEBUG = 0, LOG_VERBOSE = 1, LOG_NOTICE = 2, LOG_WARNING = 3}
function redis.pcall(...) return invoke(...) end
function redis.call(...)
  local answer = invoke(...)
  if type(answer) == 'table' and answer.err then error(answer) end
  return answer
end
function redis.status_reply(text) return {ok = text} end
function redis.error_reply(text)
  text = text:match('^%-?(.*)$')
  return {err = text:find(' ') and text or 'ERR ' .. text}
end
function redis.log() end
function redis.setresp() end
redis.sha1hex = sha1hex
local sandbox = {redis = redis}
for name in ([[assert error getmetatable ipairs loadstring next pairs pcall rawequal rawget rawset select setmetatable
tonumber tostring type unpack xpcall math string table coroutine]]):gmatch('%a+') do sandbox[name] = globals[name] end
setmetatable(sandbox, {
  __newindex = function(_, name) error('Attempt to modify a readonly table, global ' .. tostring(name)) end,
  __index = function(_, name) error('Script attempted to access nonexistent global variable ' .. tostring(name)) end,
})
return function(script, keys, arguments)
  rawset(sandbox, 'KEYS', keys)
  rawset(sandbox, 'ARGV', arguments)
  local well, answer = pcall(setfenv(script, sandbox))
  if well or type(answer) == 'table' then return answer end
  return {err = 'ERR ' .. tostring(answer)}
end
"""


class Lua:
    """One interpreter for all simulated servers of this process: a script leaves no state behind."""

    def __init__(self) -> None:
        from lupa import lua51

        self._runtime = lua51.LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        self._type = lua51.lua_type
        self._commands: Commands = {}
        self._table = self._runtime.table_from
        self._ok = self._table({b"ok": b"OK"})
        self._compiled: dict[bytes, Any] = {}
        self._run = self._runtime.execute(PRELUDE.encode(), self._invoke, lambda text: digest(text).encode())

    def load(self, text: bytes) -> Any:
        """Compile a script; raise Refused if it does not compile."""
        script = self._compiled.get(text)
        if script is None:
            try:
                script = self._compiled[text] = self._runtime.compile(text)
            except Exception as error:
                raise Refused(f"ERR Error compiling script: {error}") from error
        return script

    def run(self, script: Any, keys: Sequence[bytes], arguments: Sequence[bytes], commands: Commands) -> Any:
        """Run a script that may call these commands."""
        self._commands = commands
        return self._out(self._run(script, self._table(keys), self._table(arguments)))

    def _invoke(self, *words: Any) -> Any:
        name = words[0] if words else b""
        try:
            command = self._commands.get(name) or self._commands.get(name.upper())
            if command is None:
                raise Refused("ERR Unknown Redis command called from script, or one that is not allowed there")
            answer = command([word if type(word) is bytes else _text(word) for word in words[1:]])
        except Refused as refused:
            return self._error(refused)
        except (ValueError, IndexError) as error:
            return self._error(refusal(name, error))
        kind = type(answer)
        return answer if kind is bytes or kind is int else self._in(answer)

    def _error(self, refused: Refused) -> Any:
        return self._table({b"err": str(refused).encode()})

    def _in(self, answer: Any) -> Any:
        """Convert a reply to a Lua value."""
        kind = type(answer)
        if kind is bytes or kind is int:
            return answer
        if answer is None:
            return False
        if kind is Status:
            return self._ok if answer == b"OK" else self._table({b"ok": bytes(answer)})
        return self._table([self._in(item) for item in answer])

    def _out(self, value: Any) -> Any:
        """Convert the result of a script to a reply."""
        kind = type(value)
        if kind is bytes or kind is int:
            return value
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if kind is float:
            return int(value)
        if self._type(value) != "table":
            return None
        if (problem := value[b"err"]) is not None:
            raise Refused(problem.decode("utf-8", "replace"))
        if (status := value[b"ok"]) is not None:
            return Status(status)
        answer: list[Any] = []
        while (item := value[len(answer) + 1]) is not None:
            answer.append(self._item(item))
        return answer

    def _item(self, value: Any) -> Any:
        try:
            return self._out(value)
        except Refused as refused:  # an error inside an array is an element of it
            return refused


@cache
def lua() -> Lua:
    """Return the interpreter of this process."""
    return Lua()


@lru_cache(64)
def digest(text: bytes) -> str:
    """Return the SHA-1 under which Redis stores a script."""
    return sha1(text, usedforsecurity=False).hexdigest()


def _text(value: object) -> bytes:
    if type(value) is int and -(10**17) < value < 10**17:
        return b"%d" % value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused("ERR Lua redis lib command arguments must be strings or integers")
    return b"%.17g" % value
