-- What fencelock keeps in a database of MySQL or MariaDB. Every statement may be repeated, by several at once.

-- The version of this layout (releases that disagree about it must not share a database), and the only promise that is kept on
-- disk: no token above `reserved` has ever been granted. So a server that crashed goes on above it.
CREATE TABLE IF NOT EXISTS fencelock_layout (
  id TINYINT NOT NULL PRIMARY KEY,
  version INT NOT NULL,
  reserved BIGINT NOT NULL
) ENGINE=InnoDB;

-- Who holds what, for people to see (what keeps others out is GET_LOCK alone), and where tokens come from. In memory, so that a
-- grant does not wait for the disk: a restart ends all locks, too, and whoever comes first then begins above what was reserved,
-- with the line of connection 0.
CREATE TABLE IF NOT EXISTS fencelock_holders (
  token BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  connection BIGINT UNSIGNED NOT NULL,
  lock_key CHAR(42) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  space CHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  name VARBINARY(1024) NOT NULL,
  owner VARBINARY(1024) NOT NULL,
  ttl INT NOT NULL,
  granted TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
  UNIQUE KEY by_connection (connection),
  KEY by_lock (lock_key),
  KEY by_space (space)
) ENGINE=MEMORY;

-- What is remembered beside the locks; `ends` is in µs, by the server's clock. A value that is NULL was forgotten, its token not yet.
CREATE TABLE IF NOT EXISTS fencelock_records (
  record_key CHAR(42) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
  name VARBINARY(1024) NOT NULL,
  value MEDIUMBLOB NULL,
  token BIGINT NOT NULL,
  version BIGINT NOT NULL,
  ends BIGINT NOT NULL,
  KEY by_end (ends)
) ENGINE=InnoDB;

-- Last, so that whoever finds it finds all the rest.
INSERT IGNORE INTO fencelock_layout (id, version, reserved) VALUES (1, 2, 0);
