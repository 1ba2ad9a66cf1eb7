-- The steps of the rows engine; each is one round trip and one transaction. Steps on one name run one after the other: a step
-- first locks the name, and its later statements see what the step before committed. That requires READ COMMITTED: with any
-- other isolation a step would see the queue as it was before it got the lock. Functions that clients call set search_path, so
-- that other functions or operators cannot replace the server's, and lock_timeout, so that they always wait for the name.
-- A parameter its_x is stored in the column x: PL/pgSQL could not tell two things with one name apart. `me` is a claim's id.

-- Lock the name until the transaction ends; return the time.
CREATE OR REPLACE FUNCTION fencelock.lock_name(ns text, nm text) RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'locks need the isolation READ COMMITTED, not %', upper(current_setting('transaction_isolation'))
      USING ERRCODE = 'FL001';
  END IF;
  PERFORM pg_advisory_xact_lock(hashtextextended(nm, hashtextextended(ns, 7306372540837290870)));
  RETURN clock_timestamp();
END $$;

-- Grant the name to all claims that may hold it now, and notify them: the admission rule (model.py), restated.
-- The caller has deleted expired claims. `me` is the caller's own claim, which needs no notification. Returns the number of grants.
CREATE OR REPLACE FUNCTION fencelock.advance_queue(ns text, nm text, at timestamptz, me text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
  entry fencelock.claim;
  ahead integer := 0;
  admitted integer := 0;
  minted bigint;
BEGIN
  FOR entry IN SELECT * FROM fencelock.claim WHERE namespace = ns AND name = nm ORDER BY ticket LOOP
    IF entry.token IS NULL THEN
      EXIT WHEN ahead > 0 AND (NOT entry.shared OR ahead >= entry.permits);
      minted := fencelock.mint();
      UPDATE fencelock.claim SET token = minted, expires = at + make_interval(secs => entry.seconds)
        WHERE namespace = ns AND name = nm AND ticket = entry.ticket;
      admitted := admitted + 1;
      IF entry.id <> me AND entry.channel <> '' THEN
        PERFORM pg_notify(
          split_part(entry.channel, ':', 1), entry.id || ':' || minted || ':' || split_part(entry.channel, ':', 2));
      END IF;
    END IF;
    EXIT WHEN NOT entry.shared;
    ahead := ahead + 1;
  END LOOP;
  RETURN admitted;
END $$;

-- Take the lock, or enqueue the claim; restart the ttl of a claim that is there already. `notify` is channel:attempt_no, empty if
-- the client does not listen, NULL if the claim must not be enqueued. Returns the token; or NULL with the seconds until the claim
-- ahead expires, and whether that is a holder.
CREATE OR REPLACE FUNCTION fencelock.attempt(
  ns text, nm text, me text, ttl double precision, is_shared boolean, its_permits integer, its_owner text, its_value bytea,
  notify text,
  OUT granted bigint, OUT retry_in double precision, OUT first boolean
) LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz := fencelock.lock_name(ns, nm);
  ends timestamptz := at + make_interval(secs => ttl);
  admitted integer;
BEGIN
  PERFORM FROM fencelock.claim WHERE namespace = ns AND name = nm LIMIT 1;
  IF NOT FOUND AND NOT EXISTS (SELECT FROM fencelock.abandoned WHERE id = me AND until > at) THEN
    -- There are no other claims: do the same as below, in as few steps as possible.
    granted := fencelock.mint();
    INSERT INTO fencelock.claim (namespace, name, id, seconds, expires, token, shared, permits, channel, owner, value)
      VALUES (ns, nm, me, ttl, ends, granted, is_shared, its_permits, '', its_owner, its_value);
    PERFORM fencelock.set_durability(true);
    RETURN;
  END IF;
  DELETE FROM fencelock.claim WHERE namespace = ns AND name = nm AND expires <= at;
  UPDATE fencelock.claim SET expires = ends, channel = coalesce(notify, '') WHERE namespace = ns AND name = nm AND id = me;
  IF NOT FOUND THEN
    IF EXISTS (SELECT FROM fencelock.abandoned WHERE id = me AND until > at) THEN
      RETURN;
    END IF;
    INSERT INTO fencelock.claim (namespace, name, id, seconds, expires, shared, permits, channel, owner, value)
      VALUES (ns, nm, me, ttl, ends, is_shared, its_permits, coalesce(notify, ''), its_owner, its_value);
  END IF;
  admitted := fencelock.advance_queue(ns, nm, at, me);
  SELECT token INTO granted FROM fencelock.claim WHERE id = me;
  PERFORM fencelock.set_durability(admitted > 0 OR granted IS NOT NULL);
  IF granted IS NULL THEN
    IF notify IS NULL THEN
      DELETE FROM fencelock.claim WHERE id = me;
    ELSE
      -- The first waiter watches the holders, each other waiter the claim ahead: one expiry wakes one waiter.
      SELECT ahead.token IS NOT NULL, ahead.expires INTO first, ends FROM fencelock.claim ahead
        WHERE ahead.namespace = ns AND ahead.name = nm AND ahead.ticket < (SELECT ticket FROM fencelock.claim WHERE id = me)
        ORDER BY ahead.ticket DESC LIMIT 1;
      IF first THEN
        SELECT min(expires) INTO ends FROM fencelock.claim WHERE namespace = ns AND name = nm AND token IS NOT NULL;
      END IF;
      retry_in := greatest(0, date_part('epoch', ends - at));
    END IF;
  END IF;
END $$;

-- Release the lock and hand it to the next live waiter in the same step; returns whether this claim still held it.
CREATE OR REPLACE FUNCTION fencelock.release(ns text, nm text, me text) RETURNS boolean LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz := fencelock.lock_name(ns, nm);
  was boolean;
  admitted integer := 0;
BEGIN
  DELETE FROM fencelock.claim WHERE id = me AND namespace = ns AND name = nm
    RETURNING token IS NOT NULL AND expires > at INTO was;
  PERFORM FROM fencelock.claim WHERE namespace = ns AND name = nm LIMIT 1;
  IF FOUND THEN
    DELETE FROM fencelock.claim WHERE namespace = ns AND name = nm AND expires <= at;
    admitted := fencelock.advance_queue(ns, nm, at, '');
  END IF;
  PERFORM fencelock.set_durability(admitted > 0);
  RETURN coalesce(was, false);
END $$;

-- Remove the claim from the queue, or release it, and refuse attempts of the claim that are still in flight for one ttl.
-- For each row that it writes it deletes two expired ones: clients that stay connected run no handshake, and rows would pile up.
CREATE OR REPLACE FUNCTION fencelock.abandon(ns text, nm text, me text, ttl double precision) RETURNS void LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz;
BEGIN
  at := fencelock.lock_name(ns, nm);
  INSERT INTO fencelock.abandoned (id, until) VALUES (me, at + make_interval(secs => ttl))
    ON CONFLICT (id) DO UPDATE SET until = excluded.until;
  DELETE FROM fencelock.abandoned WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM fencelock.abandoned WHERE until < at ORDER BY until LIMIT 2 FOR UPDATE SKIP LOCKED));
  PERFORM fencelock.release(ns, nm, me);
END $$;

-- Restart the ttl of each holder; returns the ids of the claims that still hold. It needs no lock on the names: the UPDATE waits
-- for a row that another step is deleting, and then finds it or not.
CREATE OR REPLACE FUNCTION fencelock.renew(ids text[], ttls double precision[]) RETURNS SETOF text LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz := clock_timestamp();
BEGIN
  PERFORM fencelock.set_durability(true);
  RETURN QUERY
    UPDATE fencelock.claim held SET expires = at + make_interval(secs => asked.ttl)
      FROM unnest(ids, ttls) AS asked (id, ttl)
      WHERE held.id = asked.id AND held.token IS NOT NULL AND held.expires > at
      RETURNING held.id::text;
END $$;

-- Turn an exclusive holder into a reader in its place, restart its ttl, and grant the lock to the readers directly behind it.
-- Repeating it changes nothing more. Returns whether the claim still holds.
CREATE OR REPLACE FUNCTION fencelock.downgrade(ns text, nm text, me text) RETURNS boolean LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz := fencelock.lock_name(ns, nm);
  held boolean;
BEGIN
  DELETE FROM fencelock.claim WHERE namespace = ns AND name = nm AND expires <= at;
  UPDATE fencelock.claim SET shared = true, expires = at + make_interval(secs => seconds)
    WHERE namespace = ns AND name = nm AND id = me AND token IS NOT NULL;
  held := FOUND;
  PERFORM fencelock.advance_queue(ns, nm, at, ''), fencelock.set_durability(true);
  RETURN held;
END $$;

-- Return the token of a granted claim; changes nothing. For clients behind a pooler, which cannot be notified.
CREATE OR REPLACE FUNCTION fencelock.granted_token(me text) RETURNS bigint LANGUAGE sql STABLE
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
  SELECT token FROM fencelock.claim WHERE id = me AND expires > clock_timestamp()
$$;

CREATE OR REPLACE FUNCTION fencelock.inspect(
  ns text, nm text,
  OUT owner text, OUT token bigint, OUT expires_in double precision, OUT shared boolean, OUT permits integer, OUT value text
) RETURNS SETOF record LANGUAGE sql STABLE
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
  SELECT owner, token, date_part('epoch', expires - clock_timestamp()), shared, permits, encode(value, 'hex')
    FROM fencelock.claim WHERE namespace = ns AND name = nm AND expires > clock_timestamp() ORDER BY ticket
$$;

CREATE OR REPLACE FUNCTION fencelock.names(ns text, beginning text) RETURNS SETOF text LANGUAGE sql STABLE
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
  SELECT DISTINCT name FROM fencelock.claim
    WHERE namespace = ns AND starts_with(name, beginning) AND expires > clock_timestamp() ORDER BY name
$$;

-- Drop the holders and grant the lock to the next waiters. Every later token is greater. Returns how many holders were dropped.
CREATE OR REPLACE FUNCTION fencelock.force_release(ns text, nm text) RETURNS integer LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz := fencelock.lock_name(ns, nm);
  dropped integer;
BEGIN
  DELETE FROM fencelock.claim WHERE namespace = ns AND name = nm AND expires <= at;
  DELETE FROM fencelock.claim WHERE namespace = ns AND name = nm AND token IS NOT NULL;
  GET DIAGNOSTICS dropped = ROW_COUNT;
  PERFORM fencelock.mint();
  PERFORM fencelock.advance_queue(ns, nm, at, '');
  PERFORM fencelock.set_durability(true);
  RETURN dropped;
END $$;
