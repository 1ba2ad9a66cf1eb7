-- schema: what keeps the marks; the row without a name is the floor. `checks` makes every check that passes change its row.
CREATE TABLE IF NOT EXISTS fencelock_fence (
    resource VARBINARY(1024) PRIMARY KEY,
    token    BIGINT NOT NULL,
    id       VARBINARY(255) NOT NULL,
    checks   BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB

-- floor: the row must be there, as a lock on what is missing would lock what is beside it.
INSERT IGNORE INTO fencelock_fence (resource, token, id) VALUES ('', 0, '')

-- check: raises the mark and keeps its row locked until the end of the transaction, which may be idle for so long and no longer,
-- on MariaDB. Two rows touched: let in. Otherwise a mark was made, or an old token refused: look at it. The floor is locked
-- for reading, so that it cannot rise, nor marks be collected, between the two.
/*M!100302 BEGIN NOT ATOMIC
SET @fencelock_idle = CAST(COALESCE(@fencelock_idle, @@idle_transaction_timeout) AS UNSIGNED);
SET SESSION idle_transaction_timeout = CAST(IF(@fencelock_idle BETWEEN 1 AND :idle, @fencelock_idle, :idle) AS UNSIGNED); */
INSERT INTO fencelock_fence (resource, token, id)
SELECT CONVERT(:resource USING utf8mb4), GREATEST(:token, floor.token), IF(:token < floor.token, '', CONVERT(:id USING utf8mb4))
FROM fencelock_fence AS floor WHERE floor.resource = '' LOCK IN SHARE MODE
ON DUPLICATE KEY UPDATE
    checks = fencelock_fence.checks + (fencelock_fence.token < :token
        OR (fencelock_fence.token = :token AND fencelock_fence.id IN (CONVERT(:id USING utf8mb4), ''))),
    id = IF(fencelock_fence.token < :token OR (fencelock_fence.token = :token AND fencelock_fence.id = ''),
        CONVERT(:id USING utf8mb4), fencelock_fence.id),
    token = GREATEST(fencelock_fence.token, :token)
/*M!100302 ; END */

-- seen: what a token is compared with, as it is now and not as of an earlier snapshot.
SELECT token, CONVERT(id USING utf8mb4) FROM fencelock_fence WHERE resource IN (CONVERT(:resource USING utf8mb4), '')
ORDER BY resource DESC LIMIT 1 LOCK IN SHARE MODE

-- move: puts the mark, or the floor, where it is told to.
REPLACE INTO fencelock_fence (resource, token, id) VALUES (CONVERT(:resource USING utf8mb4), :token, '')

-- raise: puts the floor there unless it is higher already.
UPDATE fencelock_fence SET token = GREATEST(token, :token) WHERE resource = ''

-- collect: forgets the marks below the floor.
DELETE FROM fencelock_fence WHERE resource <> '' AND token < :token

-- restore: puts the bound on idle transactions back to what it was before the first check of this connection.
/*M!100302 SET SESSION idle_transaction_timeout = CAST(COALESCE(@fencelock_idle, @@idle_transaction_timeout) AS UNSIGNED),
@fencelock_idle = NULL */ /*!80000 DO 0 */
