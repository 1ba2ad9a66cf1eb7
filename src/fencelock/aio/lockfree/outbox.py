"""The transactional outbox, awaited. `fencelock.lockfree.outbox` describes it."""

from __future__ import annotations

from fencelock.lockfree.outbox import BaseOutbox, Message
from fencelock.runtime.both_apis import AsyncioApi
from fencelock.sqlio import AsyncConnection

__all__ = ["Message", "Outbox"]


class Outbox(BaseOutbox[AsyncConnection], AsyncioApi):
    """An outbox in the caller's database. Outboxes with different names are independent.

    >>> async def paid(connection):                            # inside the transaction of the payment
    ...     await Outbox("orders").append(connection, "order:42", {"event": "paid"})
    """
