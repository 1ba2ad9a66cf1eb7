-- Layout 3 of a fencelock database. It promises: one row of `counter`; in `claim`, one row per claim, oldest ticket first;
-- in `record`, one row per record; in `rate`, one row per rate limit. Times of claims and rates are µs since the boot that `counter.boot` names: after another
-- boot they are void. Records survive a boot: their times are µs of the wall clock.

CREATE TABLE counter (
    one      INTEGER PRIMARY KEY CHECK (one = 1),
    token    INTEGER NOT NULL,  -- the highest token that was minted
    reserved INTEGER NOT NULL,  -- synced to disk before any token up to here is used: after a power cut, tokens continue from here
    boot     TEXT    NOT NULL
) STRICT;

CREATE TABLE claim (
    space   TEXT    NOT NULL,
    name    TEXT    NOT NULL,
    ticket  INTEGER NOT NULL,
    id      TEXT    NOT NULL,
    shared  INTEGER NOT NULL,
    permits INTEGER,
    ttl     INTEGER NOT NULL,
    owner   TEXT    NOT NULL,
    value   TEXT NOT NULL,     -- what an election's candidate gave; else empty
    wakeup  TEXT,              -- address of the datagram that wakes the waiter when it is granted the lock
    token   INTEGER,           -- NULL while it waits
    expires INTEGER NOT NULL,
    PRIMARY KEY (space, name, ticket)
) STRICT, WITHOUT ROWID;

CREATE TABLE record (
    space   TEXT    NOT NULL,
    key     TEXT    NOT NULL,
    value   BLOB,              -- NULL: deleted, and only the token counts
    token   INTEGER NOT NULL,
    version INTEGER NOT NULL,  -- minted like a token, so that it never repeats
    ends    INTEGER NOT NULL,
    PRIMARY KEY (space, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE rate (
    space TEXT    NOT NULL,
    key   TEXT    NOT NULL,
    time  INTEGER NOT NULL,    -- µs since boot: when the last admitted call would be due if calls came evenly
    PRIMARY KEY (space, key)
) STRICT, WITHOUT ROWID;
