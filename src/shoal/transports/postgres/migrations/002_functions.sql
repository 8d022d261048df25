-- All that a student's role may do. Each function runs with its owner's rights, checks what it is given, and says no with a sentence; the
-- role itself may read and write no table. A worker is known by a secret that it made up itself, a claim by its lease, a caller by its peer.
-- Error codes: SH001 the worker is not known (any more), SH002 a message that nobody of ours would send.

CREATE FUNCTION shoal.schema_version() RETURNS integer LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS
    'SELECT max(version) FROM migrations';

-- --- frames ---------------------------------------------------------------------------------------------

CREATE FUNCTION shoal.put_part(p_blob uuid, p_n integer, p_data bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
BEGIN
    IF octet_length(p_data) > 4194304 OR p_n NOT BETWEEN 0 AND 65535 THEN
        RAISE EXCEPTION 'a part of a frame is too large, or one too many' USING ERRCODE = 'SH002';
    END IF;
    INSERT INTO parts VALUES (p_blob, p_n, p_data);
END $$;

-- For the functions below: what was uploaded gets an owner. Nobody can own what somebody else does: the id is there already.
CREATE FUNCTION shoal.own(p_blobs uuid[], p_sizes bigint[]) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    most record;
BEGIN
    SELECT c.max_frame_bytes, c.max_header_bytes INTO most FROM coordinator c;
    IF cardinality(p_blobs) <> cardinality(p_sizes) OR cardinality(p_blobs) > 16 THEN
        RAISE EXCEPTION 'a message with too many frames' USING ERRCODE = 'SH002';
    END IF;
    FOR i IN 1 .. cardinality(p_blobs) LOOP
        IF p_sizes[i] <> (SELECT coalesce(sum(octet_length(p.data)), 0) FROM parts p WHERE p.blob = p_blobs[i]) OR p_sizes[i] > most.max_frame_bytes THEN
            RAISE EXCEPTION 'a frame is too large, or not the one announced' USING ERRCODE = 'SH002';
        END IF;
        INSERT INTO blobs VALUES (p_blobs[i], p_sizes[i], 1);
    END LOOP;
END $$;

CREATE FUNCTION shoal.release(p_blobs uuid[]) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    UPDATE blobs b SET uses = b.uses - held.times
        FROM (SELECT id, count(*) AS times FROM unnest(p_blobs) id GROUP BY id) held WHERE b.id = held.id;
    DELETE FROM blobs b WHERE b.id = ANY (p_blobs) AND b.uses = 0;
END $$;

-- What does not add up: blobs whose uses are not those that hold them, and flyers that are referred to and not there. Nothing, at any time.
CREATE FUNCTION shoal.orphans() RETURNS TABLE (what text, id uuid, uses bigint, found bigint)
LANGUAGE sql STABLE SET search_path = shoal, pg_temp AS $$
    WITH holders AS (
        SELECT held, count(*) AS times FROM (
            SELECT unnest(frames) FROM requests UNION ALL SELECT unnest(frames) FROM contributions UNION ALL SELECT unnest(frames) FROM records
            UNION ALL SELECT unnest(frames) FROM snapshots UNION ALL SELECT unnest(frames) FROM run
        ) AS all_of_them (held) GROUP BY held
    ), shown AS (SELECT unnest(frames) AS flyer FROM replies UNION SELECT unnest(frames) FROM weights)
    SELECT 'blob', coalesce(b.id, h.held), b.uses::bigint, h.times FROM blobs b FULL JOIN holders h ON h.held = b.id
        WHERE b.uses IS DISTINCT FROM h.times
    UNION ALL SELECT 'part', p.blob, NULL, count(*) FROM parts p WHERE NOT EXISTS (SELECT FROM blobs b WHERE b.id = p.blob) GROUP BY p.blob
    UNION ALL SELECT 'flyer', s.flyer, NULL, NULL FROM shown s WHERE NOT EXISTS (SELECT FROM flyers f WHERE f.id = s.flyer)
$$;

CREATE FUNCTION shoal.flyer_sizes(p_flyers uuid[]) RETURNS bigint[]
LANGUAGE sql STABLE SET search_path = shoal, pg_temp AS
    'SELECT ARRAY(SELECT y.bytes FROM unnest(p_flyers) WITH ORDINALITY f (id, position) JOIN flyers y USING (id) ORDER BY position)';

-- --- questions and answers --------------------------------------------------------------------------------

CREATE FUNCTION shoal.hang_up(p_peer uuid, p_before bigint DEFAULT 9223372036854775807) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    held uuid[];
BEGIN
    DELETE FROM requests WHERE peer = p_peer AND number < p_before RETURNING frames INTO held;
    PERFORM release(held) WHERE cardinality(held) > 0;
    DELETE FROM replies WHERE peer = p_peer AND number < p_before;
END $$;

-- For the coordinator that stops: these questions will not be answered.
CREATE FUNCTION shoal.abandon(p_requests bigint[]) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    asked requests;
BEGIN
    FOR asked IN DELETE FROM requests WHERE id = ANY (p_requests) RETURNING * LOOP
        PERFORM release(asked.frames), pg_notify('shoal_' || md5(asked.peer::text), '');
    END LOOP;
END $$;

-- How large a frame and a header may be, so that nobody uploads in vain.
CREATE FUNCTION shoal.limits() RETURNS TABLE (max_frame_bytes bigint, max_header_bytes bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS 'SELECT max_frame_bytes, max_header_bytes FROM coordinator';

-- Put a question. The same number again, after a connection was lost, is the same question.
CREATE FUNCTION shoal.ask(p_peer uuid, p_number bigint, p_header bytea, p_blobs uuid[], p_sizes bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    most record;
    why text;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true), set_config('idle_in_transaction_session_timeout', '10s', true);
    PERFORM hang_up(p_peer, p_number);
    IF EXISTS (SELECT FROM requests WHERE peer = p_peer) OR EXISTS (SELECT FROM replies WHERE peer = p_peer) THEN
        DELETE FROM parts WHERE blob = ANY (p_blobs) AND NOT EXISTS (SELECT FROM blobs b WHERE b.id = parts.blob);
        RETURN;
    END IF;
    SELECT c.max_frame_bytes, c.max_header_bytes INTO most FROM coordinator c;
    IF octet_length(p_header) > most.max_header_bytes THEN
        why := format('a header of %s bytes; at most %s are allowed', octet_length(p_header), most.max_header_bytes);
        p_header := '';
    ELSIF most.max_frame_bytes < ANY (p_sizes) THEN
        why := format('a frame of %s bytes; at most %s are allowed', (SELECT max(size) FROM unnest(p_sizes) size), most.max_frame_bytes);
        p_header := '';
    END IF;
    IF why IS NULL THEN
        PERFORM own(p_blobs, p_sizes);
    ELSE
        DELETE FROM parts WHERE blob = ANY (p_blobs) AND NOT EXISTS (SELECT FROM blobs b WHERE b.id = parts.blob);
        p_blobs := '{}';
    END IF;
    INSERT INTO requests (peer, number, header, frames, too_large) VALUES (p_peer, p_number, p_header, p_blobs, why);
    PERFORM pg_notify('shoal_inbox', '');
END $$;

-- The answer: a row (frame = 0) with its header and the sizes of its frames, then a row for each part, once they are sorted by frame and n. One
-- row with frame = -1: not yet. None: never.
CREATE FUNCTION shoal.answer(p_peer uuid, p_number bigint)
RETURNS TABLE (frame integer, n integer, header bytea, sizes bigint[], data bytea)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    WITH reply AS (SELECT r.header, r.frames FROM replies r WHERE r.peer = p_peer AND r.number = p_number)
    SELECT 0, 0, header, flyer_sizes(frames), NULL::bytea FROM reply
    UNION ALL SELECT f.position::integer, p.n, NULL, NULL, p.data
        FROM reply, unnest(frames) WITH ORDINALITY f (id, position) JOIN flyer_parts p ON p.flyer = f.id
    UNION ALL SELECT -1, 0, NULL, NULL, NULL FROM requests WHERE peer = p_peer AND number = p_number
$$;

-- --- the board of units -----------------------------------------------------------------------------------

-- The run's description, in rows as of `answer`.
CREATE FUNCTION shoal.welcome() RETURNS TABLE (frame integer, n integer, header bytea, sizes bigint[], data bytea)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    SELECT 0, 0, r.header, ARRAY(SELECT b.bytes FROM unnest(r.frames) WITH ORDINALITY f (id, position) JOIN blobs b USING (id) ORDER BY position),
        NULL::bytea FROM run r
    UNION ALL SELECT f.position::integer, p.n, NULL, NULL, p.data
        FROM run r, unnest(r.frames) WITH ORDINALITY f (id, position) JOIN parts p ON p.blob = f.id
$$;

-- Who calls. The row is not locked.
CREATE FUNCTION shoal.worker_of(p_secret uuid) RETURNS shoal.workers
LANGUAGE plpgsql STABLE SET search_path = shoal, pg_temp AS $$
DECLARE
    found_one workers;
BEGIN
    SELECT * INTO found_one FROM workers w WHERE w.secret = p_secret;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this worker is not known here: it has not entered, or somebody else goes by its name now' USING ERRCODE = 'SH001';
    END IF;
    RETURN found_one;
END $$;

-- Take part. A name whose owner left or fell silent is taken over; one that is in use gets a number behind it.
CREATE FUNCTION shoal.enter(p_secret uuid, p_name text, p_about text) RETURNS text
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
        PERFORM give_back_all(holder.id);
        UPDATE workers SET secret = p_secret, about = p_about::jsonb, state = 'joined', figures = '{}', joined_at = now(), seen_at = now(),
            left_at = NULL, last_unit = NULL, last_lease = NULL, last_outcome = NULL WHERE id = holder.id;
    END IF;
    RETURN tried;
END $$;

CREATE FUNCTION shoal.beat(p_secret uuid, p_state text, p_figures text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true), worker_of(p_secret);
    IF octet_length(p_state) > 80 OR octet_length(p_figures) > 8192 THEN
        RAISE EXCEPTION 'a sign of life that is too long' USING ERRCODE = 'SH002';
    END IF;
    UPDATE workers SET state = p_state, figures = p_figures::jsonb, seen_at = now(), left_at = NULL WHERE secret = p_secret;
END $$;

-- A unit whose lease ended without a result: pending again, at the end of the queue; or failed, where it was tried too often.
CREATE FUNCTION shoal.put_back(p_unit bigint, p_reason text, p_counts boolean) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    most integer := (SELECT i.max_retries FROM iterations i ORDER BY i.iteration DESC LIMIT 1);
    u units;
BEGIN
    UPDATE units SET attempts = attempts + p_counts::integer, state = CASE WHEN p_counts AND attempts + 1 > most THEN 'failed' ELSE 'pending' END,
        place = nextval('places'), lease = NULL, worker = NULL, deadline = NULL, reason = p_reason
        WHERE id = p_unit RETURNING * INTO u;
    IF u.state = 'failed' THEN
        INSERT INTO contributions (kind, unit, iteration, epoch, start, batches, reason)
            VALUES ('failed', u.id, u.iteration, u.epoch, u.start, u.batches, p_reason);
        PERFORM pg_notify('shoal_inbox', '');
    ELSE
        PERFORM pg_notify('shoal_work', '');
    END IF;
END $$;

CREATE FUNCTION shoal.give_back_all(p_worker bigint) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    held bigint;
BEGIN
    FOR held IN SELECT u.id FROM units u WHERE u.state = 'claimed' AND u.worker = p_worker ORDER BY u.id FOR UPDATE LOOP
        PERFORM put_back(held, NULL, false);
    END LOOP;
END $$;

-- Leases that ended, whoever held them. One at a time does this, so that none waits for another.
CREATE FUNCTION shoal.reclaim() RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp SET enable_seqscan = off AS $$
DECLARE
    expired units;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('shoal.reclaim')) THEN
        RETURN;
    END IF;
    FOR expired IN SELECT * FROM units u WHERE u.state = 'claimed' AND u.deadline < clock_timestamp() ORDER BY u.deadline LIMIT 100 FOR UPDATE SKIP LOCKED LOOP
        UPDATE workers SET failed = failed + 1 WHERE id = expired.worker;
        PERFORM put_back(expired.id, 'no result in time', true);
    END LOOP;
END $$;

CREATE FUNCTION shoal.enough(p_present shoal.iterations) RETURNS boolean
LANGUAGE sql STABLE SET search_path = shoal, pg_temp AS $$
    SELECT p_present.quorum IS NOT NULL AND p_present.quorum <= (SELECT count(*) FROM (
        SELECT FROM contributions c WHERE c.iteration = p_present.iteration AND c.kind = 'delivered' LIMIT p_present.quorum) waiting)
$$;

-- Lease up to p_count units, looking from the place p_after on. A lease that is asked for again, after a connection was lost, brings the same units.
-- Where there is none, one row says in due_s when the next lease ends that somebody holds.
CREATE FUNCTION shoal.claim(p_secret uuid, p_lease uuid, p_count integer, p_after bigint, p_reclaim boolean, p_again boolean)
RETURNS TABLE (id bigint, iteration bigint, epoch bigint, start bigint, batches bigint, attempts integer, place bigint, due_s double precision)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
    caller bigint := (worker_of(p_secret)).id;
    present iterations;
    ids bigint[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    IF p_reclaim THEN
        PERFORM reclaim();
    END IF;
    SELECT * INTO present FROM iterations i ORDER BY i.iteration DESC LIMIT 1;
    IF p_again THEN
        RETURN QUERY SELECT u.id, u.iteration, u.epoch, u.start, u.batches, u.attempts, u.place, NULL::double precision
            FROM units u WHERE u.state = 'claimed' AND u.lease = p_lease;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    -- With enough results for the coordinator to make a version of, more would come too late: there is work again when it has.
    FOR look IN 1 .. CASE WHEN enough(present) THEN 0 ELSE 2 END LOOP
        ids := ARRAY(SELECT u.id FROM units u WHERE u.state = 'pending' AND u.place >= greatest(p_after, present.floor)
            ORDER BY u.place LIMIT least(p_count, 1000) FOR UPDATE SKIP LOCKED);
        EXIT WHEN cardinality(ids) > 0;
        p_after := 0;
        PERFORM reclaim();
    END LOOP;
    IF cardinality(ids) > 0 THEN
        RETURN QUERY UPDATE units u SET state = 'claimed', lease = p_lease, worker = caller,
            deadline = clock_timestamp() + make_interval(secs => present.lease_timeout_s)
            WHERE u.id = ANY (ids) RETURNING u.id, u.iteration, u.epoch, u.start, u.batches, u.attempts, u.place, NULL::double precision;
    ELSE
        RETURN QUERY SELECT NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::integer, NULL::bigint,
            extract(epoch FROM min(u.deadline) - clock_timestamp())::double precision FROM units u WHERE u.state = 'claimed';
    END IF;
END $$;

CREATE FUNCTION shoal.held(p_unit bigint, p_lease uuid) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS
    'SELECT EXISTS (SELECT FROM units u WHERE u.id = p_unit AND u.state = ''claimed'' AND u.lease = p_lease AND u.deadline > clock_timestamp())';

-- A unit's result: accepted while its lease is held, else dropped and counted, all in the transaction that uploaded it.
CREATE FUNCTION shoal.submit(p_secret uuid, p_unit bigint, p_lease uuid, p_iteration bigint, p_header bytea, p_blobs uuid[], p_sizes bigint[], p_drop boolean)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    caller workers := worker_of(p_secret);
    u units;
    outcome text;
    most bigint := (SELECT c.max_header_bytes FROM coordinator c);
BEGIN
    PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
    IF octet_length(p_header) > most THEN
        RAISE EXCEPTION 'a header of % bytes; at most % are allowed', octet_length(p_header), most USING ERRCODE = 'SH002';
    END IF;
    IF caller.last_unit = p_unit AND caller.last_lease = p_lease THEN
        outcome := caller.last_outcome;
    ELSIF NOT p_drop THEN
        UPDATE units SET state = 'completed', deadline = NULL
            WHERE id = p_unit AND state = 'claimed' AND lease = p_lease AND deadline > clock_timestamp() RETURNING * INTO u;
        IF FOUND THEN
            PERFORM own(p_blobs, p_sizes);
            INSERT INTO contributions (kind, worker, unit, iteration, epoch, start, batches, header, frames)
                VALUES ('delivered', caller.name, u.id, u.iteration, u.epoch, u.start, u.batches, p_header, p_blobs);
            UPDATE workers SET completed = completed + 1, seen_at = now(), last_unit = p_unit, last_lease = p_lease, last_outcome = 'accepted'
                WHERE secret = p_secret;
            PERFORM pg_notify('shoal_inbox', '');
            RETURN 'accepted';
        END IF;
    END IF;
    DELETE FROM parts WHERE blob = ANY (p_blobs) AND NOT EXISTS (SELECT FROM blobs b WHERE b.id = parts.blob);
    IF outcome IS NULL THEN
        SELECT * INTO u FROM units WHERE id = p_unit FOR UPDATE;
        IF u.state = 'claimed' AND u.lease = p_lease AND u.deadline <= clock_timestamp() THEN
            PERFORM put_back(p_unit, 'no result in time', true);
        END IF;
        outcome := CASE WHEN u.state = 'cancelled' OR p_iteration < (SELECT max(i.iteration) FROM iterations i) THEN 'cancelled' ELSE 'late' END;
        UPDATE workers SET late = late + (outcome = 'late')::integer, cancelled = cancelled + (outcome = 'cancelled')::integer, seen_at = now(),
            last_unit = p_unit, last_lease = p_lease, last_outcome = outcome WHERE secret = p_secret;
    END IF;
    RETURN outcome;
END $$;

CREATE FUNCTION shoal.give_back(p_secret uuid, p_unit bigint, p_lease uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
BEGIN
    PERFORM worker_of(p_secret);
    PERFORM FROM units u WHERE u.id = p_unit AND u.state = 'claimed' AND u.lease = p_lease FOR UPDATE;
    IF FOUND THEN
        PERFORM put_back(p_unit, NULL, false);
    END IF;
END $$;

CREATE FUNCTION shoal.fail(p_secret uuid, p_unit bigint, p_lease uuid, p_reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    caller workers := worker_of(p_secret);
    u units;
BEGIN
    SELECT * INTO u FROM units WHERE id = p_unit AND state = 'claimed' AND lease = p_lease FOR UPDATE;
    IF FOUND THEN
        UPDATE workers SET failed = failed + 1 WHERE id = caller.id;
        PERFORM put_back(p_unit, left(p_reason, 500), true);
    END IF;
END $$;

CREATE FUNCTION shoal.leave(p_secret uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
BEGIN
    PERFORM give_back_all((worker_of(p_secret)).id);
    UPDATE workers SET left_at = now(), seen_at = now(), state = 'left' WHERE secret = p_secret;
END $$;

-- The difference from what the worker has, else the newest weights in full, where they are newer. In rows as of `answer`, and version and kind.
CREATE FUNCTION shoal.read_weights(p_have bigint)
RETURNS TABLE (frame integer, n integer, header bytea, sizes bigint[], data bytea, version bigint, kind text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    WITH best AS (
        SELECT w.version, w.kind, w.header, w.frames FROM weights w
        WHERE w.version > p_have AND (w.kind = 'full' OR w.base = p_have) ORDER BY w.kind = 'difference' DESC, w.version DESC LIMIT 1
    )
    SELECT 0, 0, header, flyer_sizes(frames), NULL::bytea, version, kind FROM best
    UNION ALL SELECT f.position::integer, p.n, NULL, NULL, p.data, NULL, NULL
        FROM best, unnest(frames) WITH ORDINALITY f (id, position) JOIN flyer_parts p ON p.flyer = f.id
$$;
