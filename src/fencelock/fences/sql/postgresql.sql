-- schema: what keeps the marks; the row without a name, if there is one, is the floor. Room in each page, as rows are updated.
CREATE TABLE IF NOT EXISTS fencelock_fence (
    resource text COLLATE "C" PRIMARY KEY,
    token    bigint NOT NULL,
    id       text COLLATE "C" NOT NULL
) WITH (fillfactor = 50)

-- check: raises the mark and keeps its row locked until the end of the transaction, which may be idle for so long and no longer.
-- The mark is looked at twice: as of the statement's snapshot, with the floor, so that one that is collected meanwhile still
-- counts, and as it is when its row is locked.
WITH passed AS (
    INSERT INTO fencelock_fence AS fence (resource, token, id)
    SELECT CAST(:resource AS text), CAST(:token AS bigint), CAST(:id AS text) WHERE NOT EXISTS (
        SELECT FROM (
            SELECT token, id FROM fencelock_fence WHERE resource IN (CAST(:resource AS text), '')
            ORDER BY resource DESC LIMIT 1
        ) AS mark
        WHERE mark.token > CAST(:token AS bigint)
        OR (mark.token = CAST(:token AS bigint) AND mark.id NOT IN (CAST(:id AS text), '')))
    ON CONFLICT (resource) DO UPDATE SET token = excluded.token, id = excluded.id
    WHERE excluded.token > fence.token OR (excluded.token = fence.token AND fence.id IN (excluded.id, ''))
    RETURNING 1
)
SELECT (SELECT count(*) FROM passed), CASE WHEN CAST(:idle AS bigint) > 0 THEN set_config(
    'idle_in_transaction_session_timeout',
    CASE WHEN CAST(current_setting('idle_in_transaction_session_timeout') AS interval)
        BETWEEN interval '1 microsecond' AND CAST(:idle AS bigint) * interval '1 millisecond'
    THEN current_setting('idle_in_transaction_session_timeout') ELSE CAST(CAST(:idle AS bigint) AS text) END, true) END

-- seen: what a token is compared with.
SELECT token, id FROM fencelock_fence WHERE resource IN (:resource, '') ORDER BY resource DESC LIMIT 1

-- move: puts the mark, or the floor, where it is told to.
INSERT INTO fencelock_fence (resource, token, id) VALUES (:resource, :token, '')
ON CONFLICT (resource) DO UPDATE SET token = excluded.token, id = excluded.id

-- hold: lets no check begin, and waits for those that have: one that looked before the floor was raised could come in behind it.
LOCK TABLE fencelock_fence IN SHARE ROW EXCLUSIVE MODE

-- raise: puts the floor there unless it is higher already.
INSERT INTO fencelock_fence AS fence (resource, token, id) VALUES ('', :token, '')
ON CONFLICT (resource) DO UPDATE SET token = greatest(fence.token, excluded.token)

-- collect: forgets the marks below the floor.
DELETE FROM fencelock_fence WHERE resource <> '' AND token < :token
