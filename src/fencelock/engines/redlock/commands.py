"""The scripts that the nodes run, and the packed calls of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from fencelock.engines.redis.connection import RedisConnection
from fencelock.engines.redis.scripts import Script, load, ttl_ms
from fencelock.model import Claim, Grant

CLAIM, UNDO, RENEW, HEAL, INSPECT, FORCE = (
    load(f"redlock/{name}") for name in ("claim", "undo", "renew", "heal", "inspect", "force")
)


class Call(NamedTuple):
    """A call of a script by its digest, packed."""

    script: Script
    packed: bytes

    def with_text(self) -> bytes:
        """Return the call with the script's text, for a node that may not know the digest."""
        return self.script.as_eval(self.packed)


class Commands:
    """The calls for the names of one namespace."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def claim(self, claim: Claim, proposal: int) -> Call:
        """Accept a proposal. The node replies as `claim.lua` says."""
        return self._call(CLAIM, claim.name, ttl_ms(claim.ttl), _label(claim), claim.id, proposal)

    def undo(self, claim: Claim, proposal: int) -> Call:
        """Undo a proposal, and remove the claim from the queue. The reply is 1 if the proposal held the node, else 0."""
        return self._call(UNDO, claim.name, claim.id, proposal)

    def enqueue(self, claim: Claim, proposal: int, connection: RedisConnection, ticket: int) -> Call:
        """Undo a proposal, and enqueue the claim: the node notifies it over the connection."""
        words = (ttl_ms(claim.ttl), _label(claim), connection.channel, ticket)
        return self._call(UNDO, claim.name, claim.id, proposal, *words)

    def renew(self, grants: Sequence[Grant]) -> Call:
        """Restart the ttl of each grant. The reply is a list with 1 for each that the node still has, else 0."""
        keys = tuple(f"{self.prefix}:lock:{grant.claim.name}" for grant in grants)
        words = ((grant.claim.id, grant.token, ttl_ms(grant.claim.ttl)) for grant in grants)
        return Call(RENEW, RENEW.call(keys, tuple(chain.from_iterable(words))))

    def heal(self, grant: Grant) -> Call:
        """Put a lease back that the node has lost."""
        claim = grant.claim
        return self._call(HEAL, claim.name, ttl_ms(claim.ttl), _label(claim), claim.id, grant.token)

    def inspect(self, name: str) -> Call:
        """Read the node's holder and waiters of a name. `inspect.lua` says how."""
        return self._call(INSPECT, name)

    def force(self, name: str) -> Call:
        """Release the node, whatever claim holds it. The reply is the attempt that held it, or None."""
        return self._call(FORCE, name)

    def _call(self, script: Script, *words: str | int) -> Call:
        return Call(script, script.call((self.prefix,), words))


def _label(claim: Claim) -> str:
    """Return the owner and the value as the nodes store them. The first newline ends the owner."""
    return f"{claim.owner}\n{claim.value}"
