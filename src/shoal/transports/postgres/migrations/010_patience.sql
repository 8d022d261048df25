-- Where nobody is at work who manages units, a crowd of new roles that fail everything gave units up before anybody else had tried them. Now
-- such a unit waits for somebody for four leases' time; and one that reliable students fail is tried by each of them, or by as many as
-- attempts count. shoal/coordinator/leases.py says the same.

-- How long a unit that was tried in vain waits for somebody who manages others, in seconds.
CREATE FUNCTION shoal.patience_s(p_present shoal.iterations) RETURNS double precision LANGUAGE sql IMMUTABLE SET search_path = shoal, pg_temp AS
    'SELECT 4 * p_present.lease_timeout_s';

-- What somebody tried in vain is for the others who are at work, until all have tried it or a lease's time has gone by. A unit that was tried
-- often enough comes back once in a lease's time.
CREATE OR REPLACE FUNCTION shoal.may_try(p_epoch bigint, p_start bigint, p_lease_s double precision) RETURNS boolean
LANGUAGE sql STABLE SET search_path = shoal, pg_temp AS $$
    SELECT NOT EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start AND f.role = session_user
            AND f.at > clock_timestamp() - make_interval(secs => p_lease_s))
        OR ((SELECT sum(f.times) FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start)
                < (SELECT i.max_retries FROM iterations i ORDER BY i.iteration DESC LIMIT 1)
            AND NOT EXISTS (SELECT FROM at_work a
                WHERE NOT EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start AND f.role = a.role)))
$$;

-- Whether a unit was tried in vain as often as it may be. Whose attempts count depends on who is there to show that it can be done.
CREATE OR REPLACE FUNCTION shoal.is_hopeless(p_epoch bigint, p_start bigint, p_attempts integer, p_present shoal.iterations) RETURNS boolean
LANGUAGE plpgsql SET search_path = shoal, pg_temp AS $$
DECLARE
    most integer := p_present.max_retries;
    has_waited boolean;
    believed record;
BEGIN
    IF p_attempts < most THEN
        RETURN false;
    END IF;
    SELECT coalesce(bool_or(f.first_at <= clock_timestamp() - make_interval(secs => patience_s(p_present))), false) INTO has_waited
        FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start;
    IF NOT EXISTS (SELECT FROM at_work a WHERE a.reliable) THEN
        RETURN has_waited;
    END IF;
    SELECT p_attempts - coalesce(sum(f.times) FILTER (WHERE NOT coalesce(s.completed > s.failed, false)), 0) AS attempts,
        count(*) FILTER (WHERE s.completed > s.failed) AS roles INTO believed
        FROM failures f LEFT JOIN standings s USING (role) WHERE f.epoch = p_epoch AND f.start = p_start;
    RETURN believed.attempts >= most AND (has_waited OR believed.roles >= most OR NOT EXISTS (SELECT FROM at_work a
        WHERE a.reliable AND NOT EXISTS (SELECT FROM failures f WHERE f.epoch = p_epoch AND f.start = p_start AND f.role = a.role)));
END $$;

-- As before, and people are told of a unit that waits for somebody.
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
        RETURN;
    END IF;
    PERFORM pg_notify('shoal_work', '');
    IF p_counts AND u.attempts >= present.max_retries AND NOT EXISTS (SELECT FROM at_work a WHERE a.reliable) THEN
        PERFORM say_seldom('waiting', format('warning: a unit was tried in vain %s times, and nobody who is here has managed one yet: %s. Such units wait %s s '
            'for somebody who can do them', u.attempts, left(coalesce(p_reason, 'no reason given'), 200), patience_s(present)::integer));
    END IF;
END $$;
