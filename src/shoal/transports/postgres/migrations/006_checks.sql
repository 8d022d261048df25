-- Checksums over what survives the coordinator, so that damage is told by name; why a student left; and the watchdog's times.

-- --- damage ----------------------------------------------------------------------------------------------------

-- The checksum of a record covers all of its bytes and its frames; `before` is that of the record before it, in this journal or the one before.
-- A line of the ledger knows the newest record of its moment, so that records which are missing at the end are missed. Null: of an earlier version.
ALTER TABLE shoal.records ADD COLUMN checksum bigint, ADD COLUMN before bigint;
ALTER TABLE shoal.ledger ADD COLUMN checksum bigint, ADD COLUMN record bigint;
ALTER TABLE shoal.snapshots ADD COLUMN checksum bigint;

-- --- leaving ---------------------------------------------------------------------------------------------------

-- Give back all leases and leave. A worker that cannot go on has said why with its last sign of life: that stays, and people are told.
CREATE OR REPLACE FUNCTION shoal.leave(p_secret uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    caller workers := worker_of(p_secret);
BEGIN
    PERFORM put_back_all(caller.id, NULL, false);
    IF caller.state LIKE 'left: %' AND caller.left_at IS NULL THEN
        PERFORM say(caller.name || ' ' || caller.state);
    END IF;
    UPDATE workers SET left_at = now(), seen_at = now(), state = CASE WHEN state LIKE 'left: %' THEN state ELSE 'left' END WHERE secret = p_secret;
END $$;

-- --- the watchdog ----------------------------------------------------------------------------------------------

DROP FUNCTION shoal.watch(integer[]);

-- Ends what a student may not do: leave a transaction open, keep the server busy, hold others up, take too much memory (`p_greedy`). Whoever
-- does it a fifth time is shut out. The times are in seconds.
CREATE FUNCTION shoal.watch(
    p_greedy integer[] DEFAULT '{}', p_blocking double precision DEFAULT 5, p_idle double precision DEFAULT 30,
    p_busy double precision DEFAULT 60, p_open double precision DEFAULT 1800
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    found_one record;
    times integer;
BEGIN
    DELETE FROM uploads u WHERE NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = u.pid);
    FOR found_one IN
        WITH backends AS (
            SELECT a.*, r.kind FROM pg_stat_activity a JOIN roles r ON r.name = a.usename AND r.kind IN ('student', 'class', 'reader')
                WHERE a.datname = current_database()
        ), blocking AS (
            SELECT DISTINCT unnest(pg_blocking_pids(w.pid)) AS pid FROM pg_stat_activity w
                WHERE w.datname = current_database() AND w.wait_event_type = 'Lock'
                    AND w.query_start < clock_timestamp() - make_interval(secs => p_blocking)
        )
        SELECT b.pid, b.usename::text AS role, b.kind, CASE
            WHEN b.pid = ANY (p_greedy) THEN 'it took more memory than a student may'
            WHEN b.pid IN (SELECT k.pid FROM blocking k) AND b.wait_event_type IS DISTINCT FROM 'Lock' THEN 'it held up others'
            WHEN b.state LIKE 'idle in transaction%' AND b.state_change < clock_timestamp() - make_interval(secs => p_idle)
                THEN format('it left a transaction open for %s s', p_idle)
            WHEN b.state = 'active' AND b.wait_event_type IS DISTINCT FROM 'Client' AND b.wait_event_type IS DISTINCT FROM 'Lock'
                AND b.query_start < clock_timestamp() - make_interval(secs => p_busy) THEN format('it kept the server busy for %s s', p_busy)
            WHEN b.xact_start < clock_timestamp() - make_interval(secs => p_open) THEN format('a transaction took %s s', p_open) END AS why
        FROM backends b
    LOOP
        CONTINUE WHEN found_one.why IS NULL;
        PERFORM pg_terminate_backend(found_one.pid), say(format('warning: a connection of %s was ended: %s', found_one.role, found_one.why));
        CONTINUE WHEN found_one.kind <> 'student';
        INSERT INTO standings AS t (role, ended) VALUES (found_one.role, 1) ON CONFLICT (role) DO UPDATE SET ended = t.ended + 1 RETURNING t.ended INTO times;
        IF times >= 5 THEN
            PERFORM quarantine(found_one.role, format('%s of its connections had to be ended, the last because %s', times, found_one.why));
            EXECUTE format('ALTER ROLE %I NOLOGIN', found_one.role);
            PERFORM pg_terminate_backend(a.pid) FROM pg_stat_activity a WHERE a.usename = found_one.role;
        END IF;
    END LOOP;
END $$;
