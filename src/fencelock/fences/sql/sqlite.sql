-- schema: the table of the marks; the row with an empty resource, if it exists, is min_token.
CREATE TABLE IF NOT EXISTS fencelock_fence (
    resource TEXT PRIMARY KEY,
    token    INTEGER NOT NULL,  -- the highest accepted token
    id       TEXT NOT NULL      -- its claim: an equal token of another claim is refused; '' after a rebase
) STRICT, WITHOUT ROWID

-- check: sets the mark and takes the database's write lock, unless the token is old; affects one row, or none.
INSERT INTO fencelock_fence (resource, token, id)
SELECT :resource, :token, :id WHERE NOT EXISTS (
    SELECT 1 FROM (SELECT token, id FROM fencelock_fence WHERE resource IN (:resource, '') ORDER BY resource DESC LIMIT 1) AS mark
    WHERE mark.token > :token OR (mark.token = :token AND mark.id NOT IN (:id, '')))
ON CONFLICT (resource) DO UPDATE SET token = excluded.token, id = excluded.id

-- get_mark: returns what a token is compared with.
SELECT token, id FROM fencelock_fence WHERE resource IN (:resource, '') ORDER BY resource DESC LIMIT 1

-- set_mark: sets the mark of a resource for any claim with this token or a higher one.
INSERT INTO fencelock_fence (resource, token, id) VALUES (:resource, :token, '')
ON CONFLICT (resource) DO UPDATE SET token = excluded.token, id = excluded.id

-- set_all_marks: sets all marks, and min_token if it exists.
UPDATE fencelock_fence SET token = :token, id = ''

-- count_marks: returns the number of marks.
SELECT count(*) FROM fencelock_fence WHERE resource <> ''

-- raise_min_token: sets min_token unless it is higher already.
INSERT INTO fencelock_fence (resource, token, id) VALUES ('', :token, '')
ON CONFLICT (resource) DO UPDATE SET token = max(token, excluded.token)

-- prune: removes the marks below min_token.
DELETE FROM fencelock_fence WHERE resource <> '' AND token < :token
