-- Anybody with the class's token makes roles, and nobody may use up the room of those who come later. A role under which nothing was handed
-- in makes room: one that is not here before one that is, of the address with most roles before others, the oldest first. A role with
-- accepted work stays. One address has three quarters of the room at most, so a school behind one address has enough.

ALTER TABLE shoal.roles ADD COLUMN enrolled_from text;  -- null: granted by hand, or enrolled before this was known

-- Of what happens often: when people were last told of it, and how often it has happened since.
CREATE TABLE shoal.tellings (
    subject text PRIMARY KEY,
    told_at timestamptz NOT NULL DEFAULT '-infinity',
    untold integer NOT NULL DEFAULT 0
);

-- Tell people at once, and then once a minute, with how often it happened meanwhile. Nobody waits for somebody else who tells.
CREATE FUNCTION shoal.say_seldom(p_subject text, p_note text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    told tellings;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('shoal.telling')) THEN
        RETURN;
    END IF;
    INSERT INTO tellings AS t (subject, untold) VALUES (p_subject, 1) ON CONFLICT (subject) DO UPDATE SET untold = t.untold + 1 RETURNING * INTO told;
    IF told.told_at < clock_timestamp() - interval '1 minute' THEN
        PERFORM say(p_note || CASE WHEN told.untold > 1 THEN format(' (and %s times before, since this was last told)', told.untold - 1) ELSE '' END);
        UPDATE tellings SET told_at = clock_timestamp(), untold = 0 WHERE subject = p_subject;
    END IF;
END $$;

-- The role that makes room for a new one: any, or one that was enrolled from this address. Null: all have done something, or came a moment
-- ago. Where units are lent, being connected without a result is enough for ten minutes, and no longer.
CREATE FUNCTION shoal.spare_role(p_from text DEFAULT NULL) RETURNS text LANGUAGE sql SET search_path = shoal, pg_temp AS $$
    SELECT r.name FROM roles r
        JOIN (SELECT x.enrolled_from, count(*) AS roles FROM roles x WHERE x.kind = 'student' GROUP BY x.enrolled_from) crowd
            ON crowd.enrolled_from IS NOT DISTINCT FROM r.enrolled_from
        CROSS JOIN LATERAL (SELECT EXISTS (SELECT FROM pg_stat_activity a WHERE a.usename = r.name)
            OR EXISTS (SELECT FROM workers w JOIN worker_list l USING (id) WHERE w.role = r.name AND l.alive) AS here) presence
    WHERE r.kind = 'student' AND r.enrolled_at IS NOT NULL AND (p_from IS NULL OR r.enrolled_from = p_from)
        AND NOT EXISTS (SELECT FROM workers w WHERE w.role = r.name AND w.completed > 0)
        AND (NOT presence.here OR (r.enrolled_at < clock_timestamp() - interval '10 min' AND EXISTS (SELECT FROM iterations)))
    ORDER BY presence.here, crowd.roles DESC, r.enrolled_at LIMIT 1
$$;

-- As before, and nothing is left that a later role of the same name would inherit. Attempts at units stay counted.
CREATE OR REPLACE FUNCTION shoal.dismiss(p_role text) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
BEGIN
    PERFORM pg_terminate_backend(a.pid) FROM pg_stat_activity a WHERE a.usename = p_role;
    PERFORM put_back_all(w.id, 'its worker is gone', true) FROM workers w WHERE w.role = p_role;
    UPDATE failures SET role = format('%s, dismissed %s', p_role, nextval('places')) WHERE role = p_role;
    DELETE FROM standings WHERE role = p_role;
    DELETE FROM workers WHERE role = p_role AND completed = 0;
    DELETE FROM roles WHERE name = p_role;
    EXECUTE format('DROP OWNED BY %I', p_role);
    EXECUTE format('DROP ROLE %I', p_role);
END $$;

-- Let a role make room, where there is one that can; whether there was.
CREATE FUNCTION shoal.make_room(p_from text DEFAULT NULL) RETURNS boolean LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    leaving text := spare_role(p_from);
BEGIN
    IF leaving IS NULL THEN
        RETURN false;
    END IF;
    PERFORM dismiss(leaving), say_seldom('room', format('warning: very many students have enrolled: %s, who never handed anything in, made room for a '
        'new one. If the class is not so large, somebody misuses its token', leaving));
    RETURN true;
END $$;

-- As before, and a flood of new roles takes room from itself only. How fast roles can be made is no bound any more: whoever makes very many
-- would keep everybody else from enrolling.
CREATE OR REPLACE FUNCTION shoal.enroll(p_name text, p_verifier text) RETURNS text
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
    IF (SELECT count(*) FROM roles r WHERE r.kind = 'student' AND r.enrolled_from = address) >= 375 AND NOT make_room(address) THEN
        RAISE EXCEPTION 'there are 375 students from your address already, and all are at work: ask the teacher for a role (`shoal db grant`)' USING ERRCODE = 'SH002';
    END IF;
    IF (SELECT count(*) FROM roles r WHERE r.kind = 'student') >= 500 AND NOT make_room() THEN
        RAISE EXCEPTION 'there are 500 students already, and all are at work: ask the teacher for a role (`shoal db grant`)' USING ERRCODE = 'SH002';
    END IF;
    WHILE EXISTS (SELECT FROM pg_roles WHERE rolname = made) LOOP
        counter := counter + 1;
        made := wanted || '-' || counter;
    END LOOP;
    EXECUTE format('CREATE ROLE %I LOGIN PASSWORD %L', made, p_verifier);
    INSERT INTO roles (name, kind, enrolled_at, enrolled_from) VALUES (made, 'student', clock_timestamp(), address);
    PERFORM bound_role(made), open_to_student(made);
    RETURN made;
END $$;

-- Whoever comes with the class's token needs a moment to enrol. One who stays keeps others out, since there are few such connections.
CREATE FUNCTION shoal.clear_doorway(p_longest_s double precision DEFAULT 15) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
BEGIN
    PERFORM pg_terminate_backend(a.pid) FROM pg_stat_activity a JOIN roles r ON r.name = a.usename AND r.kind = 'class'
        WHERE a.datname = current_database() AND a.backend_start < clock_timestamp() - make_interval(secs => p_longest_s);
END $$;

-- As before, and a student brings 16 names at most: all students together leave room for more.
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
        IF (SELECT count(*) FROM workers) >= 10000 OR (is_student() AND (SELECT count(*) FROM workers w WHERE w.role = session_user) >= 16) THEN
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
