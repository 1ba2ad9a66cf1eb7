-- The steps of the rows engine, each one round trip and one transaction. A name's steps come one after the other: each
-- begins by locking it, and every statement after that sees what the step before has written. That takes READ COMMITTED:
-- with any other isolation a step would look at the queue as it was before it got the lock. What clients call sets a search_path
-- of its own, so that nobody's functions or operators stand in for the server's, and waits for the name however long that takes.
CREATE OR REPLACE FUNCTION fencelock.enter(ns text, nm text) RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'locks need the isolation READ COMMITTED, not %', upper(current_setting('transaction_isolation'))
      USING ERRCODE = 'FL001';
  END IF;
  PERFORM pg_advisory_xact_lock(hashtextextended(nm, hashtextextended(ns, 7306372540837290870)));
  RETURN clock_timestamp();
END $$;

-- Let in whoever may hold the name now, and call it: the rule of admission (model.py: `admit` and `settle`), restated.
-- Those who have run out have been deleted before. `me` is whoever asks and need not be called. Returns how many were let in.
CREATE OR REPLACE FUNCTION fencelock.settle(ns text, nm text, at timestamptz, me text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
  place fencelock.claim;
  ahead integer := 0;
  admitted integer := 0;
  minted bigint;
BEGIN
  FOR place IN SELECT * FROM fencelock.claim WHERE namespace = ns AND name = nm ORDER BY ticket LOOP
    IF place.token IS NULL THEN
      EXIT WHEN ahead > 0 AND (NOT place.shared OR ahead >= place.permits);
      minted := fencelock.mint();
      UPDATE fencelock.claim SET token = minted, expires = at + make_interval(secs => place.seconds)
        WHERE namespace = ns AND name = nm AND ticket = place.ticket;
      admitted := admitted + 1;
      IF place.id <> me AND place.seat <> '' THEN
        PERFORM pg_notify(split_part(place.seat, ':', 1), place.id || ':' || minted || ':' || split_part(place.seat, ':', 2));
      END IF;
    END IF;
    EXIT WHEN NOT place.shared;
    ahead := ahead + 1;
  END LOOP;
  RETURN admitted;
END $$;

-- Take the lock or a place in line; count anew what is there already. Without a seat, do not queue.
-- Returns the token; or none, with the seconds until whoever is ahead runs out, and whether that is a holder; or the mode (s:
-- readers, or a number of permits) that others use the name in and that contradicts this one's.
CREATE OR REPLACE FUNCTION fencelock.attempt(
  ns text, nm text, me text, ttl double precision, is_shared boolean, limited integer, label text, sits text,
  OUT granted bigint, OUT retry_in double precision, OUT others text, OUT first boolean
) LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz := fencelock.enter(ns, nm);
  ends timestamptz := at + make_interval(secs => ttl);
  mine fencelock.claim;
  admitted integer;
BEGIN
  PERFORM FROM fencelock.claim WHERE namespace = ns AND name = nm LIMIT 1;
  IF NOT FOUND AND NOT EXISTS (SELECT FROM fencelock.gone WHERE id = me AND until > at) THEN
    -- Nobody is there: what follows below, in as few steps as possible.
    granted := fencelock.mint();
    INSERT INTO fencelock.claim (namespace, name, id, seconds, expires, token, shared, permits, seat, owner)
      VALUES (ns, nm, me, ttl, ends, granted, is_shared, limited, '', label);
    PERFORM fencelock.durable(true);
    RETURN;
  END IF;
  DELETE FROM fencelock.claim WHERE namespace = ns AND name = nm AND expires <= at;
  UPDATE fencelock.claim SET expires = ends, seat = coalesce(sits, '') WHERE namespace = ns AND name = nm AND id = me;
  IF NOT FOUND THEN
    IF EXISTS (SELECT FROM fencelock.gone WHERE id = me AND until > at) THEN
      RETURN;
    END IF;
    IF is_shared THEN
      SELECT coalesce(permits::text, 's') INTO others FROM fencelock.claim
        WHERE namespace = ns AND name = nm AND shared AND permits IS DISTINCT FROM limited LIMIT 1;
      IF FOUND THEN
        RETURN;
      END IF;
    END IF;
    INSERT INTO fencelock.claim (namespace, name, id, seconds, expires, shared, permits, seat, owner)
      VALUES (ns, nm, me, ttl, ends, is_shared, limited, coalesce(sits, ''), label);
  END IF;
  admitted := fencelock.settle(ns, nm, at, me);
  SELECT token INTO granted FROM fencelock.claim WHERE id = me;
  PERFORM fencelock.durable(admitted > 0 OR granted IS NOT NULL);
  IF granted IS NULL THEN
    IF sits IS NULL THEN
      DELETE FROM fencelock.claim WHERE id = me;
    ELSE
      -- The first in line watches the holders, everybody else the one ahead: one death wakes one waiter.
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

-- Give back the lock and hand it to the next live waiter in the same step; returns whether it was still this claim's.
CREATE OR REPLACE FUNCTION fencelock.release(ns text, nm text, me text) RETURNS boolean LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz := fencelock.enter(ns, nm);
  was boolean;
  admitted integer := 0;
BEGIN
  DELETE FROM fencelock.claim WHERE id = me AND namespace = ns AND name = nm
    RETURNING token IS NOT NULL AND expires > at INTO was;
  PERFORM FROM fencelock.claim WHERE namespace = ns AND name = nm LIMIT 1;
  IF FOUND THEN
    DELETE FROM fencelock.claim WHERE namespace = ns AND name = nm AND expires <= at;
    admitted := fencelock.settle(ns, nm, at, '');
  END IF;
  PERFORM fencelock.durable(admitted > 0);
  RETURN coalesce(was, false);
END $$;

-- Leave the queue or give back the lock, whichever it was, and let no straggler of the claim in for one ttl. Two that are over
-- are swept for each that is written: clients that stay connected greet nobody, and would let them pile up.
CREATE OR REPLACE FUNCTION fencelock.abandon(ns text, nm text, me text, ttl double precision) RETURNS void LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz;
BEGIN
  at := fencelock.enter(ns, nm);
  INSERT INTO fencelock.gone (id, until) VALUES (me, at + make_interval(secs => ttl))
    ON CONFLICT (id) DO UPDATE SET until = excluded.until;
  DELETE FROM fencelock.gone WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM fencelock.gone WHERE until < at ORDER BY until LIMIT 2 FOR UPDATE SKIP LOCKED));
  PERFORM fencelock.release(ns, nm, me);
END $$;

-- Count the ttl of each holder anew; returns the ids of those that still hold. It takes no lock on names: a row that another
-- step deletes is waited for, and found or not found afterwards.
CREATE OR REPLACE FUNCTION fencelock.renew(ids text[], ttls double precision[]) RETURNS SETOF text LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz := clock_timestamp();
BEGIN
  PERFORM fencelock.durable(true);
  RETURN QUERY
    UPDATE fencelock.claim held SET expires = at + make_interval(secs => asked.ttl)
      FROM unnest(ids, ttls) AS asked (id, ttl)
      WHERE held.id = asked.id AND held.token IS NOT NULL AND held.expires > at
      RETURNING held.id::text;
END $$;

-- Return the token of a claim that was handed its lock; changes nothing. For whoever cannot be called.
CREATE OR REPLACE FUNCTION fencelock.look(me text) RETURNS bigint LANGUAGE sql STABLE
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
  SELECT token FROM fencelock.claim WHERE id = me AND expires > clock_timestamp()
$$;

CREATE OR REPLACE FUNCTION fencelock.inspect(
  ns text, nm text,
  OUT owner text, OUT token bigint, OUT expires_in double precision, OUT shared boolean, OUT permits integer
) RETURNS SETOF record LANGUAGE sql STABLE
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
  SELECT owner, token, date_part('epoch', expires - clock_timestamp()), shared, permits
    FROM fencelock.claim WHERE namespace = ns AND name = nm AND expires > clock_timestamp() ORDER BY ticket
$$;

CREATE OR REPLACE FUNCTION fencelock.names(ns text, beginning text) RETURNS SETOF text LANGUAGE sql STABLE
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
  SELECT DISTINCT name FROM fencelock.claim
    WHERE namespace = ns AND starts_with(name, beginning) AND expires > clock_timestamp() ORDER BY name
$$;

-- Drop whoever holds the name and let the next in; every later token is above every earlier one. Returns how many were dropped.
CREATE OR REPLACE FUNCTION fencelock.force(ns text, nm text) RETURNS integer LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz := fencelock.enter(ns, nm);
  dropped integer;
BEGIN
  DELETE FROM fencelock.claim WHERE namespace = ns AND name = nm AND expires <= at;
  DELETE FROM fencelock.claim WHERE namespace = ns AND name = nm AND token IS NOT NULL;
  GET DIAGNOSTICS dropped = ROW_COUNT;
  PERFORM fencelock.mint();
  PERFORM fencelock.settle(ns, nm, at, '');
  PERFORM fencelock.durable(true);
  RETURN dropped;
END $$;
