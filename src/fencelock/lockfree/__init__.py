"""Tools that need no lock: idempotency keys, optimistic versions, a transactional outbox, and data that merges (CRDTs).

A lock is one way to avoid doing work twice, and often not the best one. Import what you use from
`fencelock.lockfree.idempotency`, `.optimistic`, `.outbox` or `.crdt`. Everything here blocks; `fencelock.aio.lockfree`
has the same names, awaited.
"""
