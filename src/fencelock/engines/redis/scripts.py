"""The Lua scripts, each in a file of its own: what a server does in one atomic step."""

from __future__ import annotations

import re
from hashlib import sha1
from math import ceil
from pathlib import Path

from fencelock.core.runtime import Command

FOLDER = Path(__file__).parent / "lua"
INCLUDE = re.compile(r"^ *-- include (\S+)\n", re.MULTILINE)


class Script:
    """A script that servers know by its digest, once they have seen it."""

    __slots__ = ("_by_sha", "_by_text", "_call", "name", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self._call = packed("EVALSHA", sha1(text.encode(), usedforsecurity=False).hexdigest())
        self._by_sha, self._by_text = self._call.encode(), packed("EVAL", text).encode()

    def call(self, keys: Command, args: Command) -> bytes:
        """Return the command that runs it, if the server knows it, as it is sent."""
        return self.begin(keys, args, 0).encode()

    def begin(self, keys: Command, args: Command, more: int) -> str:
        """Return the beginning of a call, to which so many arguments are added: what never changes is packed once."""
        words = 3 + len(keys) + len(args) + more
        return f"*{words}\r\n{self._call}{packed(len(keys), *keys, *args)}"

    def teach(self, call: bytes) -> bytes:
        """Return the same as a call, in the words that make the server remember the script."""
        return call.replace(self._by_sha, self._by_text, 1)


def packed(*words: str | int) -> str:
    """Return words as Redis wants them."""
    return "".join([f"${len(str(word).encode())}\r\n{word}\r\n" for word in words])


def ms(ttl: float) -> int:
    """Return what a server counts: one ms more than asked for, as the first is over when it begins to."""
    return ceil(ttl * 1000) + 1


def load(name: str) -> Script:
    """Read a script and whatever it includes."""
    return Script(name, _text(f"{name}.lua"))


def _text(file: str) -> str:
    return INCLUDE.sub(lambda found: _text(found[1]), (FOLDER / file).read_text("utf-8"))
