-- schema: the table of the marks; the row with an empty resource is min_token. `checks` changes with every accepted check, so that
-- the number of affected rows tells an accepted check from a refused one.
CREATE TABLE IF NOT EXISTS fencelock_fence (
    resource VARBINARY(1024) PRIMARY KEY,
    token    BIGINT NOT NULL,
    id       VARBINARY(255) NOT NULL,
    checks   BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB

-- min_token: the row must exist, as InnoDB locks the gap around a missing row, and so its neighbours.
INSERT IGNORE INTO fencelock_fence (resource, token, id) VALUES ('', 0, '')

-- check: sets the mark and keeps its row locked until the transaction ends; MariaDB ends a transaction that is idle for `idle`
-- seconds. Two affected rows: accepted. Otherwise it made a new mark or refused the token: read the mark. The row of min_token is
-- locked for reading, so that it cannot rise, and marks cannot be pruned, between the two.
/*M!100302 BEGIN NOT ATOMIC
SET @fencelock_idle = CAST(COALESCE(@fencelock_idle, @@idle_transaction_timeout) AS UNSIGNED);
SET SESSION idle_transaction_timeout = CAST(IF(@fencelock_idle BETWEEN 1 AND :idle, @fencelock_idle, :idle) AS UNSIGNED); */
INSERT INTO fencelock_fence (resource, token, id)
SELECT CONVERT(:resource USING utf8mb4), GREATEST(:token, least.token), IF(:token < least.token, '', CONVERT(:id USING utf8mb4))
FROM fencelock_fence AS least WHERE least.resource = '' LOCK IN SHARE MODE
ON DUPLICATE KEY UPDATE
    checks = fencelock_fence.checks + (fencelock_fence.token < :token
        OR (fencelock_fence.token = :token AND fencelock_fence.id IN (CONVERT(:id USING utf8mb4), ''))),
    id = IF(fencelock_fence.token < :token OR (fencelock_fence.token = :token AND fencelock_fence.id = ''),
        CONVERT(:id USING utf8mb4), fencelock_fence.id),
    token = GREATEST(fencelock_fence.token, :token)
/*M!100302 ; END */

-- get_mark: returns what a token is compared with, as it is now and not as of the transaction's snapshot.
SELECT token, CONVERT(id USING utf8mb4) FROM fencelock_fence WHERE resource IN (CONVERT(:resource USING utf8mb4), '')
ORDER BY resource DESC LIMIT 1 LOCK IN SHARE MODE

-- set_mark: sets the mark of a resource for any claim with this token or a higher one.
REPLACE INTO fencelock_fence (resource, token, id) VALUES (CONVERT(:resource USING utf8mb4), :token, '')

-- set_all_marks: sets all marks, and min_token where prune has set it.
UPDATE fencelock_fence SET token = :token, id = '' WHERE resource <> '' OR token > 0

-- count_marks: returns the number of marks.
SELECT count(*) FROM fencelock_fence WHERE resource <> ''

-- raise_min_token: sets min_token unless it is higher already.
UPDATE fencelock_fence SET token = GREATEST(token, :token) WHERE resource = ''

-- prune: removes the marks below min_token.
DELETE FROM fencelock_fence WHERE resource <> '' AND token < :token

-- restore: resets the limit on idle transactions to its value before the first check of this connection.
/*M!100302 SET SESSION idle_transaction_timeout = CAST(COALESCE(@fencelock_idle, @@idle_transaction_timeout) AS UNSIGNED),
@fencelock_idle = NULL */ /*!80000 DO 0 */
