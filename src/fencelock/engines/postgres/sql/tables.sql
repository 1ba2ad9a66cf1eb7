-- The tables of fencelock, for all namespaces: created once, in one transaction, and never changed silently.
-- Names are compared byte by byte (COLLATE "C"): they are never normalised, and they are case-sensitive.
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL lock_timeout = 0;
SET LOCAL statement_timeout = 0;
SELECT pg_advisory_xact_lock(7306372540837290868);

DO $$
BEGIN
  IF to_regclass('fencelock.layout') IS NOT NULL THEN
    IF (SELECT max(version) FROM fencelock.layout) IS DISTINCT FROM 2 THEN
      RAISE EXCEPTION 'the schema fencelock was made by another release of fencelock (layout %, this one has 2)',
        (SELECT max(version) FROM fencelock.layout) USING ERRCODE = 'FL002';
    END IF;
  END IF;
  IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'fencelock') THEN
    CREATE SCHEMA fencelock;
  END IF;
  IF to_regclass('fencelock.token') IS NULL THEN
    -- Tokens start at the clock in µs, as on every engine, and stay exact in a double.
    EXECUTE format(
      'CREATE SEQUENCE fencelock.token AS bigint MAXVALUE 9007199254740991 START WITH %s',
      (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
  END IF;
END $$;

-- All claims, in the order of their tickets: a claim with a token holds its name, one without waits for it.
CREATE TABLE IF NOT EXISTS fencelock.claim (
  namespace text COLLATE "C" NOT NULL,
  name      text COLLATE "C" NOT NULL,
  ticket    bigint GENERATED ALWAYS AS IDENTITY,
  id        text COLLATE "C" NOT NULL,
  seconds   double precision NOT NULL,
  expires   timestamptz NOT NULL,
  token     bigint,
  shared    boolean NOT NULL,
  permits   integer,        -- the limit of a permit; NULL for readers and exclusive claims
  channel   text NOT NULL,  -- channel:attempt_no that the client listens for, or an empty string
  owner     text NOT NULL,
  value     bytea NOT NULL, -- UTF-8; not text, which cannot contain a NUL
  PRIMARY KEY (namespace, name, ticket),
  UNIQUE (id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 2000);

-- Abandoned claims: for one ttl, an attempt that was still in flight must not enqueue the claim again.
CREATE UNLOGGED TABLE IF NOT EXISTS fencelock.abandoned (id text COLLATE "C" PRIMARY KEY, until timestamptz NOT NULL);
CREATE INDEX IF NOT EXISTS abandoned_until ON fencelock.abandoned (until);

-- Records (core/records.py). A record without a value was deleted; its token still counts.
CREATE TABLE IF NOT EXISTS fencelock.record (
  namespace text COLLATE "C" NOT NULL,
  key       text COLLATE "C" NOT NULL,
  value     bytea,
  token     bigint NOT NULL,
  version   bigint NOT NULL,
  ends      timestamptz NOT NULL,
  PRIMARY KEY (namespace, key)
);
CREATE INDEX IF NOT EXISTS record_ends ON fencelock.record (ends);

-- Rate limits: when the last admitted call would be due if calls came evenly, in µs of the server's clock.
CREATE TABLE IF NOT EXISTS fencelock.rate (
  namespace text COLLATE "C" NOT NULL,
  key       text COLLATE "C" NOT NULL,
  time      bigint NOT NULL,
  PRIMARY KEY (namespace, key)
) WITH (fillfactor = 70);

-- The name of each advisory key: a key is a hash, and two names may have the same one.
CREATE UNLOGGED TABLE IF NOT EXISTS fencelock.name (
  key       bigint PRIMARY KEY,
  namespace text COLLATE "C" NOT NULL,
  name      text COLLATE "C" NOT NULL,
  seen      date NOT NULL DEFAULT current_date
);

-- The owner and the value of each session with an advisory lock; a session writes its own before it takes the lock.
CREATE UNLOGGED TABLE IF NOT EXISTS fencelock.session (pid integer PRIMARY KEY, owner text NOT NULL, value bytea NOT NULL);

CREATE TABLE IF NOT EXISTS fencelock.layout (version integer PRIMARY KEY);
