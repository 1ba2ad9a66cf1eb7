"""What needs no lock: idempotency keys, optimistic versions, a transactional outbox, and data that merges.

A lock is one way to keep work from being done twice, and often not the best. Each module here is on its own: import from
`fencelock.lockfree.idempotency`, `.optimistic`, `.outbox` or `.crdt` what you use.
"""
