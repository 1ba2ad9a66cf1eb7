-- Rate limits (core/rates.py: `decide`, restated): one row each, by the server's clock, in µs. Charges need not survive a crash
-- of the server, so the commit does not wait for the disk.

CREATE OR REPLACE FUNCTION fencelock.reserve(
  ns text, keys text[], costs bigint[], tolerances bigint[], max_wait bigint,
  OUT granted boolean, OUT wait bigint, OUT times bigint[]
) LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  now_us bigint;
BEGIN
  PERFORM fencelock.set_durability(false);
  INSERT INTO fencelock.rate (namespace, key, time) SELECT ns, k, 0 FROM unnest(keys) AS k ORDER BY k
    ON CONFLICT (namespace, key) DO NOTHING;
  -- In one order: two calls with the same limits never wait for each other.
  PERFORM FROM fencelock.rate WHERE namespace = ns AND key = ANY (keys) ORDER BY key FOR UPDATE;
  now_us := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
  SELECT array_agg(greatest(r.time, now_us) + u.cost ORDER BY u.place),
         greatest(0, max(greatest(r.time, now_us) + u.cost - u.tolerance - now_us))
    INTO times, wait
    FROM unnest(keys, costs, tolerances) WITH ORDINALITY AS u (key, cost, tolerance, place)
    JOIN fencelock.rate AS r ON r.namespace = ns AND r.key = u.key;
  granted := wait <= max_wait;
  IF granted THEN
    UPDATE fencelock.rate AS r SET time = u.time FROM unnest(keys, times) AS u (key, time)
      WHERE r.namespace = ns AND r.key = u.key;
    IF random() < 0.01 THEN
      DELETE FROM fencelock.rate WHERE (namespace, key) IN (
        SELECT namespace, key FROM fencelock.rate WHERE time < now_us - 3600000000 LIMIT 100 FOR UPDATE SKIP LOCKED);
    END IF;
  ELSE
    times := '{}';
  END IF;
END $$;

-- Give back what a reservation took from each limit that was not charged again since.
CREATE OR REPLACE FUNCTION fencelock.refund(ns text, keys text[], stored bigint[], costs bigint[]) RETURNS void
  LANGUAGE sql SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
  UPDATE fencelock.rate AS r SET time = r.time - u.cost FROM unnest(keys, stored, costs) AS u (key, stored, cost)
    WHERE r.namespace = ns AND r.key = u.key AND r.time = u.stored
$$;
