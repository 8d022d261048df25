-- Weights are on their way for as long as they are written and read, so what is handed out is stored in rows that fill a page each, and not as
-- TOAST, which cuts every value into pieces of 2 kB with an index of their own: half the time to write, and a third to delete. So many rows
-- are not looked up in `flyers` one by one; who deletes a flyer deletes its parts.
TRUNCATE shoal.replies, shoal.weights, shoal.flyer_parts, shoal.flyers;
ALTER TABLE shoal.flyer_parts DROP CONSTRAINT flyer_parts_flyer_fkey;
ALTER TABLE shoal.flyer_parts ALTER data SET STORAGE PLAIN;
ALTER TABLE shoal.flyer_parts SET (toast_tuple_target = 8160);
ALTER TABLE shoal.flyer_parts SET (autovacuum_vacuum_threshold = 2000);

CREATE OR REPLACE FUNCTION shoal.orphans() RETURNS TABLE (what text, id uuid, uses bigint, found bigint)
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
    UNION ALL SELECT 'flyer part', p.flyer, NULL, count(*) FROM flyer_parts p WHERE NOT EXISTS (SELECT FROM flyers f WHERE f.id = p.flyer)
        GROUP BY p.flyer
$$;
