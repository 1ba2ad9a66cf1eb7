-- The tables of fencelock.lockfree in SQLite. Each statement can be repeated.

CREATE TABLE IF NOT EXISTS fencelock_idempotency (
    name        TEXT PRIMARY KEY,
    claim       TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    result      TEXT,
    expires_at  REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS fencelock_idempotency_expiry ON fencelock_idempotency (expires_at);

CREATE TABLE IF NOT EXISTS fencelock_outbox (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    outbox  TEXT NOT NULL,
    name    TEXT NOT NULL,
    payload TEXT NOT NULL
) STRICT;

CREATE INDEX IF NOT EXISTS fencelock_outbox_order ON fencelock_outbox (outbox, id);
