-- Students: their roles, how they are doing, and what the owner is told about them.
--
-- Each student has a role of their own, made with the class's token, so limits and failures are counted per student. Anyone with the token
-- can make roles, so a flood of new roles must not take the places of other students: a role that never completed a unit makes room for a
-- new one. Roles that are not connected go first, then roles from the address with the most roles, then the oldest. A role with completed
-- work stays. One address gets three quarters of the places at most, which is enough for a school behind one address.

-- --- notes for the owner ------------------------------------------------------------------------------------

-- Write a note, unless a thousand are waiting.
CREATE FUNCTION shoal.add_note(p_note text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    IF (SELECT count(*) FROM (SELECT FROM notes LIMIT 1000) told) < 1000 THEN
        INSERT INTO notes (note) VALUES (p_note);
        PERFORM pg_notify('shoal_inbox', '');
    END IF;
END $$;

-- Write a note at once, and then at most once a minute, with the number of occurrences in between. A caller never waits for another one.
CREATE FUNCTION shoal.add_note_each_minute(p_subject text, p_note text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    told note_times;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('shoal.telling')) THEN
        RETURN;
    END IF;
    INSERT INTO note_times AS t (subject, untold) VALUES (p_subject, 1) ON CONFLICT (subject) DO UPDATE SET untold = t.untold + 1 RETURNING * INTO told;
    IF told.told_at < lease_now() - interval '1 minute' THEN
        PERFORM add_note(p_note || CASE WHEN told.untold > 1 THEN format(' (and %s times before, since this was last told)', told.untold - 1) ELSE '' END);
        UPDATE note_times SET told_at = lease_now(), untold = 0 WHERE subject = p_subject;
    END IF;
END $$;

-- At most every ten minutes for one student.
CREATE FUNCTION shoal.note_slow_worker(p_role text, p_name text, p_took double precision, p_timeout double precision) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    INSERT INTO standings AS t (role, slow_at) VALUES (p_role, lease_now()) ON CONFLICT (role) DO UPDATE SET slow_at = excluded.slow_at
        WHERE t.slow_at IS NULL OR t.slow_at < lease_now() - interval '10 min';
    IF FOUND THEN
        PERFORM add_note(format('warning: %s has computed one unit for %s s, longer than the timeout of %s s. Its lease is renewed while it is seen at work; '
            'smaller units (batches_per_unit) or a longer lease_timeout_s suit this class better', p_name, p_took::integer, p_timeout::integer));
    END IF;
END $$;

-- --- roles --------------------------------------------------------------------------------------------------

-- The kind of the caller's role: `student`, `class`, `reader`, `coordinator`, or null.
CREATE FUNCTION shoal.role_kind() RETURNS text LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS
    'SELECT r.kind FROM roles r WHERE r.name = session_user';

CREATE FUNCTION shoal.is_student(p_role text DEFAULT session_user) RETURNS boolean LANGUAGE sql STABLE SET search_path = shoal, pg_temp AS
    'SELECT EXISTS (SELECT FROM roles r WHERE r.name = p_role AND r.kind = ''student'')';

-- Set the limits that PostgreSQL has for a role: connections, temporary files, and lines in the server's log, which failed statements and some settings
-- write. A role cannot undo what only a superuser may set; an owner who may not set it either learns that from `shoal db init`.
CREATE FUNCTION shoal.limit_role(p_role text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    setting text;
BEGIN
    EXECUTE format('ALTER ROLE %I NOINHERIT CONNECTION LIMIT 8', p_role);
    EXECUTE format('ALTER ROLE %I SET statement_timeout = ''10min''', p_role);
    FOREACH setting IN ARRAY ARRAY['temp_file_limit = ''256MB''', 'log_min_messages = fatal', 'log_min_error_statement = panic'] LOOP
        BEGIN
            EXECUTE format('ALTER ROLE %I SET %s', p_role, setting);
        EXCEPTION WHEN insufficient_privilege THEN
            NULL;
        END;
    END LOOP;
    IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        EXECUTE format('GRANT %I TO CURRENT_USER', p_role);  -- so that the watchdog sees connections of the role, and may end them
    END IF;
END $$;

CREATE FUNCTION shoal.grant_student_functions(p_role text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    callable text;
BEGIN
    EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), p_role);
    EXECUTE format('GRANT USAGE ON SCHEMA shoal TO %I', p_role);
    EXECUTE format('CREATE SEQUENCE IF NOT EXISTS %s', counter_of(p_role));
    EXECUTE format('ALTER SEQUENCE %s OWNER TO %s', counter_of(p_role), (SELECT n.nspowner::regrole FROM pg_namespace n WHERE n.nspname = 'shoal'));
    FOR callable IN SELECT f.name FROM student_functions f LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION shoal.%I TO %I', callable, p_role);
    END LOOP;
END $$;

-- Make a role for a student who has the class's token. The student made the password, and only its SCRAM verifier travels. Roles belong to the
-- whole server: an existing one is never changed, the new role gets another number. The speed of enrolling is not limited, since then a
-- flood would keep everyone else from enrolling.
CREATE FUNCTION shoal.enroll(p_name text, p_verifier text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    wanted text := 'student-' || lower(coalesce(p_name, 'one'));
    made text := wanted;
    counter integer := 1;
    address text := coalesce(host(inet_client_addr()), 'this machine');
BEGIN
    IF wanted !~ '^student-[a-z0-9][a-z0-9._-]{0,39}$' OR p_verifier !~ '^SCRAM-SHA-256\$[0-9]{1,7}:[A-Za-z0-9+/=]{1,60}\$[A-Za-z0-9+/=]{44}:[A-Za-z0-9+/=]{44}$' THEN
        RAISE EXCEPTION 'a name has 1 to 40 letters, digits, dots, dashes and underscores, and a password comes as its SCRAM verifier' USING ERRCODE = 'SH002';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('shoal.enroll'));
    IF (SELECT count(*) FROM roles r WHERE r.kind = 'student' AND r.enrolled_from = address) >= 375 AND NOT drop_idle_student(address) THEN
        RAISE EXCEPTION 'there are 375 students from your address already, and all are at work: ask the teacher for a role (`shoal db grant`)' USING ERRCODE = 'SH002';
    END IF;
    IF (SELECT count(*) FROM roles r WHERE r.kind = 'student') >= 500 AND NOT drop_idle_student() THEN
        RAISE EXCEPTION 'there are 500 students already, and all are at work: ask the teacher for a role (`shoal db grant`)' USING ERRCODE = 'SH002';
    END IF;
    WHILE EXISTS (SELECT FROM pg_roles WHERE rolname = made) LOOP
        counter := counter + 1;
        made := wanted || '-' || counter;
    END LOOP;
    EXECUTE format('CREATE ROLE %I LOGIN PASSWORD %L', made, p_verifier);
    INSERT INTO roles (name, kind, enrolled_at, enrolled_from) VALUES (made, 'student', lease_now(), address);
    PERFORM limit_role(made), grant_student_functions(made);
    RETURN made;
END $$;

-- Drop a role that makes room, if there is one; returns whether there was.
CREATE FUNCTION shoal.drop_idle_student(p_from text DEFAULT NULL) RETURNS boolean LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    leaving text := idle_student(p_from);
BEGIN
    IF leaving IS NULL THEN
        RETURN false;
    END IF;
    PERFORM drop_student(leaving), add_note_each_minute('dropped students', format('warning: very many students have enrolled: %s, who never handed anything in, made room for a '
        'new one. If the class is not that large, its token is misused', leaving));
    RETURN true;
END $$;

-- The role that makes room for a new one, of all or of those from one address. Null: all have completed work or came a moment ago. Where units
-- are leased, a connection without a result protects a role for ten minutes only.
CREATE FUNCTION shoal.idle_student(p_from text DEFAULT NULL) RETURNS text LANGUAGE sql SET search_path = shoal, pg_temp AS $$
    SELECT r.name FROM roles r
        JOIN (SELECT x.enrolled_from, count(*) AS roles FROM roles x WHERE x.kind = 'student' GROUP BY x.enrolled_from) crowd
            ON crowd.enrolled_from IS NOT DISTINCT FROM r.enrolled_from
        CROSS JOIN LATERAL (SELECT EXISTS (SELECT FROM pg_stat_activity a WHERE a.usename = r.name)
            OR EXISTS (SELECT FROM workers w JOIN worker_list l USING (id) WHERE w.role = r.name AND l.alive) AS here) presence
    WHERE r.kind = 'student' AND r.enrolled_at IS NOT NULL AND (p_from IS NULL OR r.enrolled_from = p_from)
        AND NOT EXISTS (SELECT FROM workers w WHERE w.role = r.name AND w.completed > 0)
        AND (NOT presence.here OR (r.enrolled_at < lease_now() - interval '10 min' AND EXISTS (SELECT FROM iterations)))
    ORDER BY presence.here, crowd.roles DESC, r.enrolled_at LIMIT 1
$$;

-- Drop a student's role and all that a later role of the same name would inherit. Attempts at units stay counted.
CREATE FUNCTION shoal.drop_student(p_role text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    PERFORM pg_terminate_backend(a.pid) FROM pg_stat_activity a WHERE a.usename = p_role;
    PERFORM requeue_units_of(w.id, 'its worker is gone', true) FROM workers w WHERE w.role = p_role;
    UPDATE failures SET role = format('%s, dismissed %s', p_role, nextval('unit_queue')) WHERE role = p_role;
    DELETE FROM standings WHERE role = p_role;
    DELETE FROM workers WHERE role = p_role AND completed = 0;
    DELETE FROM roles WHERE name = p_role;
    EXECUTE format('DROP SEQUENCE IF EXISTS %s', counter_of(p_role));
    EXECUTE format('DROP OWNED BY %I', p_role);
    EXECUTE format('DROP ROLE %I', p_role);
END $$;

-- --- how students are doing ---------------------------------------------------------------------------------

CREATE FUNCTION shoal.refuse_quarantined() RETURNS void LANGUAGE plpgsql STABLE SET search_path = shoal, pg_temp AS $$
DECLARE
    why text := (SELECT s.quarantined FROM standings s WHERE s.role = session_user);
BEGIN
    IF why IS NOT NULL THEN
        RAISE EXCEPTION 'you are in quarantine: %. The teacher can let you in again', why USING ERRCODE = 'SH003';
    END IF;
END $$;

CREATE FUNCTION shoal.quarantine(p_role text, p_why text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    UPDATE standings SET quarantined = p_why WHERE role = p_role AND quarantined IS NULL;
    IF FOUND THEN
        PERFORM add_note(format('warning: %s is in quarantine: %s. `shoal db grant student %s WHERE` lets it in again', p_role, p_why, p_role));
    END IF;
END $$;

-- Count a unit that failed at a role. After five in a row a student gets no work for a pause, which doubles each time. The owner's own workers are
-- counted and never paused.
CREATE FUNCTION shoal.count_failure(p_role text, p_epoch bigint, p_start bigint, p_reason text) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    s standings;
    pause interval;
BEGIN
    INSERT INTO failures AS f (epoch, start, role, reason, at, first_at) VALUES (p_epoch, p_start, p_role, p_reason, lease_now(), lease_now())
        ON CONFLICT (epoch, start, role) DO UPDATE
        SET reason = excluded.reason, at = excluded.at, times = f.times + 1;
    INSERT INTO standings AS t (role, failed_in_row, failed) VALUES (p_role, 1, 1) ON CONFLICT (role) DO UPDATE
        SET failed_in_row = t.failed_in_row + 1, failed = t.failed + 1 RETURNING * INTO s;
    IF s.failed_in_row >= 5 AND is_student(p_role) THEN
        pause := least(interval '5 min', interval '5 s' * power(2, least(s.failed_in_row - 5, 10)));
        UPDATE standings SET paused_until = lease_now() + pause WHERE role = p_role;
        IF s.failed_in_row IN (5, 8, 11) THEN
            PERFORM add_note(format('warning: %s units in a row failed at %s (%s): it gets no more for %s s', s.failed_in_row, p_role, left(coalesce(p_reason, 'no reason given'), 200),
                extract(epoch FROM pause)::integer));
        END IF;
    END IF;
END $$;

-- Count units whose results were used: for the roles that completed them, and against the students that failed them before. Only students are put
-- in quarantine.
CREATE FUNCTION shoal.count_completed(p_units bigint[]) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    s standings;
BEGIN
    INSERT INTO standings AS t (role, completed) SELECT w.role, count(*) FROM units u JOIN workers w ON w.id = u.worker WHERE u.id = ANY (p_units) GROUP BY w.role
        ON CONFLICT (role) DO UPDATE SET completed = t.completed + excluded.completed, failed_in_row = 0, paused_until = NULL;
    FOR s IN UPDATE standings t SET disproved = t.disproved + wrong.times FROM (
        SELECT f.role, count(*) AS times FROM failures f JOIN units u USING (epoch, start) JOIN workers w ON w.id = u.worker
            JOIN roles r ON r.name = f.role AND r.kind = 'student'
            WHERE u.id = ANY (p_units) AND w.role <> f.role GROUP BY f.role) wrong WHERE wrong.role = t.role RETURNING t.* LOOP
        IF s.disproved >= 3 AND s.disproved > s.completed THEN
            PERFORM quarantine(s.role, format('%s units failed there that others managed, last because of: %s', s.disproved,
                (SELECT left(coalesce(max(f.reason), 'no reason given'), 200) FROM failures f WHERE f.role = s.role)));
        END IF;
    END LOOP;
    DELETE FROM failures f USING units u WHERE u.id = ANY (p_units) AND f.epoch = u.epoch AND f.start = u.start;
END $$;

-- Why the calling student gets no work at the moment.
CREATE FUNCTION shoal.why_no_work() RETURNS text LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    SELECT format('%s units in a row failed here: there is no more work for %s s', s.failed_in_row, ceil(extract(epoch FROM s.paused_until - lease_now()))::integer)
        FROM standings s WHERE s.role = session_user AND s.paused_until > lease_now()
$$;

-- How the run has ended or was stopped; null while it goes on.
CREATE FUNCTION shoal.run_end() RETURNS text LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS
    $$ SELECT left(value #>> '{}', 100) FROM facts WHERE name = 'end' $$;
