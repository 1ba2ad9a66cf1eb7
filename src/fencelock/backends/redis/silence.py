"""Asking without being answered: where others wait, the best that a server can say is nothing, until it is our turn."""

from __future__ import annotations

from fencelock.backends.redis.link import Link
from fencelock.backends.redis.scripts import packed

HUSH = 0.05
"""Seconds for which a waiter may do without an answer, as its turn may come meanwhile: a thirtieth of the ttl, but no more
than this. If the holder runs out just then, or the server did not understand, the waiter is so much late."""
SILENCE = f"*3\r\n{packed('CLIENT', 'REPLY', 'SKIP')}"
"""Has the server not answer the command that follows; what is called out is heard all the same."""
TRIAL = "silence"
"""Who is called to see whether that is so: no claim has such an id."""


async def try_silence(link: Link, within: float) -> None:
    """Find out whether the server is silent when it is asked to be, calls nonetheless, and lets us have others called first;
    if not, the link is out of step.

    Not every user may ask for that, and Redis before 6.2.12 and 7.0.10 does not call either whom it does not answer.
    """
    call, echo = packed("PUBLISH", link.channel, f"{TRIAL}:heard"), packed("ECHO", TRIAL)
    answer = await link.wire.ask(f"{SILENCE}*3\r\n{call}{link.after_you}*2\r\n{echo}".encode(), within)
    link.silent = answer == TRIAL.encode() and link.calls.pop(TRIAL, None) is not None


async def in_step(link: Link, word: str, within: float) -> bool:
    """Return whether the server said nothing where it should: else an answer would be taken for another's.

    It also has come to what it was asked before then, so that nothing can overtake that over another link.
    """
    return bool(await link.wire.ask(("ECHO", word), within) == word.encode())
