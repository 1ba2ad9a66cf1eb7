-- MySQL, which has no sequences: the source of all tokens is a few counters, so that not all locks wait for one row.
CREATE TABLE IF NOT EXISTS fencelock_counters (
  bucket TINYINT UNSIGNED NOT NULL PRIMARY KEY,
  token BIGINT NOT NULL
) ENGINE=InnoDB;
