-- schema: what keeps the marks; the row without a name, if there is one, is the floor.
CREATE TABLE IF NOT EXISTS fencelock_fence (
    resource TEXT PRIMARY KEY,
    token    INTEGER NOT NULL,  -- the highest that was let through
    id       TEXT NOT NULL      -- whose it was: an equal token of another claim is refused; '' after a move by hand
) STRICT, WITHOUT ROWID

-- check: raises the mark and takes the database's write lock, unless the token is old; touches one row, or none.
INSERT INTO fencelock_fence (resource, token, id)
SELECT :resource, :token, :id WHERE NOT EXISTS (
    SELECT 1 FROM (SELECT token, id FROM fencelock_fence WHERE resource IN (:resource, '') ORDER BY resource DESC LIMIT 1) AS mark
    WHERE mark.token > :token OR (mark.token = :token AND mark.id NOT IN (:id, '')))
ON CONFLICT (resource) DO UPDATE SET token = excluded.token, id = excluded.id

-- seen: what a token is compared with.
SELECT token, id FROM fencelock_fence WHERE resource IN (:resource, '') ORDER BY resource DESC LIMIT 1

-- move: puts the mark, or the floor, where it is told to.
INSERT INTO fencelock_fence (resource, token, id) VALUES (:resource, :token, '')
ON CONFLICT (resource) DO UPDATE SET token = excluded.token, id = excluded.id

-- raise: puts the floor there unless it is higher already.
INSERT INTO fencelock_fence (resource, token, id) VALUES ('', :token, '')
ON CONFLICT (resource) DO UPDATE SET token = max(token, excluded.token)

-- collect: forgets the marks below the floor.
DELETE FROM fencelock_fence WHERE resource <> '' AND token < :token
