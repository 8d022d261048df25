-- Messages through the database, and the limits on what one connection may upload, ask and keep busy.
--
-- A student's role may read and write no table; it may call the functions of `student_functions` and nothing else. Each of them runs with
-- its owner's rights (SECURITY DEFINER), checks its arguments, and refuses with a sentence. A worker is known by a secret that it made up,
-- a claim by its lease, a caller of `send_request` by its peer. Error codes: SH001 the worker is not known (any more), SH002 a message that no
-- version of Shoal would send, SH003 the student is in quarantine.

-- --- what a student uses ------------------------------------------------------------------------------------

-- The name of the counter of a role's calls: one for each call and for each 16 kB that it brings. It is a sequence, since a transaction that is rolled
-- back or a connection that is lost does not turn a sequence back.
CREATE FUNCTION shoal.counter_of(p_role text) RETURNS text LANGUAGE sql IMMUTABLE SET search_path = shoal, pg_temp AS
    'SELECT ''shoal.used_'' || md5(p_role)';

-- Count a call of the caller, if it is a student. The watchdog bounds the count.
CREATE FUNCTION shoal.count_use(p_bytes bigint DEFAULT 0) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    counter regclass := to_regclass('shoal.used_' || md5(session_user));
BEGIN
    IF counter IS NULL THEN
        RETURN;
    END IF;
    PERFORM nextval(counter);
    FOR _ IN 1 .. p_bytes / 16384 LOOP
        PERFORM nextval(counter);
    END LOOP;
END $$;

-- --- uploading frames ---------------------------------------------------------------------------------------

-- Upload one part of a frame. A transaction may upload four frames of the largest size: more than any message has.
CREATE FUNCTION shoal.put_part(p_blob uuid, p_n integer, p_data bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    most bigint := (SELECT 4 * c.max_frame_bytes + 1048576 FROM coordinator c);
    uploaded bigint;
BEGIN
    IF octet_length(p_data) > 4194304 OR p_n NOT BETWEEN 0 AND 65535 THEN
        RAISE EXCEPTION 'a part of a frame is too large, or one too many' USING ERRCODE = 'SH002';
    END IF;
    PERFORM count_use(octet_length(p_data));
    INSERT INTO uploads AS u VALUES (session_user, pg_backend_pid(), pg_current_xact_id(), octet_length(p_data) + 100) ON CONFLICT (role, pid) DO UPDATE
        SET bytes = excluded.bytes + CASE WHEN u.transaction = excluded.transaction THEN u.bytes ELSE 0 END, transaction = excluded.transaction
        RETURNING bytes INTO uploaded;
    IF uploaded > most THEN
        RAISE EXCEPTION 'a message of more than % bytes', most USING ERRCODE = 'SH002';
    END IF;
    INSERT INTO parts VALUES (p_blob, p_n, p_data);
END $$;

-- Make the uploaded frames belong to the row that the caller inserts next. Frames that another row has cannot be taken: their ids exist already.
CREATE FUNCTION shoal.attach_frames(p_blobs uuid[], p_sizes bigint[]) RETURNS void
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

-- Delete what this transaction uploaded and no row will refer to.
CREATE FUNCTION shoal.discard_upload(p_blobs uuid[]) RETURNS void
LANGUAGE sql SET search_path = shoal, pg_temp AS
    'DELETE FROM parts WHERE blob = ANY (p_blobs) AND NOT EXISTS (SELECT FROM blobs b WHERE b.id = parts.blob)';

-- Drop one use of each blob; a blob without uses is deleted.
CREATE FUNCTION shoal.release_frames(p_blobs uuid[]) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    UPDATE blobs b SET uses = b.uses - held.times
        FROM (SELECT id, count(*) AS times FROM unnest(p_blobs) id GROUP BY id) held WHERE b.id = held.id;
    DELETE FROM blobs b WHERE b.id = ANY (p_blobs) AND b.uses = 0;
END $$;

-- Inconsistencies, of which there must be none at any time: blobs whose `uses` differ from the rows that refer to them, parts without a blob,
-- and published frames that are referred to and missing.
CREATE FUNCTION shoal.orphans() RETURNS TABLE (what text, id uuid, uses bigint, found bigint)
LANGUAGE sql STABLE SET search_path = shoal, pg_temp AS $$
    WITH holders AS (
        SELECT held, count(*) AS times FROM (
            SELECT unnest(frames) FROM requests UNION ALL SELECT unnest(frames) FROM contributions UNION ALL SELECT unnest(frames) FROM records
            UNION ALL SELECT unnest(frames) FROM snapshots UNION ALL SELECT unnest(frames) FROM run
        ) AS all_of_them (held) GROUP BY held
    ), shown AS (SELECT unnest(frames) AS frame FROM replies UNION SELECT unnest(frames) FROM weights)
    SELECT 'blob', coalesce(b.id, h.held), b.uses::bigint, h.times FROM blobs b FULL JOIN holders h ON h.held = b.id
        WHERE b.uses IS DISTINCT FROM h.times
    UNION ALL SELECT 'part', p.blob, NULL, count(*) FROM parts p WHERE NOT EXISTS (SELECT FROM blobs b WHERE b.id = p.blob) GROUP BY p.blob
    UNION ALL SELECT 'published frame', s.frame, NULL, NULL FROM shown s WHERE NOT EXISTS (SELECT FROM published_frames f WHERE f.id = s.frame)
$$;

CREATE FUNCTION shoal.published_sizes(p_frames uuid[]) RETURNS bigint[]
LANGUAGE sql STABLE SET search_path = shoal, pg_temp AS
    'SELECT ARRAY(SELECT y.bytes FROM unnest(p_frames) WITH ORDINALITY f (id, position) JOIN published_frames y USING (id) ORDER BY position)';

-- --- requests and replies -----------------------------------------------------------------------------------

-- The largest frame and header, so that a caller does not upload what would be refused.
CREATE FUNCTION shoal.message_limits() RETURNS TABLE (max_frame_bytes bigint, max_header_bytes bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS 'SELECT max_frame_bytes, max_header_bytes FROM coordinator';

-- Delete the requests and replies of a caller, up to a number.
CREATE FUNCTION shoal.forget_requests(p_peer uuid, p_before bigint DEFAULT 9223372036854775807) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    held uuid[];
BEGIN
    PERFORM count_use();
    DELETE FROM requests WHERE peer = p_peer AND number < p_before RETURNING frames INTO held;
    PERFORM release_frames(held) WHERE cardinality(held) > 0;
    DELETE FROM replies WHERE peer = p_peer AND number < p_before;
END $$;

-- For a coordinator that stops: these requests get no reply.
CREATE FUNCTION shoal.drop_requests(p_requests bigint[]) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    asked requests;
BEGIN
    FOR asked IN DELETE FROM requests WHERE id = ANY (p_requests) RETURNING * LOOP
        PERFORM release_frames(asked.frames), pg_notify('shoal_' || md5(asked.peer::text), '');
    END LOOP;
END $$;

-- Send a request. The same number again, after a lost connection, is the same request. One that is too large is recorded without its
-- content, so that its sender gets a reply that says so.
CREATE FUNCTION shoal.send_request(p_peer uuid, p_number bigint, p_header bytea, p_blobs uuid[], p_sizes bigint[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    most record;
    why text;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true), set_config('idle_in_transaction_session_timeout', '10s', true);
    PERFORM count_use(octet_length(p_header)), forget_requests(p_peer, p_number);
    IF EXISTS (SELECT FROM requests WHERE peer = p_peer) OR EXISTS (SELECT FROM replies WHERE peer = p_peer) THEN
        PERFORM discard_upload(p_blobs);
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
        PERFORM attach_frames(p_blobs, p_sizes);
    ELSE
        PERFORM discard_upload(p_blobs);
        p_blobs := '{}';
    END IF;
    INSERT INTO requests (peer, number, header, frames, too_large) VALUES (p_peer, p_number, p_header, p_blobs, why);
    PERFORM pg_notify('shoal_inbox', '');
END $$;

-- A student's role has at most 16 requests open.
CREATE FUNCTION shoal.limit_open_requests() RETURNS trigger LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    IF (SELECT count(*) FROM requests r WHERE r.role = NEW.role) >= 16 AND is_student(NEW.role) THEN
        RAISE EXCEPTION 'a student asks 16 questions at a time at most' USING ERRCODE = 'SH002';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER limit_open_requests BEFORE INSERT ON shoal.requests FOR EACH ROW EXECUTE FUNCTION shoal.limit_open_requests();

-- Read a reply: a row (frame = 0) with its header and the sizes of its frames, and a row for each part, to be sorted by frame and n. One row
-- with frame = -1 means not yet; no row means never.
CREATE FUNCTION shoal.read_reply(p_peer uuid, p_number bigint)
RETURNS TABLE (frame integer, n integer, header bytea, sizes bigint[], data bytea)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    WITH reply AS (SELECT r.header, r.frames FROM replies r WHERE r.peer = p_peer AND r.number = p_number)
    SELECT 0, 0, header, published_sizes(frames), NULL::bytea FROM reply
    UNION ALL SELECT f.position::integer, p.n, NULL, NULL, p.data
        FROM reply, unnest(frames) WITH ORDINALITY f (id, position) JOIN published_parts p ON p.frame = f.id
    UNION ALL SELECT -1, 0, NULL, NULL, NULL FROM requests WHERE peer = p_peer AND number = p_number
$$;

-- --- the watchdog -------------------------------------------------------------------------------------------

-- The connections of all but coordinators, for the watchdog: for how long a statement has kept the server busy (null: none does), what was written to
-- the write-ahead log, which PostgreSQL counts for each connection from version 18 on, and its temporary files, which not every owner may list.
CREATE FUNCTION shoal.student_connections()
RETURNS TABLE (role text, pid integer, began double precision, busy_s double precision, wal_bytes bigint, wal_records bigint, temp_bytes bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    temporary text := CASE WHEN has_function_privilege('pg_ls_tmpdir()', 'EXECUTE') THEN 'SELECT name, size FROM pg_ls_tmpdir()'
        ELSE 'SELECT NULL::text AS name, 0 AS size' END;
    written text := CASE WHEN current_setting('server_version_num')::integer >= 180000 THEN 'pg_stat_get_backend_wal(a.pid)'
        ELSE '(SELECT 0 AS wal_bytes, 0 AS wal_records)' END;
BEGIN
    RETURN QUERY EXECUTE format('WITH files AS MATERIALIZED (%s)', temporary) || $query$
        SELECT a.usename::text, a.pid, extract(epoch FROM a.backend_start)::double precision,
            CASE WHEN a.state = 'active' AND (coalesce(a.wait_event_type, 'Timeout') = 'Timeout' OR a.wait_event LIKE 'BufFile%')
                THEN extract(epoch FROM clock_timestamp() - a.query_start)::double precision END,
            coalesce(w.wal_bytes, 0)::bigint, coalesce(w.wal_records, 0)::bigint,
            (SELECT coalesce(sum(f.size), 0)::bigint FROM files f WHERE f.name LIKE 'pgsql_tmp' || a.pid || '.%')
        FROM pg_stat_activity a JOIN shoal.roles r ON r.name = a.usename AND r.kind <> 'coordinator'
        LEFT JOIN LATERAL $query$ || written || $query$ w ON true WHERE a.datname = current_database()$query$;
END $$;

-- What the roles of students have used since they were made: calls (see `count_use`), and units that they have completed.
CREATE FUNCTION shoal.student_uses() RETURNS TABLE (role text, calls bigint, completed bigint)
LANGUAGE sql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    SELECT r.name, coalesce(pg_sequence_last_value(to_regclass(counter_of(r.name))), 0),
        (SELECT coalesce(sum(w.completed), 0)::bigint FROM workers w WHERE w.role = r.name)
    FROM roles r WHERE r.kind = 'student' AND to_regclass(counter_of(r.name)) IS NOT NULL
$$;

-- Put a student who exceeded a bound into quarantine, and end its connections. It may still log in once more, to learn why. Where it exceeds a bound in
-- quarantine, too, its role is locked. Others who exceed a bound, such as readers, are disconnected.
CREATE FUNCTION shoal.shut_out(p_role text, p_why text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
BEGIN
    IF NOT is_student(p_role) THEN
        PERFORM add_note(format('warning: the connections of %s were ended: %s', p_role, p_why));
    ELSIF EXISTS (SELECT FROM standings s WHERE s.role = p_role AND s.quarantined IS NOT NULL) THEN
        EXECUTE format('ALTER ROLE %I NOLOGIN', p_role);
        PERFORM add_note(format('warning: %s is locked: in quarantine, %s', p_role, p_why));
    ELSE
        INSERT INTO standings (role) VALUES (p_role) ON CONFLICT DO NOTHING;
        PERFORM quarantine(p_role, p_why);
    END IF;
    PERFORM pg_terminate_backend(a.pid) FROM pg_stat_activity a WHERE a.usename = p_role;
END $$;

-- End connections of students that leave a transaction open, keep the server busy, block others, or take too much memory (`p_over_memory`, the
-- process ids). The fifth time the role is shut out. Times are in seconds.
CREATE FUNCTION shoal.end_harmful_connections(
    p_over_memory integer[] DEFAULT '{}', p_blocking double precision DEFAULT 5, p_idle double precision DEFAULT 30,
    p_busy double precision DEFAULT 60, p_open double precision DEFAULT 600
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
            WHEN b.pid = ANY (p_over_memory) THEN 'it took more memory than a student may'
            WHEN b.pid IN (SELECT k.pid FROM blocking k) AND b.wait_event_type IS DISTINCT FROM 'Lock' THEN 'it held up others'
            WHEN b.state LIKE 'idle in transaction%' AND b.state_change < clock_timestamp() - make_interval(secs => p_idle)
                THEN format('it left a transaction open for %s s', p_idle)
            WHEN b.state = 'active' AND b.wait_event_type IS DISTINCT FROM 'Client' AND b.wait_event_type IS DISTINCT FROM 'Lock'
                AND b.query_start < clock_timestamp() - make_interval(secs => p_busy) THEN format('it kept the server busy for %s s', p_busy)
            WHEN b.xact_start < clock_timestamp() - interval '2 s' AND pg_notification_queue_usage() > 0.25
                THEN 'its transaction kept the server from deleting notifications, which fill the disk'
            WHEN b.xact_start < clock_timestamp() - make_interval(secs => p_open) THEN format('a transaction took %s s', p_open) END AS why
        FROM backends b
    LOOP
        CONTINUE WHEN found_one.why IS NULL;
        PERFORM pg_terminate_backend(found_one.pid), add_note(format('warning: a connection of %s was ended: %s', found_one.role, found_one.why));
        CONTINUE WHEN found_one.kind <> 'student';
        INSERT INTO standings AS t (role, ended) VALUES (found_one.role, 1) ON CONFLICT (role) DO UPDATE SET ended = t.ended + 1 RETURNING t.ended INTO times;
        IF times >= 5 THEN
            PERFORM quarantine(found_one.role, format('%s of its connections had to be ended, the last because %s', times, found_one.why));
            EXECUTE format('ALTER ROLE %I NOLOGIN', found_one.role);
            PERFORM pg_terminate_backend(a.pid) FROM pg_stat_activity a WHERE a.usename = found_one.role;
        END IF;
    END LOOP;
END $$;

-- A connection with the class's token needs a moment to enroll. There are few such connections, so one that stays is ended.
CREATE FUNCTION shoal.end_slow_enrollments(p_longest_s double precision DEFAULT 15) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
BEGIN
    PERFORM pg_terminate_backend(a.pid) FROM pg_stat_activity a JOIN roles r ON r.name = a.usename AND r.kind = 'class'
        WHERE a.datname = current_database() AND a.backend_start < clock_timestamp() - make_interval(secs => p_longest_s);
END $$;
