-- What fencelock keeps in a database of MySQL or MariaDB. Every statement may be repeated, by several at once.

-- The version of this layout; releases that disagree about it must not share a database.
CREATE TABLE IF NOT EXISTS fencelock_layout (
  id TINYINT NOT NULL PRIMARY KEY,
  version INT NOT NULL
) ENGINE=InnoDB;

-- Who holds what, for people to see; what keeps others out is GET_LOCK alone. In memory: a restart ends all locks, too.
CREATE TABLE IF NOT EXISTS fencelock_holders (
  connection BIGINT UNSIGNED NOT NULL PRIMARY KEY,
  lock_key CHAR(42) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  space CHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  name VARBINARY(1024) NOT NULL,
  owner VARBINARY(1024) NOT NULL,
  ttl INT NOT NULL,
  token BIGINT NOT NULL,
  KEY by_lock (lock_key),
  KEY by_space (space)
) ENGINE=MEMORY;

-- Last, so that whoever finds it finds all the rest.
INSERT IGNORE INTO fencelock_layout (id, version) VALUES (1, 1);
