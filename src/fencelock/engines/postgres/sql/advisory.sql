-- The functions of the advisory engine. A session has one lock at most; idle_session_timeout, set to the ttl, ends the session of
-- a client that stops renewing.

-- Prepare a session: no timeouts that end its waits, detection of a dead client while it waits, and a safe search_path.
CREATE OR REPLACE FUNCTION fencelock.begin_session() RETURNS void LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM set_config('search_path', 'pg_catalog, pg_temp', false);  -- for the session, beyond this function
  PERFORM set_config('statement_timeout', '0', false), set_config('lock_timeout', '0', false);
  IF current_setting('synchronous_commit') = 'off' THEN
    PERFORM set_config('synchronous_commit', 'on', false);  -- a token must not repeat after a crash
  END IF;
  IF current_setting('transaction_timeout', true) IS NOT NULL THEN
    PERFORM set_config('transaction_timeout', '0', false);
  END IF;
  BEGIN
    PERFORM set_config('client_connection_check_interval', '2s', false);
  EXCEPTION WHEN OTHERS THEN
    NULL;  -- not every system supports it: then the server notices when it grants the lock
  END;
END $$;

-- Take the lock, waiting if necessary; from then on the session ends when it is idle for the ttl. The COMMIT keeps that setting if
-- the wait is cancelled: a lock that the server grants at the same moment outlives the statement. Returns whether it waited.
-- Assignments instead of PERFORM: an expression costs a tenth of a query.
CREATE OR REPLACE PROCEDURE fencelock.lock_wait(k bigint, ttl text, is_shared boolean, INOUT token bigint, INOUT waited boolean)
LANGUAGE plpgsql AS $$
DECLARE
  ignored text;
BEGIN
  waited := NOT CASE WHEN is_shared THEN pg_try_advisory_lock_shared(k) ELSE pg_try_advisory_lock(k) END;
  ignored := set_config('idle_session_timeout', ttl, false);
  IF waited THEN
    ignored := set_config('application_name', 'fencelock - ' || ttl, false);
    COMMIT;
    ignored := CASE WHEN is_shared THEN pg_advisory_lock_shared(k)::text ELSE pg_advisory_lock(k)::text END;
  END IF;
  token := nextval('fencelock.token');
  IF token < date_part('epoch', clock_timestamp()) * 1000000 - 1000000 THEN
    token := fencelock.mint();
  END IF;
  ignored := set_config('application_name', 'fencelock ' || token || ' ' || ttl, false);
END $$;

-- Register the session's owner, and check that no other name has this key; a session runs it once for each owner and name.
CREATE OR REPLACE FUNCTION fencelock.register_session(k bigint, ns text, nm text, label text) RETURNS void LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  known fencelock.name;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  INSERT INTO fencelock.session (pid, owner) VALUES (pg_backend_pid(), label)
    ON CONFLICT (pid) DO UPDATE SET owner = excluded.owner WHERE session.owner <> excluded.owner;
  INSERT INTO fencelock.name (key, namespace, name) VALUES (k, ns, nm)
    ON CONFLICT (key) DO UPDATE SET seen = current_date WHERE name.seen < current_date;
  SELECT * INTO known FROM fencelock.name WHERE key = k;
  IF known.name <> nm OR known.namespace <> ns THEN
    RAISE EXCEPTION 'its key % is that of % in the namespace %', k, quote_literal(known.name), quote_literal(known.namespace)
      USING ERRCODE = 'FL003';
  END IF;
END $$;

-- The holders and waiters of a key, in order: from pg_locks, and from the application_name that the sessions set.
CREATE OR REPLACE FUNCTION fencelock.sessions(
  k bigint,
  OUT pid integer, OUT owner text, OUT token bigint, OUT expires_in double precision, OUT shared boolean
) RETURNS SETOF record LANGUAGE sql VOLATILE
  SET search_path = pg_catalog, pg_temp AS $$
  SELECT locks.pid, coalesce(session.owner, ''),
      CASE WHEN locks.granted THEN coalesce(substring(activity.application_name from '^fencelock (\d+) '), '0')::bigint END,
      greatest(0, substring(activity.application_name from '^fencelock \S+ (\d+)ms$')::double precision / 1000
        - CASE WHEN activity.state = 'idle' AND locks.granted
            THEN date_part('epoch', clock_timestamp() - activity.state_change) ELSE 0 END),
      locks.mode = 'ShareLock'
    FROM pg_locks locks
      JOIN pg_stat_activity activity ON activity.pid = locks.pid
      LEFT JOIN fencelock.session session ON session.pid = locks.pid
    WHERE locks.locktype = 'advisory' AND locks.objsubid = 1
      AND locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND (locks.classid::bigint << 32) | locks.objid::bigint = k
    ORDER BY locks.granted DESC, locks.waitstart, 3, locks.pid
$$;

CREATE OR REPLACE FUNCTION fencelock.locked_names(ns text, beginning text) RETURNS SETOF text LANGUAGE sql VOLATILE
  SET search_path = pg_catalog, pg_temp AS $$
  SELECT DISTINCT known.name FROM fencelock.name known
      JOIN pg_locks locks ON (locks.classid::bigint << 32) | locks.objid::bigint = known.key
    WHERE locks.locktype = 'advisory' AND locks.objsubid = 1
      AND locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND known.namespace = ns AND starts_with(known.name, beginning) ORDER BY 1
$$;

-- Terminate the sessions that hold a key. Every later token is greater. Returns how many were terminated.
CREATE OR REPLACE FUNCTION fencelock.terminate_holders(k bigint) RETURNS integer LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  dropped integer;
BEGIN
  SELECT count(*) INTO dropped FROM fencelock.sessions(k) AS holder
    WHERE holder.token IS NOT NULL AND pg_terminate_backend(holder.pid, 5000);
  PERFORM fencelock.mint();
  PERFORM fencelock.set_durability(true);
  RETURN dropped;
END $$;
