-- schema: the table of the marks; the row with an empty resource, if it exists, is min_token. Half of each page stays free for updates.
CREATE TABLE IF NOT EXISTS fencelock_fence (
    resource text COLLATE "C" PRIMARY KEY,
    token    bigint NOT NULL,
    id       text COLLATE "C" NOT NULL
) WITH (fillfactor = 50)

-- check: sets the mark and keeps its row locked until the transaction ends; the server ends a transaction that is idle for `idle`
-- ms. The statement compares the mark twice: in its snapshot, together with min_token, so that a mark that is pruned meanwhile still
-- counts, and again when its row is locked.
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

-- get_mark: returns what a token is compared with.
SELECT token, id FROM fencelock_fence WHERE resource IN (:resource, '') ORDER BY resource DESC LIMIT 1

-- set_mark: sets the mark of a resource for any claim with this token or a higher one.
INSERT INTO fencelock_fence (resource, token, id) VALUES (:resource, :token, '')
ON CONFLICT (resource) DO UPDATE SET token = excluded.token, id = excluded.id

-- set_all_marks: sets all marks, and min_token if it exists.
UPDATE fencelock_fence SET token = :token, id = ''

-- count_marks: returns the number of marks.
SELECT count(*) FROM fencelock_fence WHERE resource <> ''

-- lock_table: blocks new checks, and waits for those in progress: one that read before min_token rose could insert an older mark.
LOCK TABLE fencelock_fence IN SHARE ROW EXCLUSIVE MODE

-- raise_min_token: sets min_token unless it is higher already.
INSERT INTO fencelock_fence AS fence (resource, token, id) VALUES ('', :token, '')
ON CONFLICT (resource) DO UPDATE SET token = greatest(fence.token, excluded.token)

-- prune: removes the marks below min_token.
DELETE FROM fencelock_fence WHERE resource <> '' AND token < :token
