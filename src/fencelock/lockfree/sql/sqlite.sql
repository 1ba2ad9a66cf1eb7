-- What fencelock.lockfree needs in SQLite. Each statement may be repeated.

CREATE TABLE IF NOT EXISTS fencelock_idempotency (
    name        TEXT PRIMARY KEY,
    claim       TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    result      TEXT,
    ends        REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS fencelock_idempotency_ends ON fencelock_idempotency (ends);

CREATE TABLE IF NOT EXISTS fencelock_outbox (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    outbox  TEXT NOT NULL,
    name    TEXT NOT NULL,
    payload TEXT NOT NULL
) STRICT;

CREATE INDEX IF NOT EXISTS fencelock_outbox_order ON fencelock_outbox (outbox, id);
