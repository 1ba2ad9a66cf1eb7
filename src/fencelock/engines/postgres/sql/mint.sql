-- Tokens: strictly rising, unique, as durable as the grant that they come with, and never far behind the clock.

-- Move the sequence ahead of the clock: in a database that was restored, or a replica that was promoted, it may be behind
-- what was given out. A leap of 0.2 s of µs, and only from more than 0.1 s below: no hundred thousand tokens can be drawn
-- between the look and the leap, and nobody else leaps.
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

-- Behind a pooler a client does not notice that the server is another one now. The server's own session does: it was never
-- greeted. Nor does anybody notice that a backup was restored under it: what is a second behind the clock is moved, always.
CREATE OR REPLACE FUNCTION fencelock.mint() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  minted bigint;
BEGIN
  IF current_setting('fencelock.greeted', true) IS DISTINCT FROM 'yes' THEN
    PERFORM fencelock.catch_up(), set_config('fencelock.greeted', 'yes', false);
  END IF;
  minted := nextval('fencelock.token');
  IF minted < date_part('epoch', clock_timestamp()) * 1000000 - 1000000 THEN
    PERFORM fencelock.catch_up();
    minted := nextval('fencelock.token');
  END IF;
  RETURN minted;
END $$;

-- Whether this transaction has to be on disk before it is answered. What need not: places in line, and releases that hand
-- nothing over. A crash may bring a claim back then, until its ttl is over; it cannot bring back a token.
CREATE OR REPLACE FUNCTION fencelock.durable(must boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF NOT must THEN
    PERFORM set_config('synchronous_commit', 'off', true);
  ELSIF current_setting('synchronous_commit') = 'off' THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
END $$;

-- Called once for each connection: looks after the tokens and sweeps what nobody has asked for since.
CREATE OR REPLACE FUNCTION fencelock.greet() RETURNS void LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  long_ago timestamptz := clock_timestamp() - interval '1 hour';
BEGIN
  PERFORM fencelock.durable(false);
  PERFORM fencelock.catch_up(), set_config('fencelock.greeted', 'yes', false);
  DELETE FROM fencelock.claim WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM fencelock.claim WHERE expires < long_ago LIMIT 1000 FOR UPDATE SKIP LOCKED));
  DELETE FROM fencelock.gone WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM fencelock.gone WHERE until < long_ago LIMIT 1000 FOR UPDATE SKIP LOCKED));
  DELETE FROM fencelock.record WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM fencelock.record WHERE ends < long_ago LIMIT 1000 FOR UPDATE SKIP LOCKED));
  DELETE FROM fencelock.name WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM fencelock.name WHERE seen < current_date - 7 LIMIT 1000 FOR UPDATE SKIP LOCKED))
    AND pg_try_advisory_xact_lock(key);
END $$;
