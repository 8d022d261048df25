-- Anybody with the class's token makes roles, so a crowd of new ones that fail everything must not use up the attempts at units. As long as
-- somebody is at work who manages more units than it fails, only what such people try in vain counts; where nobody has managed any yet, a unit
-- also waits, for a lease's time, for those who have not failed it. A unit that was held for too long is taken away, and people are told.
-- shoal/coordinator/leases.py says the same.

ALTER TABLE shoal.standings ADD COLUMN failed bigint NOT NULL DEFAULT 0;
ALTER TABLE shoal.failures ADD COLUMN times integer NOT NULL DEFAULT 1, ADD COLUMN first_at timestamptz NOT NULL DEFAULT clock_timestamp();

-- Whose workers are here, without those that failed too many units in a row.
CREATE VIEW shoal.at_work AS
    SELECT DISTINCT w.role, coalesce(s.completed > s.failed, false) AS reliable
    FROM shoal.worker_list l JOIN shoal.workers w USING (id) LEFT JOIN shoal.standings s ON s.role = w.role
    WHERE l.alive AND s.quarantined IS NULL AND coalesce(s.failed_in_row, 0) < 5;

-- What somebody tried in vain is for the others who are at work, until all have tried it or a lease's time has gone by.
CREATE OR REPLACE FUNCTION shoal.may_try(p_epoch bigint, p_start bigint, p_lease_s double precision) RETURNS boolean
LANGUAGE sql STABLE SET search_path = shoal, pg_temp AS $$
    SELECT NOT EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start AND f.role = session_user
            AND f.at > clock_timestamp() - make_interval(secs => p_lease_s))
        OR NOT EXISTS (SELECT FROM at_work a
            WHERE NOT EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start AND f.role = a.role))
$$;

-- Whether a unit was tried in vain as often as it may be. Whose attempts count depends on who is there to show that it can be done.
CREATE FUNCTION shoal.is_hopeless(p_epoch bigint, p_start bigint, p_attempts integer, p_present shoal.iterations) RETURNS boolean
LANGUAGE sql SET search_path = shoal, pg_temp AS $$
    SELECT p_attempts >= p_present.max_retries AND CASE
        WHEN EXISTS (SELECT FROM at_work a WHERE a.reliable) THEN p_present.max_retries <= p_attempts - coalesce((
            SELECT sum(f.times) FROM failures f LEFT JOIN standings s USING (role)
                WHERE f.epoch = p_epoch AND f.start = p_start AND NOT coalesce(s.completed > s.failed, false)), 0)
        ELSE EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start
                AND f.first_at <= clock_timestamp() - make_interval(secs => p_present.lease_timeout_s))
            OR NOT EXISTS (SELECT FROM at_work a
                WHERE NOT EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start AND f.role = a.role))
        END
$$;

-- As before, and it is counted how often, also for the owner's own workers. Those are never made to wait.
CREATE OR REPLACE FUNCTION shoal.count_failure(p_role text, p_epoch bigint, p_start bigint, p_reason text) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    s standings;
    pause interval;
BEGIN
    INSERT INTO failures AS f (epoch, start, role, reason) VALUES (p_epoch, p_start, p_role, p_reason) ON CONFLICT (epoch, start, role) DO UPDATE
        SET reason = excluded.reason, at = excluded.at, times = f.times + 1;
    INSERT INTO standings AS t (role, failed_in_row, failed) VALUES (p_role, 1, 1) ON CONFLICT (role) DO UPDATE
        SET failed_in_row = t.failed_in_row + 1, failed = t.failed + 1 RETURNING * INTO s;
    IF s.failed_in_row >= 5 AND EXISTS (SELECT FROM roles r WHERE r.name = p_role AND r.kind = 'student') THEN
        pause := least(interval '5 min', interval '5 s' * power(2, least(s.failed_in_row - 5, 10)));
        UPDATE standings SET paused_until = clock_timestamp() + pause WHERE role = p_role;
        IF s.failed_in_row IN (5, 8, 11) THEN
            PERFORM say(format('warning: %s units in a row failed at %s (%s): it gets no more for %s s', s.failed_in_row, p_role, left(coalesce(p_reason, 'no reason given'), 200),
                extract(epoch FROM pause)::integer));
        END IF;
    END IF;
END $$;

-- As before, and only students are put in quarantine: the owner's own workers have no teacher to let them in again.
CREATE OR REPLACE FUNCTION shoal.count_managed(p_units bigint[]) RETURNS void LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
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

-- As before, with the new rule of when a unit is given up. The unit is locked before its worker's row is changed, as everywhere.
CREATE OR REPLACE FUNCTION shoal.put_back(p_unit bigint, p_reason text, p_counts boolean) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    present iterations;
    before units;
    responsible text;
    u units;
BEGIN
    SELECT * INTO present FROM iterations i ORDER BY i.iteration DESC LIMIT 1;
    SELECT * INTO before FROM units x WHERE x.id = p_unit FOR UPDATE;
    IF p_counts THEN
        UPDATE workers SET failed = failed + (before.state = 'claimed')::integer WHERE id = before.worker RETURNING role INTO responsible;
        IF responsible IS NOT NULL THEN
            PERFORM count_failure(responsible, before.epoch, before.start, p_reason);
        END IF;
    END IF;
    UPDATE units SET attempts = attempts + p_counts::integer,
        state = CASE WHEN p_counts AND is_hopeless(epoch, start, attempts + 1, present) THEN 'failed' ELSE 'pending' END,
        place = nextval('places'), lease = NULL, worker = NULL, deadline = NULL, claimed_at = NULL, reason = p_reason
        WHERE id = p_unit RETURNING * INTO u;
    IF u.state = 'failed' THEN
        DELETE FROM failures f WHERE f.epoch = u.epoch AND f.start = u.start;
        INSERT INTO contributions (kind, unit, iteration, epoch, start, batches, reason)
            VALUES ('failed', u.id, u.iteration, u.epoch, u.start, u.batches, p_reason);
        PERFORM pg_notify('shoal_inbox', '');
    ELSE
        PERFORM pg_notify('shoal_work', '');
    END IF;
END $$;

-- As before, and people are told. What is usual is the middle of what workers need: one that takes for ever moves a mean, and not that.
CREATE OR REPLACE FUNCTION shoal.free_hostage(p_present shoal.iterations) RETURNS void
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    longest double precision := greatest(p_present.lease_timeout_s,
        4 * coalesce((SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY w.unit_s) FROM workers w WHERE w.unit_s IS NOT NULL), 0));
    hostage record;
BEGIN
    SELECT u.id, w.name, extract(epoch FROM lease_now() - u.claimed_at)::integer AS held_s INTO hostage FROM units u JOIN workers w ON w.id = u.worker
        WHERE u.state = 'claimed' AND w.role <> session_user AND u.claimed_at < lease_now() - make_interval(secs => longest)
        ORDER BY u.claimed_at LIMIT 1;
    PERFORM FROM units u WHERE u.id = hostage.id AND u.state = 'claimed' FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        PERFORM put_back(hostage.id, 'it was held for longer than others need, while they had nothing to do', true);
        PERFORM say(format('warning: %s has held a unit for %s s, longer than others need, and somebody else has nothing to do: the unit is taken '
            'away from %s. Smaller units (batches_per_unit) suit slow students', hostage.name, hostage.held_s, hostage.name));
    END IF;
END $$;
