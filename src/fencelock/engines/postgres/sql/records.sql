-- Records: each step is one transaction, on disk before the server replies. Versions come from the sequence of the tokens:
-- they must not repeat either, even if the record was deleted.

CREATE OR REPLACE FUNCTION fencelock.read_record(
  ns text, k text, OUT content bytea, OUT its_token bigint, OUT its_version bigint, OUT left_over double precision
) RETURNS SETOF record LANGUAGE sql STABLE
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
  SELECT value, token, version, date_part('epoch', ends - clock_timestamp()) FROM fencelock.record
    WHERE namespace = ns AND key = k AND value IS NOT NULL AND ends > clock_timestamp()
$$;

-- Write if the token and the expected version allow it (`StoredRecord.allows` in core/records.py, restated).
-- Returns whether it was written, and the current record.
CREATE OR REPLACE FUNCTION fencelock.write_record(
  ns text, k text, given bytea, by_token bigint, ttl double precision, expected bigint,
  OUT done boolean, OUT content bytea, OUT its_token bigint, OUT its_version bigint, OUT left_over double precision
) LANGUAGE plpgsql
  SET search_path = pg_catalog, pg_temp SET lock_timeout = 0 AS $$
DECLARE
  at timestamptz := fencelock.lock_name(chr(1) || ns, k);  -- no namespace contains this character: it locks no lock's name
  old fencelock.record;
BEGIN
  SELECT * INTO old FROM fencelock.record WHERE namespace = ns AND key = k;
  IF old.ends IS NULL OR old.ends <= at THEN
    done := coalesce(expected, 0) = 0;
    old.value := NULL;
  ELSE
    done := by_token >= old.token
      AND (expected IS NULL OR expected = CASE WHEN old.value IS NULL THEN 0 ELSE old.version END);
  END IF;
  IF done THEN
    INSERT INTO fencelock.record (namespace, key, value, token, version, ends)
      VALUES (ns, k, given, by_token, fencelock.mint(), at + make_interval(secs => ttl))
      ON CONFLICT (namespace, key) DO UPDATE
        SET value = excluded.value, token = excluded.token, version = excluded.version, ends = excluded.ends
      RETURNING * INTO old;
    PERFORM fencelock.set_durability(true);
  END IF;
  IF old.value IS NOT NULL THEN
    content := old.value;
    its_token := old.token;
    its_version := old.version;
    left_over := date_part('epoch', old.ends - at);
  END IF;
END $$;
