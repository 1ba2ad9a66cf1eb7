-- Tokens: strictly rising, unique, as durable as their grant, and never far behind the clock.

-- Move the sequence ahead of the clock: in a restored database, or on a promoted replica, it may be behind tokens that were
-- issued before. It moves to 0.2 s (in µs) after the clock, and only if it is less than 0.1 s after it: other sessions cannot
-- draw the 100,000 tokens in between before setval runs, and the lock keeps others from moving it at the same time.
CREATE OR REPLACE FUNCTION fencelock.catch_up() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  clock bigint;
BEGIN
  PERFORM pg_advisory_xact_lock(7306372540837290869);
  clock := date_part('epoch', clock_timestamp()) * 1000000;
  IF (SELECT last_value FROM fencelock.token) < clock + 100000 THEN
    PERFORM setval('fencelock.token', clock + 200000);
  END IF;
END $$;

-- Draw the next token. Behind a pooler a client does not notice a fail-over; the new server's session does, because no handshake
-- ran in it. No session notices a restored backup, so a sequence that is a second behind the clock is always moved.
CREATE OR REPLACE FUNCTION fencelock.mint() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  minted bigint;
BEGIN
  IF current_setting('fencelock.handshake_done', true) IS DISTINCT FROM 'yes' THEN
    PERFORM fencelock.catch_up(), set_config('fencelock.handshake_done', 'yes', false);
  END IF;
  minted := nextval('fencelock.token');
  IF minted < date_part('epoch', clock_timestamp()) * 1000000 - 1000000 THEN
    PERFORM fencelock.catch_up();
    minted := nextval('fencelock.token');
  END IF;
  RETURN minted;
END $$;

-- Set whether this transaction must be on disk before the server replies. Waiting claims, and releases that hand the lock to
-- nobody, need not: a crash may restore a released claim until its ttl is over, but it cannot make a token repeat.
CREATE OR REPLACE FUNCTION fencelock.set_durability(must boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF NOT must THEN
    PERFORM set_config('synchronous_commit', 'off', true);
  ELSIF current_setting('synchronous_commit') = 'off' THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
END $$;

-- Runs once per connection: moves the tokens ahead of the clock, and deletes rows that expired long ago.
CREATE OR REPLACE FUNCTION fencelock.handshake() RETURNS void LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  long_ago timestamptz := clock_timestamp() - interval '1 hour';
BEGIN
  PERFORM fencelock.set_durability(false);
  PERFORM fencelock.catch_up(), set_config('fencelock.handshake_done', 'yes', false);
  DELETE FROM fencelock.claim WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM fencelock.claim WHERE expires < long_ago LIMIT 1000 FOR UPDATE SKIP LOCKED));
  DELETE FROM fencelock.abandoned WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM fencelock.abandoned WHERE until < long_ago LIMIT 1000 FOR UPDATE SKIP LOCKED));
  DELETE FROM fencelock.record WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM fencelock.record WHERE ends < long_ago LIMIT 1000 FOR UPDATE SKIP LOCKED));
  -- It must not lock a key to find out whether a session has it: the server would do so for every name, used or not.
  DELETE FROM fencelock.name AS old WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM fencelock.name WHERE seen < current_date - 7 LIMIT 1000 FOR UPDATE SKIP LOCKED))
    AND NOT EXISTS (SELECT FROM pg_locks
      WHERE locktype = 'advisory' AND objsubid = 1 AND (classid::bigint << 32) | objid::bigint = old.key);
END $$;
