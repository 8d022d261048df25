-- Every student has a role of their own, so what one of them does is counted with that one and costs nobody else more than a moment.
-- New: a class's role that may only make students' roles; limits on what a student may hold, ask and upload at a time; a pause for students
-- whose units fail one after the other, and quarantine for those who fail what others manage; clocks of leases that stop while nobody
-- coordinates; a unit is lent only where its result would come in time; a data set that students read piece by piece.
-- Error code SH003: the student is in quarantine.

ALTER TABLE shoal.roles DROP CONSTRAINT roles_kind_check;
ALTER TABLE shoal.roles ADD CONSTRAINT roles_kind_check CHECK (kind IN ('student', 'reader', 'coordinator', 'class'));
ALTER TABLE shoal.roles ADD COLUMN enrolled_at timestamptz;  -- null: granted by hand

-- The functions that a student's role may call. `shoal db init` fills it.
CREATE TABLE shoal.student_functions (
    name text PRIMARY KEY
);

-- How a student is doing. Rows come with the first failure or offence.
CREATE TABLE shoal.standings (
    role text PRIMARY KEY,
    completed bigint NOT NULL DEFAULT 0,
    failed_in_row integer NOT NULL DEFAULT 0,
    disproved integer NOT NULL DEFAULT 0,
    ended integer NOT NULL DEFAULT 0,
    paused_until timestamptz,
    quarantined text,
    slow_at timestamptz
);

-- Which student failed which piece of the data: others are asked for it next.
CREATE TABLE shoal.failures (
    epoch bigint NOT NULL,
    start bigint NOT NULL,
    role text NOT NULL,
    reason text,
    PRIMARY KEY (epoch, start, role)
);

-- What the coordinator should tell people. It deletes what it has told.
CREATE TABLE shoal.notes (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    note text NOT NULL
);

-- Bytes that a connection has uploaded in its present transaction. Nothing else bounds a transaction that is never committed.
CREATE UNLOGGED TABLE shoal.uploads (
    role text NOT NULL,
    pid integer NOT NULL,
    transaction xid8 NOT NULL,
    bytes bigint NOT NULL,
    PRIMARY KEY (role, pid)
) WITH (fillfactor = 50);

ALTER TABLE shoal.workers ADD COLUMN role text NOT NULL DEFAULT session_user, ADD COLUMN unit_s double precision;
ALTER TABLE shoal.units ADD COLUMN claimed_at timestamptz;
ALTER TABLE shoal.requests ADD COLUMN role text NOT NULL DEFAULT session_user;
ALTER TABLE shoal.coordinator ADD COLUMN beat_at timestamptz NOT NULL DEFAULT clock_timestamp();
CREATE INDEX workers_role ON shoal.workers (role);
CREATE INDEX requests_role ON shoal.requests (role);

-- --- students' roles ----------------------------------------------------------------------------------------

CREATE FUNCTION shoal.say(p_note text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    IF (SELECT count(*) FROM (SELECT FROM notes LIMIT 1000) told) < 1000 THEN
        INSERT INTO notes (note) VALUES (p_note);
        PERFORM pg_notify('shoal_inbox', '');
    END IF;
END $$;

-- The kind of the caller's role: `student`, `class`, `reader`, `coordinator`, or null.
CREATE FUNCTION shoal.kind_here() RETURNS text LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS
    'SELECT r.kind FROM roles r WHERE r.name = session_user';

CREATE FUNCTION shoal.is_student() RETURNS boolean LANGUAGE sql STABLE SET search_path = shoal, pg_temp AS
    'SELECT EXISTS (SELECT FROM roles r WHERE r.name = session_user AND r.kind = ''student'')';

-- What PostgreSQL can bound for a role. Only a superuser may bound temporary files: `shoal db init` tells where that is missing.
CREATE FUNCTION shoal.bound_role(p_role text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    EXECUTE format('ALTER ROLE %I NOINHERIT CONNECTION LIMIT 8', p_role);
    EXECUTE format('ALTER ROLE %I SET statement_timeout = ''10min''', p_role);
    IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        EXECUTE format('ALTER ROLE %I SET temp_file_limit = ''256MB''', p_role);
    ELSE
        EXECUTE format('GRANT %I TO CURRENT_USER', p_role);  -- so that the watchdog sees connections of the role, and may end them
    END IF;
END $$;

-- A role for one who comes with the class's token. The password was made by the student, and only its SCRAM verifier travels. Roles are the
-- whole server's: one that is there already is never touched, the new one gets another number.
CREATE FUNCTION shoal.enroll(p_name text, p_verifier text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    wanted text := 'student-' || lower(coalesce(p_name, 'one'));
    made text := wanted;
    counter integer := 1;
    unused text;
BEGIN
    IF wanted !~ '^student-[a-z0-9][a-z0-9._-]{0,39}$' OR p_verifier !~ '^SCRAM-SHA-256\$[0-9]{1,7}:[A-Za-z0-9+/=]{1,60}\$[A-Za-z0-9+/=]{44}:[A-Za-z0-9+/=]{44}$' THEN
        RAISE EXCEPTION 'a name has 1 to 40 letters, digits, dots, dashes and underscores, and a password comes as its SCRAM verifier' USING ERRCODE = 'SH002';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('shoal.enroll'));
    IF (SELECT count(*) FROM roles r WHERE r.enrolled_at > clock_timestamp() - interval '1 minute') >= 60 THEN
        RAISE EXCEPTION 'too many students are enrolling at this moment: try again in a minute' USING ERRCODE = 'SH002';
    END IF;
    IF (SELECT count(*) FROM roles r WHERE r.kind = 'student') >= 500 THEN
        -- Roles that nobody has worked under for an hour make room.
        FOR unused IN SELECT r.name FROM roles r WHERE r.enrolled_at < clock_timestamp() - interval '1 hour'
            AND NOT EXISTS (SELECT FROM workers w WHERE w.role = r.name) LOOP
            PERFORM dismiss(unused);
        END LOOP;
        IF (SELECT count(*) FROM roles r WHERE r.kind = 'student') >= 500 THEN
            RAISE EXCEPTION 'there are 500 students already' USING ERRCODE = 'SH002';
        END IF;
    END IF;
    WHILE EXISTS (SELECT FROM pg_roles WHERE rolname = made) LOOP
        counter := counter + 1;
        made := wanted || '-' || counter;
    END LOOP;
    EXECUTE format('CREATE ROLE %I LOGIN PASSWORD %L', made, p_verifier);
    INSERT INTO roles (name, kind, enrolled_at) VALUES (made, 'student', clock_timestamp());
    PERFORM bound_role(made), open_to_student(made);
    RETURN made;
END $$;

CREATE FUNCTION shoal.open_to_student(p_role text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    callable text;
BEGIN
    EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), p_role);
    EXECUTE format('GRANT USAGE ON SCHEMA shoal TO %I', p_role);
    FOR callable IN SELECT f.name FROM student_functions f LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION shoal.%I TO %I', callable, p_role);
    END LOOP;
END $$;

CREATE FUNCTION shoal.dismiss(p_role text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    DELETE FROM roles WHERE name = p_role;
    EXECUTE format('DROP OWNED BY %I', p_role);
    EXECUTE format('DROP ROLE %I', p_role);
END $$;

-- --- how students are doing -----------------------------------------------------------------------------------

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
        PERFORM say(format('warning: %s is in quarantine: %s. `shoal db grant student %s WHERE` lets it in again', p_role, p_why, p_role));
    END IF;
END $$;

-- A unit failed at a student. After five in a row it is asked again only after a pause, which is twice as long each time.
CREATE FUNCTION shoal.count_failure(p_role text, p_epoch bigint, p_start bigint, p_reason text) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    s standings;
    pause interval;
BEGIN
    IF NOT EXISTS (SELECT FROM roles r WHERE r.name = p_role AND r.kind = 'student') THEN
        RETURN;  -- the owner's own worker
    END IF;
    INSERT INTO failures VALUES (p_epoch, p_start, p_role, p_reason) ON CONFLICT (epoch, start, role) DO UPDATE SET reason = excluded.reason;
    INSERT INTO standings AS t (role, failed_in_row) VALUES (p_role, 1) ON CONFLICT (role) DO UPDATE SET failed_in_row = t.failed_in_row + 1 RETURNING * INTO s;
    IF s.failed_in_row >= 5 THEN
        pause := least(interval '5 min', interval '5 s' * power(2, least(s.failed_in_row - 5, 10)));
        UPDATE standings SET paused_until = clock_timestamp() + pause WHERE role = p_role;
        IF s.failed_in_row IN (5, 8, 11) THEN
            PERFORM say(format('warning: %s units in a row failed at %s (%s): it gets no more for %s s', s.failed_in_row, p_role, left(coalesce(p_reason, 'no reason given'), 200),
                extract(epoch FROM pause)::integer));
        END IF;
    END IF;
END $$;

-- Units whose results were used: those who did them are doing well, and those who failed them are disproved.
CREATE FUNCTION shoal.count_managed(p_units bigint[]) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    s standings;
BEGIN
    INSERT INTO standings AS t (role, completed) SELECT w.role, count(*) FROM units u JOIN workers w ON w.id = u.worker WHERE u.id = ANY (p_units) GROUP BY w.role
        ON CONFLICT (role) DO UPDATE SET completed = t.completed + excluded.completed, failed_in_row = 0, paused_until = NULL;
    FOR s IN UPDATE standings t SET disproved = t.disproved + wrong.times FROM (
        SELECT f.role, count(*) AS times FROM failures f JOIN units u USING (epoch, start) JOIN workers w ON w.id = u.worker
            WHERE u.id = ANY (p_units) AND w.role <> f.role GROUP BY f.role) wrong WHERE wrong.role = t.role RETURNING t.* LOOP
        IF s.disproved >= 3 AND s.disproved > s.completed THEN
            PERFORM quarantine(s.role, format('%s units failed there that others managed, last because of: %s', s.disproved,
                (SELECT left(coalesce(max(f.reason), 'no reason given'), 200) FROM failures f WHERE f.role = s.role)));
        END IF;
    END LOOP;
    DELETE FROM failures f USING units u WHERE u.id = ANY (p_units) AND f.epoch = u.epoch AND f.start = u.start;
END $$;

-- What the student who calls should know: why there is no work.
CREATE FUNCTION shoal.notice() RETURNS text LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    SELECT format('%s units in a row failed here: there is no more work for %s s', s.failed_in_row, ceil(extract(epoch FROM s.paused_until - clock_timestamp()))::integer)
        FROM standings s WHERE s.role = session_user AND s.paused_until > clock_timestamp()
$$;

-- Ends what a student may not do: leave a transaction open, keep the server busy, hold others up, take too much memory (`p_greedy`). Whoever
-- does it a fifth time is shut out.
CREATE FUNCTION shoal.watch(p_greedy integer[] DEFAULT '{}') RETURNS void
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
                WHERE w.datname = current_database() AND w.wait_event_type = 'Lock' AND w.query_start < clock_timestamp() - interval '5 s'
        )
        SELECT b.pid, b.usename::text AS role, b.kind, CASE
            WHEN b.pid = ANY (p_greedy) THEN 'it took more memory than a student may'
            WHEN b.pid IN (SELECT k.pid FROM blocking k) AND b.wait_event_type IS DISTINCT FROM 'Lock' THEN 'it held up others'
            WHEN b.state LIKE 'idle in transaction%' AND b.state_change < clock_timestamp() - interval '30 s' THEN 'it left a transaction open'
            WHEN b.state = 'active' AND b.wait_event_type IS DISTINCT FROM 'Client' AND b.wait_event_type IS DISTINCT FROM 'Lock'
                AND b.query_start < clock_timestamp() - interval '60 s' THEN 'it kept the server busy for a minute'
            WHEN b.xact_start < clock_timestamp() - interval '30 min' THEN 'a transaction took half an hour' END AS why
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

-- --- uploads and questions ------------------------------------------------------------------------------------

-- A transaction may upload four frames of the largest size: more than any message has.
CREATE OR REPLACE FUNCTION shoal.put_part(p_blob uuid, p_n integer, p_data bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    uploaded bigint;
BEGIN
    IF octet_length(p_data) > 4194304 OR p_n NOT BETWEEN 0 AND 65535 THEN
        RAISE EXCEPTION 'a part of a frame is too large, or one too many' USING ERRCODE = 'SH002';
    END IF;
    INSERT INTO uploads AS u VALUES (session_user, pg_backend_pid(), pg_current_xact_id(), octet_length(p_data) + 100) ON CONFLICT (role, pid) DO UPDATE
        SET bytes = excluded.bytes + CASE WHEN u.transaction = excluded.transaction THEN u.bytes ELSE 0 END, transaction = excluded.transaction
        RETURNING bytes INTO uploaded;
    IF uploaded > 4 * (SELECT c.max_frame_bytes FROM coordinator c) + 1048576 THEN
        RAISE EXCEPTION 'a message of more than % bytes', 4 * (SELECT c.max_frame_bytes FROM coordinator c) + 1048576 USING ERRCODE = 'SH002';
    END IF;
    INSERT INTO parts VALUES (p_blob, p_n, p_data);
END $$;

CREATE FUNCTION shoal.bound_questions() RETURNS trigger LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    IF (SELECT count(*) FROM requests r WHERE r.role = NEW.role) >= 16 AND EXISTS (SELECT FROM roles r WHERE r.name = NEW.role AND r.kind = 'student') THEN
        RAISE EXCEPTION 'a student asks 16 questions at a time at most' USING ERRCODE = 'SH002';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER bound_questions BEFORE INSERT ON shoal.requests FOR EACH ROW EXECUTE FUNCTION shoal.bound_questions();

-- --- leases ---------------------------------------------------------------------------------------------------

-- The time of leases. It stands still while nobody coordinates: who was at work then has lost nothing when the coordinator is back.
CREATE FUNCTION shoal.lease_now() RETURNS timestamptz LANGUAGE sql SET search_path = shoal, pg_temp AS
    'SELECT coalesce((SELECT least(clock_timestamp(), c.beat_at + interval ''5 s'') FROM coordinator c), clock_timestamp())';

-- For a coordinator that begins: what stood still goes on from here.
CREATE FUNCTION shoal.restart_lease_clock() RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    stood interval := clock_timestamp() - lease_now();
BEGIN
    UPDATE units SET deadline = deadline + stood, claimed_at = claimed_at + stood WHERE state = 'claimed' AND stood > interval '0';
END $$;

CREATE OR REPLACE FUNCTION shoal.beat(p_secret uuid, p_state text, p_figures text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    caller workers := worker_of(p_secret);
    present iterations;
    right_now timestamptz := lease_now();
    held bigint[];
    longest double precision;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    IF p_state !~ '^[ -~]{0,80}$' OR octet_length(p_figures) > 8192 THEN  -- people see it: nothing in it may steer a terminal
        RAISE EXCEPTION 'a sign of life that is too long, or not plain text' USING ERRCODE = 'SH002';
    END IF;
    SELECT * INTO present FROM iterations i ORDER BY i.iteration DESC LIMIT 1;
    IF p_state IN ('computing', 'sending') THEN
        held := ARRAY(SELECT u.id FROM units u WHERE u.state = 'claimed' AND u.worker = caller.id AND u.deadline > right_now FOR UPDATE SKIP LOCKED);
        UPDATE units SET deadline = right_now + make_interval(secs => present.lease_timeout_s) WHERE id = ANY (held);
        longest := (SELECT extract(epoch FROM right_now - min(u.claimed_at)) FROM units u WHERE u.id = ANY (held));
        IF longest > present.lease_timeout_s THEN
            PERFORM say_slow(caller.role, caller.name, longest, present.lease_timeout_s);
        END IF;
    END IF;
    UPDATE workers SET state = p_state, figures = p_figures::jsonb, seen_at = now(), left_at = NULL WHERE secret = p_secret;
END $$;

CREATE FUNCTION shoal.say_slow(p_role text, p_name text, p_took double precision, p_timeout double precision) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    INSERT INTO standings AS t (role, slow_at) VALUES (p_role, clock_timestamp()) ON CONFLICT (role) DO UPDATE SET slow_at = excluded.slow_at
        WHERE t.slow_at IS NULL OR t.slow_at < clock_timestamp() - interval '10 min';
    IF FOUND THEN
        PERFORM say(format('warning: %s has computed one unit for %s s, longer than the timeout of %s s. Its lease is renewed while it is seen at work; '
            'smaller units (batches_per_unit) or a longer lease_timeout_s suit this class better', p_name, p_took::integer, p_timeout::integer));
    END IF;
END $$;

-- As before, and the student is held to account: also for a result that could not be used, when nobody holds the unit any more.
CREATE OR REPLACE FUNCTION shoal.put_back(p_unit bigint, p_reason text, p_counts boolean) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    most integer := (SELECT i.max_retries FROM iterations i ORDER BY i.iteration DESC LIMIT 1);
    before units;
    responsible text;
    u units;
BEGIN
    SELECT * INTO before FROM units x WHERE x.id = p_unit;
    UPDATE units SET attempts = attempts + p_counts::integer, state = CASE WHEN p_counts AND attempts + 1 >= most THEN 'failed' ELSE 'pending' END,
        place = nextval('places'), lease = NULL, worker = NULL, deadline = NULL, claimed_at = NULL, reason = p_reason
        WHERE id = p_unit RETURNING * INTO u;
    IF p_counts THEN
        UPDATE workers SET failed = failed + (before.state = 'claimed')::integer WHERE id = before.worker RETURNING role INTO responsible;
        IF responsible IS NOT NULL THEN
            PERFORM count_failure(responsible, u.epoch, u.start, p_reason);
        END IF;
    END IF;
    IF u.state = 'failed' THEN
        DELETE FROM failures f WHERE f.epoch = u.epoch AND f.start = u.start;
        INSERT INTO contributions (kind, unit, iteration, epoch, start, batches, reason)
            VALUES ('failed', u.id, u.iteration, u.epoch, u.start, u.batches, p_reason);
        PERFORM pg_notify('shoal_inbox', '');
    ELSE
        PERFORM pg_notify('shoal_work', '');
    END IF;
END $$;

-- A name belongs to the role that brought it, and a student brings 64 at most.
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
    PERFORM refuse_quarantined(), pg_advisory_xact_lock(hashtext('shoal.enter'));
    UPDATE workers SET left_at = NULL, seen_at = now() WHERE secret = p_secret RETURNING name INTO holder;
    IF FOUND THEN
        RETURN holder.name;
    END IF;
    LOOP
        SELECT l.id, l.alive, w.role INTO holder FROM worker_list l JOIN workers w USING (id) WHERE l.name = tried;
        EXIT WHEN NOT FOUND OR (NOT holder.alive AND holder.role = session_user);
        counter := counter + 1;
        tried := CASE WHEN p_name IS NULL THEN 'worker-' ELSE left(p_name, 58) || '-' END || counter;
    END LOOP;
    IF holder.id IS NULL THEN
        IF (SELECT count(*) FROM workers) >= 10000 OR (is_student() AND (SELECT count(*) FROM workers w WHERE w.role = session_user) >= 64) THEN
            RAISE EXCEPTION 'there are too many workers already, of this student or in all' USING ERRCODE = 'SH002';
        END IF;
        INSERT INTO workers (name, secret, about) VALUES (tried, p_secret, p_about::jsonb);
    ELSE
        PERFORM put_back_all(holder.id, 'its worker is gone', true);
        UPDATE workers SET secret = p_secret, about = p_about::jsonb, state = 'joined', figures = '{}', joined_at = now(), seen_at = now(),
            left_at = NULL, last_unit = NULL, last_lease = NULL, last_outcome = NULL WHERE id = holder.id;
    END IF;
    RETURN tried;
END $$;

CREATE OR REPLACE FUNCTION shoal.reclaim() RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp SET enable_seqscan = off AS $$
DECLARE
    right_now timestamptz := lease_now();
    expired bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('shoal.reclaim')) THEN
        RETURN;
    END IF;
    FOR expired IN SELECT u.id FROM units u WHERE u.state = 'claimed' AND u.deadline <= right_now
        ORDER BY u.deadline, u.place LIMIT 100 FOR UPDATE SKIP LOCKED LOOP
        PERFORM put_back(expired, 'no result in time', true);
    END LOOP;
END $$;

-- Whether the round will have its results before a worker that takes so long could finish another: its work would be in vain. A result is
-- expected when its worker usually has it; one that is overdue is not waited for. Where a unit takes less than a fifth of a second, waiting
-- would cost more than it saves.
CREATE FUNCTION shoal.will_be_enough(p_present shoal.iterations, p_unit_s double precision) RETURNS boolean
LANGUAGE sql SET search_path = shoal, pg_temp SET enable_seqscan = off AS $$
    SELECT p_present.quorum IS NOT NULL AND coalesce(p_unit_s, 0) >= 0.2 AND p_present.quorum <=
        (SELECT count(*) FROM units u WHERE u.iteration = p_present.iteration AND u.state = 'completed')
        + (SELECT count(*) FROM units u JOIN workers w ON w.id = u.worker WHERE u.state = 'claimed' AND u.iteration = p_present.iteration
            AND clock_timestamp() < u.claimed_at + make_interval(secs => 0.05 + 1.5 * w.unit_s)
            AND u.claimed_at + make_interval(secs => w.unit_s) < clock_timestamp() + make_interval(secs => p_unit_s))
$$;

-- Units that one worker keeps for itself while others have nothing to do: held longer than the timeout in all, and four times as long as usual.
CREATE FUNCTION shoal.free_hostage(p_present shoal.iterations) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    longest interval := make_interval(secs => greatest(p_present.lease_timeout_s, 4 * coalesce((SELECT avg(w.unit_s) FROM workers w), 0)));
    hostage bigint := (SELECT u.id FROM units u JOIN workers w ON w.id = u.worker WHERE u.state = 'claimed' AND w.role <> session_user
        AND u.claimed_at < lease_now() - longest ORDER BY u.claimed_at LIMIT 1);
BEGIN
    PERFORM FROM units u WHERE u.id = hostage AND u.state = 'claimed' FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        PERFORM put_back(hostage, 'it was held for longer than others need, while they had nothing to do', true);
    END IF;
END $$;

-- As before, and: a student holds eight units at most; one that fails again and again waits; a unit that failed at a student goes to others
-- first; and a unit is lent only where its result would come in time.
CREATE OR REPLACE FUNCTION shoal.claim(p_secret uuid, p_lease uuid, p_count integer, p_after bigint, p_reclaim boolean, p_again boolean)
RETURNS TABLE (id bigint, iteration bigint, epoch bigint, start bigint, batches bigint, attempts integer, place bigint, due_s double precision)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
    caller workers := worker_of(p_secret);
    present iterations;
    paused timestamptz := (SELECT s.paused_until FROM standings s WHERE s.role = session_user AND s.paused_until > clock_timestamp());
    room integer := least(p_count, 1000);
    alone boolean;
    ids bigint[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true), refuse_quarantined();
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
    IF is_student() THEN
        room := least(room, 8 - (SELECT count(*) FROM units u JOIN workers w ON w.id = u.worker WHERE u.state = 'claimed' AND w.role = session_user));
    END IF;
    -- With enough results for the coordinator to make a version of, more would come too late: there is work again when it has.
    IF paused IS NULL AND room > 0 AND NOT enough(present) AND NOT will_be_enough(present, caller.unit_s) THEN
        alone := NOT EXISTS (SELECT FROM worker_list l JOIN workers w USING (id) WHERE l.alive AND w.role <> session_user);
        FOR look IN 1 .. 2 LOOP
            ids := ARRAY(SELECT u.id FROM units u WHERE u.state = 'pending' AND u.place >= greatest(p_after, present.floor)
                AND (alone OR u.attempts = 0 OR NOT EXISTS (SELECT FROM failures f WHERE f.epoch = u.epoch AND f.start = u.start AND f.role = session_user))
                ORDER BY u.place LIMIT room FOR UPDATE SKIP LOCKED);
            EXIT WHEN cardinality(ids) > 0;
            p_after := 0;
            PERFORM reclaim(), free_hostage(present);
        END LOOP;
    END IF;
    IF cardinality(ids) > 0 THEN
        RETURN QUERY UPDATE units u SET state = 'claimed', lease = p_lease, worker = caller.id, claimed_at = lease_now(),
            deadline = lease_now() + make_interval(secs => present.lease_timeout_s)
            WHERE u.id = ANY (ids) RETURNING u.id, u.iteration, u.epoch, u.start, u.batches, u.attempts, u.place, NULL::double precision;
    ELSE
        RETURN QUERY SELECT NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::integer, NULL::bigint,
            extract(epoch FROM least(min(u.deadline), min(u.claimed_at + make_interval(secs => 0.06 + 1.5 * w.unit_s)) FILTER (WHERE
                present.quorum IS NOT NULL AND clock_timestamp() < u.claimed_at + make_interval(secs => 0.05 + 1.5 * w.unit_s)), paused)
                - clock_timestamp())::double precision
            FROM units u LEFT JOIN workers w ON w.id = u.worker WHERE u.state = 'claimed';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION shoal.held(p_unit bigint, p_lease uuid) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    SELECT EXISTS (SELECT FROM units u WHERE u.id = p_unit AND u.state = 'claimed' AND u.lease = p_lease AND u.deadline > lease_now())
        AND NOT coalesce((SELECT enough(i) FROM iterations i ORDER BY i.iteration DESC LIMIT 1), false)
$$;

CREATE OR REPLACE FUNCTION shoal.submit(p_secret uuid, p_unit bigint, p_lease uuid, p_iteration bigint, p_header bytea, p_blobs uuid[], p_sizes bigint[], p_drop boolean)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    caller workers := worker_of(p_secret);
    u units;
    outcome text;
    present iterations;
    most bigint := (SELECT c.max_header_bytes FROM coordinator c);
    took double precision;
BEGIN
    PERFORM set_config('idle_in_transaction_session_timeout', '10s', true), refuse_quarantined();
    IF octet_length(p_header) > most THEN
        RAISE EXCEPTION 'a header of % bytes; at most % are allowed', octet_length(p_header), most USING ERRCODE = 'SH002';
    END IF;
    IF EXISTS (SELECT FROM iterations i WHERE i.quorum IS NOT NULL) THEN
        PERFORM pg_advisory_xact_lock(hashtext('shoal.submit'));  -- of two that come at once, the second sees whether the first was enough
    END IF;
    SELECT * INTO present FROM iterations i ORDER BY i.iteration DESC LIMIT 1;
    IF caller.last_unit = p_unit AND caller.last_lease = p_lease THEN
        outcome := caller.last_outcome;
    ELSIF NOT p_drop AND NOT enough(present) THEN
        UPDATE units SET state = 'completed', deadline = NULL
            WHERE id = p_unit AND state = 'claimed' AND lease = p_lease AND deadline > lease_now() RETURNING * INTO u;
        IF FOUND THEN
            PERFORM own(p_blobs, p_sizes);
            INSERT INTO contributions (kind, worker, unit, iteration, epoch, start, batches, header, frames)
                VALUES ('delivered', caller.name, u.id, u.iteration, u.epoch, u.start, u.batches, p_header, p_blobs);
            took := extract(epoch FROM clock_timestamp() - u.claimed_at);
            UPDATE workers SET completed = completed + 1, seen_at = now(), last_unit = p_unit, last_lease = p_lease, last_outcome = 'accepted',
                unit_s = coalesce(0.7 * unit_s, 0.7 * took) + 0.3 * took WHERE secret = p_secret;
            PERFORM pg_notify('shoal_inbox', '');
            RETURN 'accepted';
        END IF;
    END IF;
    DELETE FROM parts WHERE blob = ANY (p_blobs) AND NOT EXISTS (SELECT FROM blobs b WHERE b.id = parts.blob);
    IF outcome IS NULL THEN
        SELECT * INTO u FROM units WHERE id = p_unit FOR UPDATE;
        IF u.state = 'claimed' AND u.lease = p_lease AND u.deadline <= lease_now() THEN
            PERFORM put_back(p_unit, 'no result in time', true);
        ELSIF u.state = 'claimed' AND u.lease = p_lease THEN
            PERFORM put_back(p_unit, NULL, false);
        END IF;
        outcome := CASE WHEN u.state = 'cancelled' OR p_iteration < present.iteration THEN 'cancelled' ELSE 'late' END;
        UPDATE workers SET late = late + (outcome = 'late')::integer, cancelled = cancelled + (outcome = 'cancelled')::integer, seen_at = now(),
            last_unit = p_unit, last_lease = p_lease, last_outcome = outcome WHERE secret = p_secret;
    END IF;
    RETURN outcome;
END $$;

-- --- a data set in pieces -------------------------------------------------------------------------------------

CREATE TABLE shoal.pieces (
    number integer PRIMARY KEY,
    data bytea NOT NULL
);
ALTER TABLE shoal.pieces ALTER data SET STORAGE EXTERNAL;

CREATE FUNCTION shoal.piece(p_number integer) RETURNS bytea LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS
    'SELECT data FROM pieces WHERE number = p_number';
