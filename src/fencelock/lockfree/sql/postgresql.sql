-- What fencelock.lockfree needs in PostgreSQL. Each statement may be repeated.

CREATE TABLE IF NOT EXISTS fencelock_idempotency (
    name        text PRIMARY KEY,
    claim       text NOT NULL,      -- whose it is: 128 random bits for each run
    fingerprint text NOT NULL,      -- of the payload
    result      text,               -- JSON; NULL until the run is done
    ends        bigint NOT NULL     -- seconds since 1970, by the server's clock
);

CREATE INDEX IF NOT EXISTS fencelock_idempotency_ends ON fencelock_idempotency (ends);

CREATE TABLE IF NOT EXISTS fencelock_outbox (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    outbox  text NOT NULL,
    name    text NOT NULL,          -- messages of one name are delivered in order
    payload text NOT NULL           -- JSON
);

CREATE INDEX IF NOT EXISTS fencelock_outbox_order ON fencelock_outbox (outbox, id);
