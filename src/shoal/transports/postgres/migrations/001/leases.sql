-- Units of work on lease: join, claim, submit, return, fail, leave. `shoal/coordinator/units/leases.py` defines the same rules for a
-- coordinator that leases units itself; one conformance suite tests both.
--
-- Locks: rows of units are locked before rows of workers, and several units in the order of their ids, so that no two transactions wait for
-- each other.

-- --- reading the run ----------------------------------------------------------------------------------------

-- The run's description, in rows like those of `read_reply`.
CREATE FUNCTION shoal.read_run() RETURNS TABLE (frame integer, n integer, header bytea, sizes bigint[], data bytea)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    SELECT 0, 0, r.header, ARRAY(SELECT b.bytes FROM unnest(r.frames) WITH ORDINALITY f (id, position) JOIN blobs b USING (id) ORDER BY position),
        NULL::bytea FROM run r
    UNION ALL SELECT f.position::integer, p.n, NULL, NULL, p.data
        FROM run r, unnest(r.frames) WITH ORDINALITY f (id, position) JOIN parts p ON p.blob = f.id
$$;

CREATE FUNCTION shoal.read_piece(p_number integer) RETURNS bytea LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS
    'SELECT data FROM pieces WHERE number = p_number';

-- The difference from the caller's version if there is one, else the newest weights in full if they are newer. Rows like those of `read_reply`, with
-- version and kind.
CREATE FUNCTION shoal.read_weights(p_have bigint)
RETURNS TABLE (frame integer, n integer, header bytea, sizes bigint[], data bytea, version bigint, kind text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    WITH best AS (
        SELECT w.version, w.kind, w.header, w.frames FROM weights w
        WHERE w.version > p_have AND (w.kind = 'full' OR w.base = p_have) ORDER BY w.kind = 'difference' DESC, w.version DESC LIMIT 1
    )
    SELECT 0, 0, header, published_sizes(frames), NULL::bytea, version, kind FROM best
    UNION ALL SELECT f.position::integer, p.n, NULL, NULL, p.data, NULL, NULL
        FROM best, unnest(frames) WITH ORDINALITY f (id, position) JOIN published_parts p ON p.frame = f.id
$$;

-- --- workers ------------------------------------------------------------------------------------------------

-- The worker with this secret. The row is not locked.
CREATE FUNCTION shoal.worker_with_secret(p_secret uuid) RETURNS shoal.workers
LANGUAGE plpgsql STABLE SET search_path = shoal, pg_temp AS $$
DECLARE
    found_one workers;
BEGIN
    SELECT * INTO found_one FROM workers w WHERE w.secret = p_secret;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this worker is not known here: it has not joined, or another worker has its name now' USING ERRCODE = 'SH001';
    END IF;
    RETURN found_one;
END $$;

-- Whether a text may be a worker's name: the rule of `protocol/worker_names.py`, without what needs Unicode's tables. No control characters, no
-- spaces but the plain one, nothing that changes the direction of text, no private characters.
CREATE FUNCTION shoal.is_worker_name(p_name text) RETURNS boolean LANGUAGE sql IMMUTABLE SET search_path = shoal, pg_temp AS $$
    SELECT octet_length(p_name) BETWEEN 1 AND 64 AND p_name !~ '[ .]$' AND p_name !~ '  '
        AND p_name ~ '^[A-Za-z0-9\u00AA-\uFFDC\U00010000-\U0003FFFF][A-Za-z0-9 ._''()+\u00AA-\uFFDC\U00010000-\U0003FFFF-]*$'
        AND p_name !~ '[\u00AB-\u00B4\u0600-\u0605\u061C\u06DD\u070F\u0890-\u0891\u08E2\u1680\u180B-\u180F\u2000-\u2018\u201A-\u206F\u2190-\u2BFF\u3000-\u3004\u3008-\u3020\u3164\uD800-\uF8FF\uFE00-\uFE0F\uFEFF\uFFA0\U000110BD\U000110CD\U00013430-\U0001343F\U0001BCA0-\U0001BCA3\U0001D173-\U0001D17A]'
$$;

-- Join the run; returns the worker's name. A name belongs to the role that brought it: if its worker left or fell silent, the same role takes it
-- over, and a name in use gets a number behind it. A worker that fell silent has failed what it held, since a unit may be what kills workers.
CREATE FUNCTION shoal.join_run(p_secret uuid, p_name text, p_about text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    tried text := coalesce(p_name, 'worker-1');
    counter integer := 1;
    holder record;
BEGIN
    IF NOT is_worker_name(tried) OR octet_length(p_about) > 8192 THEN
        RAISE EXCEPTION 'a name has letters and digits, spaces and . _ - '' ( ) +, 64 bytes at most, and what is told about a worker is short' USING ERRCODE = 'SH002';
    END IF;
    PERFORM count_use(octet_length(p_about)), refuse_quarantined(), pg_advisory_xact_lock(hashtext('shoal.enter'));
    UPDATE workers SET left_at = NULL, seen_at = now() WHERE secret = p_secret RETURNING name INTO holder;
    IF FOUND THEN
        RETURN holder.name;
    END IF;
    LOOP
        SELECT l.id, l.alive, w.role INTO holder FROM worker_list l JOIN workers w USING (id) WHERE l.name = tried;
        EXIT WHEN NOT FOUND OR (NOT holder.alive AND holder.role = session_user);
        counter := counter + 1;
        tried := coalesce(p_name, 'worker');
        WHILE octet_length(tried) > 58 LOOP
            tried := left(tried, -1);
        END LOOP;
        tried := tried || '-' || counter;
    END LOOP;
    IF holder.id IS NULL THEN
        IF (SELECT count(*) FROM workers) >= 10000 OR (is_student() AND (SELECT count(*) FROM workers w WHERE w.role = session_user) >= 16) THEN
            RAISE EXCEPTION 'there are too many workers already, of this student or in all' USING ERRCODE = 'SH002';
        END IF;
        INSERT INTO workers (name, secret, about) VALUES (tried, p_secret, p_about::jsonb);
    ELSE
        PERFORM requeue_units_of(holder.id, 'its worker is gone', true);
        UPDATE workers SET secret = p_secret, about = p_about::jsonb, state = 'joined', figures = '{}', joined_at = now(), seen_at = now(),
            left_at = NULL, last_unit = NULL, last_lease = NULL, last_outcome = NULL WHERE id = holder.id;
    END IF;
    RETURN tried;
END $$;

-- A heartbeat. While the worker computes or sends, its leases are renewed for a whole timeout; a lease that has expired stays expired. A unit
-- that another transaction is changing is skipped, so a heartbeat never waits.
CREATE FUNCTION shoal.heartbeat(p_secret uuid, p_state text, p_figures text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    caller workers := worker_with_secret(p_secret);
    present iterations;
    right_now timestamptz := lease_now();
    held bigint[];
    longest double precision;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true), count_use(octet_length(p_figures));
    IF p_state !~ '^[ -~]{0,80}$' OR octet_length(p_figures) > 8192 THEN  -- people see it: nothing in it may steer a terminal
        RAISE EXCEPTION 'a sign of life that is too long, or not plain text' USING ERRCODE = 'SH002';
    END IF;
    SELECT * INTO present FROM current_iteration;
    IF p_state IN ('computing', 'sending') THEN
        held := ARRAY(SELECT u.id FROM units u WHERE u.state = 'claimed' AND u.worker = caller.id AND u.deadline > right_now FOR UPDATE SKIP LOCKED);
        UPDATE units SET deadline = right_now + make_interval(secs => present.lease_timeout_s) WHERE id = ANY (held);
        longest := (SELECT extract(epoch FROM right_now - min(u.claimed_at)) FROM units u WHERE u.id = ANY (held));
        IF longest > present.lease_timeout_s THEN
            PERFORM note_slow_worker(caller.role, caller.name, longest, present.lease_timeout_s);
        END IF;
    END IF;
    UPDATE workers SET state = p_state, figures = p_figures::jsonb, seen_at = now(), left_at = NULL WHERE secret = p_secret;
END $$;

-- Return all leases and leave. A worker that cannot go on, or leaves for a while, has given the reason in its last heartbeat: it is kept, and
-- the owner gets a note.
CREATE FUNCTION shoal.leave_run(p_secret uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    caller workers := worker_with_secret(p_secret);
BEGIN
    PERFORM count_use(), requeue_units_of(caller.id, NULL, false);
    IF caller.state ~ '^(left|paused): ' AND caller.left_at IS NULL THEN
        PERFORM add_note(caller.name || CASE WHEN caller.state LIKE 'paused: %' THEN ' is ' ELSE ' ' END || caller.state);
    END IF;
    UPDATE workers SET left_at = now(), seen_at = now(), state = CASE WHEN state ~ '^(left|paused): ' THEN state ELSE 'left' END WHERE secret = p_secret;
END $$;

-- --- rounds -------------------------------------------------------------------------------------------------

-- Whether the round has as many results as it needs, of whatever iteration they are. What was used for an older round is deleted.
CREATE FUNCTION shoal.has_quorum(p_present shoal.iterations) RETURNS boolean
LANGUAGE sql STABLE SET search_path = shoal, pg_temp SET enable_seqscan = off AS $$
    SELECT p_present.quorum IS NOT NULL AND p_present.quorum <= (SELECT count(*) FROM (
        SELECT FROM units u WHERE u.state = 'completed' LIMIT p_present.quorum) there)
$$;

-- Whether a worker that has delivered a result for the open round should wait for the next version: the rest that the round needs is expected within a
-- quarter of its time for a unit, or within that time where no lag is allowed. A result is expected after its worker's usual time; one that is overdue
-- is not counted. For units of less than 0.2 s, waiting would cost more than it saves.
CREATE FUNCTION shoal.version_is_near(p_present shoal.iterations, p_worker shoal.workers) RETURNS boolean
LANGUAGE sql SET search_path = shoal, pg_temp SET enable_seqscan = off AS $$
    SELECT p_present.quorum IS NOT NULL AND coalesce(p_worker.unit_s, 0) >= 0.2
        AND EXISTS (SELECT FROM units u WHERE u.id = p_worker.last_unit AND u.state = 'completed')
        AND p_present.quorum <= (SELECT count(*) FROM units u WHERE u.state = 'completed')
        + (SELECT count(*) FROM units u JOIN workers w ON w.id = u.worker WHERE u.state = 'claimed'
            AND (SELECT lease_now()) < u.claimed_at + make_interval(secs => 0.05 + 1.5 * w.unit_s)
            AND u.claimed_at + make_interval(secs => w.unit_s)
                < (SELECT lease_now()) + make_interval(secs => p_worker.unit_s * CASE p_present.max_lag WHEN 0 THEN 1.0 ELSE 0.25 END))
$$;

-- --- claiming -----------------------------------------------------------------------------------------------

-- Claim up to `p_count` units. `p_after`: the queue position from which to look; `p_reclaim`: first requeue expired leases; `p_again`: this lease may have been
-- claimed already, over a connection that was lost. If there is no unit, one row with only `due_s`: the seconds until it is worth asking again.
-- A student holds eight units at most.
CREATE FUNCTION shoal.claim(p_secret uuid, p_lease uuid, p_count integer, p_after bigint, p_reclaim boolean, p_again boolean)
RETURNS TABLE (id bigint, iteration bigint, epoch bigint, start bigint, batches bigint, attempts integer, queue_position bigint, due_s double precision)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
    caller workers := worker_with_secret(p_secret);
    present iterations;
    right_now timestamptz := lease_now();
    paused timestamptz := (SELECT s.paused_until FROM standings s WHERE s.role = session_user AND s.paused_until > right_now);
    allowed integer := least(p_count, 1000);
    ids bigint[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true), count_use(), refuse_quarantined();
    IF p_reclaim THEN
        PERFORM requeue_expired();
    END IF;
    SELECT * INTO present FROM current_iteration;
    IF p_again THEN
        RETURN QUERY SELECT u.id, u.iteration, u.epoch, u.start, u.batches, u.attempts, u.queue_position, NULL::double precision
            FROM units u WHERE u.state = 'claimed' AND u.lease = p_lease;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    IF is_student() THEN
        allowed := least(allowed, 8 - (SELECT count(*) FROM units u JOIN workers w ON w.id = u.worker WHERE u.state = 'claimed' AND w.role = session_user));
    END IF;
    -- With enough results for the coordinator to make a version of, or if that is near, units wait for that version: its weights are newer.
    IF paused IS NULL AND allowed > 0 AND NOT has_quorum(present) AND NOT version_is_near(present, caller) THEN
        FOR look IN 1 .. 2 LOOP
            ids := ARRAY(SELECT u.id FROM units u WHERE u.state = 'pending' AND u.queue_position >= greatest(p_after, present.first_position)
                AND (u.attempts = 0 OR may_retry(u.epoch, u.start, present.lease_timeout_s))
                ORDER BY u.queue_position LIMIT allowed FOR UPDATE SKIP LOCKED);
            EXIT WHEN cardinality(ids) > 0;
            p_after := 0;
            PERFORM requeue_expired(), requeue_held_too_long(present);
        END LOOP;
    END IF;
    IF cardinality(ids) > 0 THEN
        RETURN QUERY UPDATE units u SET state = 'claimed', iteration = greatest(u.iteration, present.iteration), lease = p_lease,
            worker = caller.id, claimed_at = right_now, deadline = right_now + make_interval(secs => present.lease_timeout_s)
            WHERE u.id = ANY (ids) RETURNING u.id, u.iteration, u.epoch, u.start, u.batches, u.attempts, u.queue_position, NULL::double precision;
    ELSE
        RETURN QUERY SELECT NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::integer, NULL::bigint,
            extract(epoch FROM least(min(u.deadline), min(u.claimed_at + make_interval(secs => 0.06 + 1.5 * w.unit_s)) FILTER (WHERE
                present.quorum IS NOT NULL AND right_now < u.claimed_at + make_interval(secs => 0.05 + 1.5 * w.unit_s)), paused)
                - right_now)::double precision
            FROM units u LEFT JOIN workers w ON w.id = u.worker WHERE u.state = 'claimed';
    END IF;
END $$;

-- Requeue units whose lease expired. One transaction at a time does it, so that none waits for another.
CREATE FUNCTION shoal.requeue_expired() RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp SET enable_seqscan = off AS $$
DECLARE
    right_now timestamptz := lease_now();
    expired bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('shoal.reclaim')) THEN
        RETURN;
    END IF;
    FOR expired IN SELECT u.id FROM units u WHERE u.state = 'claimed' AND u.deadline <= right_now
        ORDER BY u.deadline, u.queue_position LIMIT 100 FOR UPDATE SKIP LOCKED LOOP
        PERFORM requeue_unit(expired, 'no result in time', true);
    END LOOP;
END $$;

-- Requeue a unit that a worker of another role has held for longer than the timeout and four times as long as usual, while the caller has nothing to
-- do. Usual is the median: a single very slow worker moves a mean.
CREATE FUNCTION shoal.requeue_held_too_long(p_present shoal.iterations) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    longest double precision := greatest(p_present.lease_timeout_s,
        4 * coalesce((SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY w.unit_s) FROM workers w WHERE w.unit_s IS NOT NULL), 0));
    overdue record;
BEGIN
    SELECT u.id, w.name, extract(epoch FROM lease_now() - u.claimed_at)::integer AS held_s INTO overdue FROM units u JOIN workers w ON w.id = u.worker
        WHERE u.state = 'claimed' AND w.role <> session_user AND u.claimed_at < lease_now() - make_interval(secs => longest)
        ORDER BY u.claimed_at LIMIT 1;
    PERFORM FROM units u WHERE u.id = overdue.id AND u.state = 'claimed' FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        PERFORM requeue_unit(overdue.id, 'it was held for longer than others need, while they had nothing to do', true);
        PERFORM add_note(format('warning: %s has held a unit for %s s, longer than others need, and another student has nothing to do: the unit is taken '
            'away from %s. Smaller units (batches_per_unit) suit slow students', overdue.name, overdue.held_s, overdue.name));
    END IF;
END $$;

-- --- results ------------------------------------------------------------------------------------------------

-- Whether a lease is valid, so that a result would be accepted.
CREATE FUNCTION shoal.is_lease_valid(p_unit bigint, p_lease uuid) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    SELECT EXISTS (SELECT FROM units u WHERE u.id = p_unit AND u.state = 'claimed' AND u.lease = p_lease AND u.deadline > lease_now())
        AND NOT coalesce((SELECT i.max_lag = 0 AND has_quorum(i) FROM iterations i ORDER BY i.iteration DESC LIMIT 1), false)
$$;

-- Submit a unit's result: `accepted` while its lease is valid, else dropped and counted as `late` or `cancelled`, all in the transaction that
-- uploaded it. A result that comes when the round has enough counts for the next one. Where no lag is allowed it is late, and its unit is
-- computed again on the new weights.
CREATE FUNCTION shoal.submit(p_secret uuid, p_unit bigint, p_lease uuid, p_iteration bigint, p_header bytea, p_blobs uuid[], p_sizes bigint[], p_drop boolean)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    caller workers := worker_with_secret(p_secret);
    u units;
    outcome text;
    present iterations;
    most bigint := (SELECT c.max_header_bytes FROM coordinator c);
    took double precision;
    right_now timestamptz;
BEGIN
    PERFORM set_config('idle_in_transaction_session_timeout', '10s', true), count_use(octet_length(p_header)), refuse_quarantined();
    IF octet_length(p_header) > most THEN
        RAISE EXCEPTION 'a header of % bytes; at most % are allowed', octet_length(p_header), most USING ERRCODE = 'SH002';
    END IF;
    IF EXISTS (SELECT FROM iterations i WHERE i.quorum IS NOT NULL AND i.max_lag = 0) THEN
        PERFORM pg_advisory_xact_lock(hashtext('shoal.submit'));  -- of two that come at once, the second sees whether the first was enough
    END IF;
    right_now := lease_now();  -- after the wait for the lock
    SELECT * INTO present FROM current_iteration;
    IF caller.last_unit = p_unit AND caller.last_lease = p_lease THEN
        outcome := caller.last_outcome;
    ELSIF NOT p_drop AND (present.max_lag > 0 OR NOT has_quorum(present)) THEN
        UPDATE units SET state = 'completed', deadline = NULL
            WHERE id = p_unit AND state = 'claimed' AND lease = p_lease AND deadline > right_now RETURNING * INTO u;
        IF FOUND THEN
            PERFORM attach_frames(p_blobs, p_sizes);
            INSERT INTO contributions (kind, worker, unit, iteration, epoch, start, batches, header, frames)
                VALUES ('delivered', caller.name, u.id, u.iteration, u.epoch, u.start, u.batches, p_header, p_blobs);
            took := extract(epoch FROM right_now - u.claimed_at);
            UPDATE workers SET completed = completed + 1, seen_at = now(), last_unit = p_unit, last_lease = p_lease, last_outcome = 'accepted',
                unit_s = coalesce(0.7 * unit_s, 0.7 * took) + 0.3 * took WHERE secret = p_secret;
            PERFORM pg_notify('shoal_inbox', '');
            RETURN 'accepted';
        END IF;
    END IF;
    PERFORM discard_upload(p_blobs);
    IF outcome IS NULL THEN
        SELECT * INTO u FROM units WHERE id = p_unit FOR UPDATE;
        IF u.state = 'claimed' AND u.lease = p_lease AND u.deadline <= right_now THEN
            PERFORM requeue_unit(p_unit, 'no result in time', true);
        ELSIF u.state = 'claimed' AND u.lease = p_lease THEN
            PERFORM requeue_unit(p_unit, NULL, false);
        END IF;
        outcome := CASE WHEN u.state = 'cancelled' OR p_iteration < present.oldest THEN 'cancelled' ELSE 'late' END;
        UPDATE workers SET late = late + (outcome = 'late')::integer, cancelled = cancelled + (outcome = 'cancelled')::integer, seen_at = now(),
            last_unit = p_unit, last_lease = p_lease, last_outcome = outcome WHERE secret = p_secret;
    END IF;
    RETURN outcome;
END $$;

CREATE FUNCTION shoal.return_unit(p_secret uuid, p_unit bigint, p_lease uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
BEGIN
    PERFORM count_use(), worker_with_secret(p_secret);
    PERFORM FROM units u WHERE u.id = p_unit AND u.state = 'claimed' AND u.lease = p_lease FOR UPDATE;
    IF FOUND THEN
        PERFORM requeue_unit(p_unit, NULL, false);
    END IF;
END $$;

CREATE FUNCTION shoal.fail_unit(p_secret uuid, p_unit bigint, p_lease uuid, p_reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
BEGIN
    PERFORM count_use(), worker_with_secret(p_secret);
    PERFORM FROM units u WHERE u.id = p_unit AND u.state = 'claimed' AND u.lease = p_lease FOR UPDATE;
    IF FOUND THEN
        PERFORM requeue_unit(p_unit, left(p_reason, 500), true);
    END IF;
END $$;

-- --- units that are tried again -----------------------------------------------------------------------------

-- End a unit's lease, or undo a result that could not be used: pending again at the end of the queue, or failed if no attempt is left. `p_counts`:
-- this was an attempt, which counts for the worker and its role.
CREATE FUNCTION shoal.requeue_unit(p_unit bigint, p_reason text, p_counts boolean) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    present iterations;
    before units;
    responsible text;
    u units;
BEGIN
    SELECT * INTO present FROM current_iteration;
    SELECT * INTO before FROM units x WHERE x.id = p_unit FOR UPDATE;
    IF p_counts THEN
        UPDATE workers SET failed = failed + (before.state = 'claimed')::integer WHERE id = before.worker RETURNING role INTO responsible;
        IF responsible IS NOT NULL THEN
            PERFORM count_failure(responsible, before.epoch, before.start, p_reason);
        END IF;
    END IF;
    UPDATE units SET attempts = attempts + p_counts::integer,
        iteration = greatest(iteration, present.iteration),
        state = CASE WHEN p_counts AND is_out_of_attempts(epoch, start, attempts + 1, present) THEN 'failed' ELSE 'pending' END,
        queue_position = nextval('unit_queue'), lease = NULL, worker = NULL, deadline = NULL, claimed_at = NULL, reason = p_reason
        WHERE id = p_unit RETURNING * INTO u;
    IF u.state = 'failed' THEN
        DELETE FROM failures f WHERE f.epoch = u.epoch AND f.start = u.start;
        INSERT INTO contributions (kind, unit, iteration, epoch, start, batches, reason)
            VALUES ('failed', u.id, u.iteration, u.epoch, u.start, u.batches, p_reason);
        PERFORM pg_notify('shoal_inbox', '');
        RETURN;
    END IF;
    PERFORM pg_notify('shoal_work', '');
    IF p_counts AND u.attempts >= present.max_retries AND NOT EXISTS (SELECT FROM active_roles a WHERE a.reliable) THEN
        PERFORM add_note_each_minute('waiting', format('warning: a unit failed %s times, and no student here has completed one yet: %s. Such units wait %s s '
            'for a student who can do them', u.attempts, left(coalesce(p_reason, 'no reason given'), 200), retry_wait_s(present)::integer));
    END IF;
END $$;

-- Requeue all units that a worker holds.
CREATE FUNCTION shoal.requeue_units_of(p_worker bigint, p_reason text, p_counts boolean) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    held bigint[] := ARRAY(SELECT h.id FROM (
        SELECT u.id, u.queue_position FROM units u WHERE u.state = 'claimed' AND u.worker = p_worker ORDER BY u.id FOR UPDATE) h ORDER BY h.queue_position);
BEGIN
    FOR n IN 1 .. cardinality(held) LOOP
        PERFORM requeue_unit(held[n], p_reason, p_counts);
    END LOOP;
END $$;

-- Whether the caller may try a unit. A unit that failed at a role goes to other roles at work, until all have tried it or a lease timeout has passed.
-- A unit that has used up its attempts comes back once in a lease timeout.
CREATE FUNCTION shoal.may_retry(p_epoch bigint, p_start bigint, p_lease_s double precision) RETURNS boolean
LANGUAGE sql STABLE SET search_path = shoal, pg_temp AS $$
    SELECT NOT EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start AND f.role = session_user
            AND f.at > (SELECT lease_now()) - make_interval(secs => p_lease_s))
        OR ((SELECT sum(f.times) FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start)
                < (SELECT i.max_retries FROM current_iteration i)
            AND NOT EXISTS (SELECT FROM active_roles a
                WHERE NOT EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start AND f.role = a.role)))
$$;

-- Whether a unit has used up its attempts. A flood of new roles that fail everything must not use them up: while a reliable role is at work, only
-- attempts of reliable roles count, and each of them, or as many as attempts count, tries the unit. Otherwise a unit waits `retry_wait_s`.
CREATE FUNCTION shoal.is_out_of_attempts(p_epoch bigint, p_start bigint, p_attempts integer, p_present shoal.iterations) RETURNS boolean
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    most integer := p_present.max_retries;
    has_waited boolean;
    believed record;
BEGIN
    IF p_attempts < most THEN
        RETURN false;
    END IF;
    SELECT coalesce(bool_or(f.first_at <= (SELECT lease_now()) - make_interval(secs => retry_wait_s(p_present))), false) INTO has_waited
        FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start;
    IF NOT EXISTS (SELECT FROM active_roles a WHERE a.reliable) THEN
        RETURN has_waited;
    END IF;
    SELECT p_attempts - coalesce(sum(f.times) FILTER (WHERE NOT coalesce(s.completed > s.failed, false)), 0) AS attempts,
        count(*) FILTER (WHERE s.completed > s.failed) AS roles INTO believed
        FROM failures f LEFT JOIN standings s USING (role) WHERE f.epoch = p_epoch AND f.start = p_start;
    RETURN believed.attempts >= most AND (has_waited OR believed.roles >= most OR NOT EXISTS (SELECT FROM active_roles a
        WHERE a.reliable AND NOT EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start AND f.role = a.role)));
END $$;

-- How long a failed unit waits for a reliable role, in seconds.
CREATE FUNCTION shoal.retry_wait_s(p_present shoal.iterations) RETURNS double precision LANGUAGE sql IMMUTABLE SET search_path = shoal, pg_temp AS
    'SELECT 4 * p_present.lease_timeout_s';
