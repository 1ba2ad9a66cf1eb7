-- The tables of fencelock.lockfree in MySQL and MariaDB. Each statement can be repeated. Names are bytes, as a collation would
-- treat some different names as equal.

CREATE TABLE IF NOT EXISTS fencelock_idempotency (
    name        varbinary(1024) NOT NULL PRIMARY KEY,
    claim       char(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    fingerprint char(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    result      longtext CHARACTER SET ascii COLLATE ascii_bin,
    expires_at  bigint NOT NULL,
    KEY fencelock_idempotency_expiry (expires_at)
) ENGINE=InnoDB;

CREATE TABLE IF NOT EXISTS fencelock_outbox (
    id      bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
    outbox  varbinary(255) NOT NULL,
    name    varbinary(1024) NOT NULL,
    payload longtext CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    KEY fencelock_outbox_order (outbox, id)
) ENGINE=InnoDB;

CREATE TABLE IF NOT EXISTS fencelock_outbox_key (
    outbox varbinary(255) NOT NULL,
    name   varbinary(1024) NOT NULL,
    used   bigint NOT NULL,
    PRIMARY KEY (outbox, name)
) ENGINE=InnoDB;
