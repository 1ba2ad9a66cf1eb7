-- The functions of the advisory engine. A session has one lock at most; idle_session_timeout, set to the ttl, ends the session of
-- a client that stops renewing.

-- All advisory locks of this database with a 64-bit key.
CREATE OR REPLACE FUNCTION fencelock.advisory_locks(
  OUT pid integer, OUT key bigint, OUT mode text, OUT granted boolean, OUT waitstart timestamptz
) RETURNS SETOF record LANGUAGE sql VOLATILE
  SET search_path = pg_catalog, pg_temp AS $$
  SELECT pid, (classid::bigint << 32) | objid::bigint, mode, granted, waitstart FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
$$;

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

-- Wait for the lock; from now on the session ends when it is idle for the ttl. The COMMIT keeps that setting if the wait is
-- cancelled: a lock that the server grants at the same moment outlives the statement.
-- Assignments instead of PERFORM: an expression costs a tenth of a query.
CREATE OR REPLACE PROCEDURE fencelock.lock_wait(k bigint, ttl text, is_shared boolean, INOUT token bigint)
LANGUAGE plpgsql AS $$
DECLARE
  ignored text;
BEGIN
  ignored := set_config('idle_session_timeout', ttl, false);
  ignored := set_config('application_name', 'fencelock - ' || ttl, false);
  COMMIT;
  ignored := CASE WHEN is_shared THEN pg_advisory_lock_shared(k)::text ELSE pg_advisory_lock(k)::text END;
  token := nextval('fencelock.token');
  IF token < date_part('epoch', clock_timestamp()) * 1000000 - 1000000 THEN
    token := fencelock.mint();
  END IF;
  ignored := set_config('application_name', 'fencelock ' || token || ' ' || ttl, false);
END $$;

-- Register the session's owner and value, and check that no other name has this key; a session runs it before its first lock, and
-- again when one of the three changes.
CREATE OR REPLACE FUNCTION fencelock.register_session(k bigint, ns text, nm text, its_owner text, its_value bytea) RETURNS void
  LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  known fencelock.name;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  INSERT INTO fencelock.session (pid, owner, value) VALUES (pg_backend_pid(), its_owner, its_value)
    ON CONFLICT (pid) DO UPDATE SET owner = excluded.owner, value = excluded.value
      WHERE (session.owner, session.value) <> (excluded.owner, excluded.value);
  INSERT INTO fencelock.name (key, namespace, name) VALUES (k, ns, nm)
    ON CONFLICT (key) DO UPDATE SET seen = current_date WHERE name.seen < current_date;
  SELECT * INTO known FROM fencelock.name WHERE key = k;
  IF known.name <> nm OR known.namespace <> ns THEN
    RAISE EXCEPTION 'its key % is that of % in the namespace %', k, quote_literal(known.name), quote_literal(known.namespace)
      USING ERRCODE = 'FL003';
  END IF;
END $$;

-- Turn this session's exclusive lock into a shared one; the server then grants the lock to the readers directly behind it. The
-- session gets the shared lock at once, before all waiters, as it still excludes them. Repeating it changes nothing more.
-- Returns whether this session has the lock.
CREATE OR REPLACE FUNCTION fencelock.downgrade_session(k bigint) RETURNS boolean LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  modes text[] := ARRAY(SELECT mode FROM fencelock.advisory_locks() WHERE key = k AND pid = pg_backend_pid() AND granted);
BEGIN
  IF 'ExclusiveLock' = ANY (modes) THEN
    PERFORM pg_advisory_lock_shared(k);
    PERFORM pg_advisory_unlock(k);
  END IF;
  RETURN modes <> '{}';
END $$;

-- The holders and waiters of a key, in order: from pg_locks, and from the application_name that the sessions set.
CREATE OR REPLACE FUNCTION fencelock.sessions(
  k bigint,
  OUT pid integer, OUT owner text, OUT token bigint, OUT expires_in double precision, OUT shared boolean, OUT value text
) RETURNS SETOF record LANGUAGE sql VOLATILE
  SET search_path = pg_catalog, pg_temp AS $$
  SELECT locks.pid, coalesce(session.owner, ''),
      CASE WHEN locks.granted THEN coalesce(substring(activity.application_name from '^fencelock (\d+) '), '0')::bigint END,
      greatest(0, substring(activity.application_name from '^fencelock \S+ (\d+)ms$')::double precision / 1000
        - CASE WHEN activity.state = 'idle' AND locks.granted
            THEN date_part('epoch', clock_timestamp() - activity.state_change) ELSE 0 END),
      locks.mode = 'ShareLock', coalesce(encode(session.value, 'hex'), '')
    FROM fencelock.advisory_locks() locks
      JOIN pg_stat_activity activity ON activity.pid = locks.pid
      LEFT JOIN fencelock.session session ON session.pid = locks.pid
    WHERE locks.key = k
    ORDER BY locks.granted DESC, locks.waitstart, 3, locks.pid
$$;

CREATE OR REPLACE FUNCTION fencelock.locked_names(ns text, beginning text) RETURNS SETOF text LANGUAGE sql VOLATILE
  SET search_path = pg_catalog, pg_temp AS $$
  SELECT DISTINCT known.name FROM fencelock.name known JOIN fencelock.advisory_locks() locks ON locks.key = known.key
    WHERE known.namespace = ns AND starts_with(known.name, beginning) ORDER BY 1
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
