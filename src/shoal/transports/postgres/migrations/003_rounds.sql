-- A round is made of as many results as it needs. One that comes when they are there, while the coordinator makes the next weights of them, was
-- computed on weights that are as good as gone: it is late, and its unit is done again on the new ones.

CREATE OR REPLACE FUNCTION shoal.held(p_unit bigint, p_lease uuid) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
    SELECT EXISTS (SELECT FROM units u WHERE u.id = p_unit AND u.state = 'claimed' AND u.lease = p_lease AND u.deadline > clock_timestamp())
        AND NOT coalesce((SELECT enough(i) FROM iterations i ORDER BY i.iteration DESC LIMIT 1), false)
$$;

-- A unit's result: accepted while its lease is held, else dropped and counted, all in the transaction that uploaded it.
CREATE OR REPLACE FUNCTION shoal.submit(p_secret uuid, p_unit bigint, p_lease uuid, p_iteration bigint, p_header bytea, p_blobs uuid[], p_sizes bigint[], p_drop boolean)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = shoal, pg_temp AS $$
DECLARE
    caller workers := worker_of(p_secret);
    u units;
    outcome text;
    present iterations;
    most bigint := (SELECT c.max_header_bytes FROM coordinator c);
BEGIN
    PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
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
        ELSIF u.state = 'claimed' AND u.lease = p_lease THEN
            PERFORM put_back(p_unit, NULL, false);
        END IF;
        outcome := CASE WHEN u.state = 'cancelled' OR p_iteration < present.iteration THEN 'cancelled' ELSE 'late' END;
        UPDATE workers SET late = late + (outcome = 'late')::integer, cancelled = cancelled + (outcome = 'cancelled')::integer, seen_at = now(),
            last_unit = p_unit, last_lease = p_lease, last_outcome = outcome WHERE secret = p_secret;
    END IF;
    RETURN outcome;
END $$;
