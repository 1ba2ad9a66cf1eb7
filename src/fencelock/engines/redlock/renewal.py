"""Renewals: on all nodes, in batches; a node that has lost a lease which a majority has gets it back."""

from __future__ import annotations

from collections.abc import Sequence

from fencelock.core.clock import Deadline
from fencelock.core.runtime import NO_REPLY, Runtime
from fencelock.engines.redlock.cluster import Cluster, Connections, at_once, never, reply_timeout
from fencelock.engines.redlock.commands import Commands
from fencelock.model import Grant, Renewal

BATCH = 500


async def renew(runtime: Runtime, cluster: Cluster, commands: Commands, grants: Sequence[Grant]) -> list[Renewal]:
    """Renew on every node; return one result for each grant."""
    ttl = min(grant.claim.ttl for grant in grants)
    connections = await cluster.get(reply_timeout(ttl), Deadline(runtime.now, ttl / 3))
    # A node that hangs must not take too much of a short ttl; but give slow nodes twice their last latency.
    latencies = sorted(conn.raw.last_latency for conn in connections if conn is not None)[: cluster.majority]
    timeout = min(reply_timeout(ttl), max([ttl / 5, *(2 * seconds for seconds in latencies)]))
    results: list[Renewal] = []
    try:
        for start in range(0, len(grants), BATCH):
            results += await _renew_batch(cluster, commands, grants[start : start + BATCH], connections, timeout)
    finally:
        cluster.put_back(connections)
    return results


async def _renew_batch(
    cluster: Cluster, commands: Commands, grants: Sequence[Grant], connections: Connections, timeout: float
) -> list[Renewal]:
    replies = await cluster.run([commands.renew(grants)] * len(cluster), connections, timeout, never)
    valid = [reply for reply in replies if type(reply) is list]
    if len(valid) >= cluster.majority:
        # No later batch waits for the silent nodes.
        silent = [conn if reply is NO_REPLY else None for conn, reply in zip(connections, replies, strict=True)]
        connections[:] = [None if reply is NO_REPLY else conn for conn, reply in zip(connections, replies, strict=True)]
        cluster.put_back(silent)
    results = []
    for index, grant in enumerate(grants):
        renewed = sum(reply[index] for reply in valid)
        if renewed >= cluster.majority:
            results.append(Renewal.RENEWED)
            if renewed < len(valid):
                has_lost = [type(reply) is list and not reply[index] for reply in replies]
                to_heal = [conn if lost else None for conn, lost in zip(connections, has_lost, strict=True)]
                await cluster.run([commands.heal(grant)] * len(cluster), to_heal, timeout, at_once)
        elif len(valid) - renewed > len(cluster) - cluster.majority:
            results.append(Renewal.LOST)
        else:
            results.append(Renewal.UNKNOWN)
    return results
