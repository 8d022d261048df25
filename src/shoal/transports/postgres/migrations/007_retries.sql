-- A unit that everybody has tried in vain is tried again, instead of waiting for a student who never comes.

ALTER TABLE shoal.failures ADD COLUMN at timestamptz NOT NULL DEFAULT clock_timestamp();

-- What a student tried in vain is for the others who are here, until all have tried it or a lease's time has gone by.
CREATE FUNCTION shoal.may_try(p_epoch bigint, p_start bigint, p_lease_s double precision) RETURNS boolean
LANGUAGE sql STABLE SET search_path = shoal, pg_temp AS $$
    SELECT NOT EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start AND f.role = session_user
            AND f.at > clock_timestamp() - make_interval(secs => p_lease_s))
        OR NOT EXISTS (SELECT FROM worker_list l JOIN workers w USING (id) WHERE l.alive
            AND NOT EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start AND f.role = w.role))
$$;

-- As before, and it is known when.
CREATE OR REPLACE FUNCTION shoal.count_failure(p_role text, p_epoch bigint, p_start bigint, p_reason text) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    s standings;
    pause interval;
BEGIN
    IF NOT EXISTS (SELECT FROM roles r WHERE r.name = p_role AND r.kind = 'student') THEN
        RETURN;  -- the owner's own worker
    END IF;
    INSERT INTO failures (epoch, start, role, reason) VALUES (p_epoch, p_start, p_role, p_reason) ON CONFLICT (epoch, start, role) DO UPDATE SET reason = excluded.reason, at = excluded.at;
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

-- As before, with the new rule of who may try a unit again.
CREATE OR REPLACE FUNCTION shoal.claim(p_secret uuid, p_lease uuid, p_count integer, p_after bigint, p_reclaim boolean, p_again boolean)
RETURNS TABLE (id bigint, iteration bigint, epoch bigint, start bigint, batches bigint, attempts integer, place bigint, due_s double precision)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
    caller workers := worker_of(p_secret);
    present iterations;
    paused timestamptz := (SELECT s.paused_until FROM standings s WHERE s.role = session_user AND s.paused_until > clock_timestamp());
    room integer := least(p_count, 1000);
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
        FOR look IN 1 .. 2 LOOP
            ids := ARRAY(SELECT u.id FROM units u WHERE u.state = 'pending' AND u.place >= greatest(p_after, present.floor)
                AND (u.attempts = 0 OR may_try(u.epoch, u.start, present.lease_timeout_s))
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
