-- The tables of fencelock.lockfree in PostgreSQL. Each statement can be repeated.

CREATE TABLE IF NOT EXISTS fencelock_idempotency (
    name        text PRIMARY KEY,
    claim       text NOT NULL,      -- 128 random bits that identify the run
    fingerprint text NOT NULL,      -- the hash of the payload
    result      text,               -- JSON; NULL until the run has finished
    expires_at  bigint NOT NULL     -- seconds since 1970, by the server's clock
);

CREATE INDEX IF NOT EXISTS fencelock_idempotency_expiry ON fencelock_idempotency (expires_at);

CREATE TABLE IF NOT EXISTS fencelock_outbox (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    outbox  text NOT NULL,
    name    text NOT NULL,          -- the key; messages of one key are delivered in order
    payload text NOT NULL           -- JSON
);

CREATE INDEX IF NOT EXISTS fencelock_outbox_order ON fencelock_outbox (outbox, id);
