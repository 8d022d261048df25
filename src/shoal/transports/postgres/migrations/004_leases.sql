-- Leases mean here what shoal/coordinator/leases.py says they mean; one suite of tests holds both.
-- New: a lease is renewed while its worker is seen computing; `max_retries` counts all attempts at a unit; a round counts the results of its
-- version, whether or not the coordinator has consumed them; a worker that disappeared has tried in vain what it held.

CREATE INDEX units_held ON shoal.units (worker) WHERE state = 'claimed';
CREATE INDEX units_completed ON shoal.units (iteration) WHERE state = 'completed';
DROP INDEX shoal.contributions_iteration;  -- results are counted by their units now

-- A sign of life. While the worker computes or hands in, what it holds is its own for a whole lease from now on; a lease that has ended stays
-- ended. A unit that somebody else changes at this moment is passed by, so that a sign of life waits for nobody. Units come before workers, as
-- everywhere: two that lock in different orders would wait for each other.
CREATE OR REPLACE FUNCTION shoal.beat(p_secret uuid, p_state text, p_figures text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    caller bigint := (worker_of(p_secret)).id;
    until timestamptz := (SELECT clock_timestamp() + make_interval(secs => i.lease_timeout_s) FROM iterations i ORDER BY i.iteration DESC LIMIT 1);
    held bigint[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    IF octet_length(p_state) > 80 OR octet_length(p_figures) > 8192 THEN
        RAISE EXCEPTION 'a sign of life that is too long' USING ERRCODE = 'SH002';
    END IF;
    IF p_state IN ('computing', 'sending') THEN
        held := ARRAY(SELECT u.id FROM units u WHERE u.state = 'claimed' AND u.worker = caller AND u.deadline > clock_timestamp() FOR UPDATE SKIP LOCKED);
        UPDATE units SET deadline = until WHERE id = ANY (held);
    END IF;
    UPDATE workers SET state = p_state, figures = p_figures::jsonb, seen_at = now(), left_at = NULL WHERE secret = p_secret;
END $$;

-- A unit whose lease ended without a result, or whose result could not be used: pending again, at the end of the queue; or failed, where that
-- was the last attempt. An attempt of a worker that held the unit is counted with the worker, too.
CREATE OR REPLACE FUNCTION shoal.put_back(p_unit bigint, p_reason text, p_counts boolean) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    most integer := (SELECT i.max_retries FROM iterations i ORDER BY i.iteration DESC LIMIT 1);
    holder bigint := (SELECT x.worker FROM units x WHERE x.id = p_unit AND x.state = 'claimed');
    u units;
BEGIN
    UPDATE units SET attempts = attempts + p_counts::integer, state = CASE WHEN p_counts AND attempts + 1 >= most THEN 'failed' ELSE 'pending' END,
        place = nextval('places'), lease = NULL, worker = NULL, deadline = NULL, reason = p_reason
        WHERE id = p_unit RETURNING * INTO u;
    IF p_counts THEN
        UPDATE workers SET failed = failed + 1 WHERE id = holder;
    END IF;
    IF u.state = 'failed' THEN
        INSERT INTO contributions (kind, unit, iteration, epoch, start, batches, reason)
            VALUES ('failed', u.id, u.iteration, u.epoch, u.start, u.batches, p_reason);
        PERFORM pg_notify('shoal_inbox', '');
    ELSE
        PERFORM pg_notify('shoal_work', '');
    END IF;
END $$;

-- All that a worker holds. Every unit is locked before the first is put back, since that changes the worker's row and units come before workers;
-- and in the order of their ids, as whoever locks several units does.
DROP FUNCTION shoal.give_back_all(bigint);
CREATE FUNCTION shoal.put_back_all(p_worker bigint, p_reason text, p_counts boolean) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    held bigint[] := ARRAY(SELECT h.id FROM (
        SELECT u.id, u.place FROM units u WHERE u.state = 'claimed' AND u.worker = p_worker ORDER BY u.id FOR UPDATE) h ORDER BY h.place);
BEGIN
    FOR n IN 1 .. cardinality(held) LOOP
        PERFORM put_back(held[n], p_reason, p_counts);
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION shoal.leave(p_secret uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
BEGIN
    PERFORM put_back_all((worker_of(p_secret)).id, NULL, false);
    UPDATE workers SET left_at = now(), seen_at = now(), state = 'left' WHERE secret = p_secret;
END $$;

-- Take part. A name whose owner left or fell silent is taken over; one that is in use gets a number behind it. An owner that fell silent has
-- tried in vain what it held: a unit may be what kills workers.
CREATE OR REPLACE FUNCTION shoal.enter(p_secret uuid, p_name text, p_about text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    tried text := coalesce(p_name, 'worker-1');
    counter integer := 1;
    holder record;
BEGIN
    IF tried !~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$' OR octet_length(p_about) > 8192 THEN
        RAISE EXCEPTION 'a name has 1 to 64 letters, digits, dots, dashes and underscores, and what is told about a worker is short' USING ERRCODE = 'SH002';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('shoal.enter'));
    UPDATE workers SET left_at = NULL, seen_at = now() WHERE secret = p_secret RETURNING name INTO holder;
    IF FOUND THEN
        RETURN holder.name;
    END IF;
    LOOP
        SELECT l.id, l.alive INTO holder FROM worker_list l WHERE l.name = tried;
        EXIT WHEN NOT FOUND OR NOT holder.alive;
        counter := counter + 1;
        tried := CASE WHEN p_name IS NULL THEN 'worker-' ELSE left(p_name, 58) || '-' END || counter;
    END LOOP;
    IF holder.id IS NULL THEN
        IF (SELECT count(*) FROM workers) >= 10000 THEN
            RAISE EXCEPTION 'there are 10000 workers already' USING ERRCODE = 'SH002';
        END IF;
        INSERT INTO workers (name, secret, about) VALUES (tried, p_secret, p_about::jsonb);
    ELSE
        PERFORM put_back_all(holder.id, 'its worker is gone', true);
        UPDATE workers SET secret = p_secret, about = p_about::jsonb, state = 'joined', figures = '{}', joined_at = now(), seen_at = now(),
            left_at = NULL, last_unit = NULL, last_lease = NULL, last_outcome = NULL WHERE id = holder.id;
    END IF;
    RETURN tried;
END $$;

-- Leases that ended, whoever held them. One at a time does this, so that none waits for another.
CREATE OR REPLACE FUNCTION shoal.reclaim() RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp SET enable_seqscan = off AS $$
DECLARE
    expired bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('shoal.reclaim')) THEN
        RETURN;
    END IF;
    FOR expired IN SELECT u.id FROM units u WHERE u.state = 'claimed' AND u.deadline <= clock_timestamp()
        ORDER BY u.deadline, u.place LIMIT 100 FOR UPDATE SKIP LOCKED LOOP
        PERFORM put_back(expired, 'no result in time', true);
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION shoal.fail(p_secret uuid, p_unit bigint, p_lease uuid, p_reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
BEGIN
    PERFORM worker_of(p_secret);
    PERFORM FROM units u WHERE u.id = p_unit AND u.state = 'claimed' AND u.lease = p_lease FOR UPDATE;
    IF FOUND THEN
        PERFORM put_back(p_unit, left(p_reason, 500), true);
    END IF;
END $$;

-- Whether an iteration has as many results as a round is made of.
CREATE OR REPLACE FUNCTION shoal.enough(p_present shoal.iterations) RETURNS boolean
LANGUAGE sql STABLE SET search_path = shoal, pg_temp SET enable_seqscan = off AS $$
    SELECT p_present.quorum IS NOT NULL AND p_present.quorum <= (SELECT count(*) FROM (
        SELECT FROM units u WHERE u.iteration = p_present.iteration AND u.state = 'completed' LIMIT p_present.quorum) there)
$$;
