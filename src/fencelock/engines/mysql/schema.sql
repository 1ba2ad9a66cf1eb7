-- The tables of fencelock in a MySQL or MariaDB database. Every statement may be repeated, also by several clients at once.

-- The version of this layout (releases with different layouts must not share a database), and the highest token that may have
-- been granted. A server that crashed continues above `reserved`.
CREATE TABLE IF NOT EXISTS fencelock_layout (
  id TINYINT NOT NULL PRIMARY KEY,
  version INT NOT NULL,
  reserved BIGINT NOT NULL
) ENGINE=InnoDB;

-- The holders, for `inspect` (only GET_LOCK excludes other clients), and the token counter. In memory, so that a grant does not
-- wait for the disk: a restart ends all locks as well. The first client after a restart inserts the row of connection 0, which
-- sets the counter above `reserved`.
CREATE TABLE IF NOT EXISTS fencelock_holders (
  token BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  connection BIGINT UNSIGNED NOT NULL,
  lock_key CHAR(42) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  space CHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  name VARBINARY(1024) NOT NULL,
  owner VARBINARY(1024) NOT NULL,
  value VARBINARY(1024) NOT NULL,
  ttl INT NOT NULL,
  granted TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
  UNIQUE KEY by_connection (connection),
  KEY by_lock (lock_key),
  KEY by_space (space)
) ENGINE=MEMORY;

-- Records. `ends` is in µs, by the server's clock. A value of NULL was deleted; its row keeps the token until `ends`.
CREATE TABLE IF NOT EXISTS fencelock_records (
  record_key CHAR(42) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
  name VARBINARY(1024) NOT NULL,
  value MEDIUMBLOB NULL,
  token BIGINT NOT NULL,
  version BIGINT NOT NULL,
  ends BIGINT NOT NULL,
  KEY by_end (ends)
) ENGINE=InnoDB;

-- Last: a client that finds this row also finds all tables.
INSERT IGNORE INTO fencelock_layout (id, version, reserved) VALUES (1, 3, 0);
