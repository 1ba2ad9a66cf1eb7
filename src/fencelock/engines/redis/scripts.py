"""Loads the Lua scripts and packs the commands that run them. Each script is one atomic step on the server."""

from __future__ import annotations

import re
from hashlib import sha1
from math import ceil
from pathlib import Path

from fencelock.core.runtime import Command

FOLDER = Path(__file__).parent / "lua"
INCLUDE = re.compile(r"^ *-- include (\S+)\n", re.MULTILINE)


class Script:
    """A script. A server that has run its text once (EVAL) also knows it by its digest (EVALSHA)."""

    __slots__ = ("_digest_words", "_text_words", "name", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self._digest_words = packed("EVALSHA", sha1(text.encode(), usedforsecurity=False).hexdigest())
        self._text_words = packed("EVAL", text)

    def call(self, keys: Command, args: Command) -> bytes:
        """Return the packed EVALSHA command."""
        return self.begin_call(keys, args, 0)

    def begin_call(self, keys: Command, args: Command, more: int) -> bytes:
        """Return the beginning of the packed command. The caller adds `more` packed arguments, which differ in each call."""
        words = 3 + len(keys) + len(args) + more
        return b"*%d\r\n%b%b" % (words, self._digest_words, packed(len(keys), *keys, *args))

    def as_eval(self, call: bytes) -> bytes:
        """Return the same call as EVAL, with the script's text, for a server that may not know its digest."""
        return call.replace(self._digest_words, self._text_words, 1)


def packed(*words: str | int) -> bytes:
    """Return words in Redis's protocol. hiredis has a packer, but it crashes when a signal interrupts it."""
    text = "".join([f"${len(word)}\r\n{word}\r\n" for word in map(str, words)])
    if text.isascii():
        return text.encode()
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in (str(word).encode() for word in words)])


def ttl_ms(ttl: float) -> int:
    """Return the ttl for the server: one ms more, as its clock may be just before the next ms when it starts to count."""
    return ceil(ttl * 1000) + 1


def load(name: str) -> Script:
    """Read a script and the files it includes."""
    return Script(name, _text(f"{name}.lua"))


def _text(file: str) -> str:
    return INCLUDE.sub(lambda found: _text(found[1]), (FOLDER / file).read_text("utf-8"))
