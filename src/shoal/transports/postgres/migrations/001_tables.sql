-- What a run keeps. Everything is in one schema, so that a database holds one run and `DROP SCHEMA` is a clean end.
-- Tables that only hold what the coordinator can hand out again are UNLOGGED: they are empty after a crash of the server, and it fills them anew.

CREATE TABLE shoal.roles (
    name text PRIMARY KEY,
    kind text NOT NULL CHECK (kind IN ('student', 'reader', 'coordinator'))
);

-- The one who may coordinate. `id` is the key: every transaction of a coordinator holds FOR KEY SHARE on it, which signs of life
-- (alive_at) pass and a successor (a new id) waits for.
CREATE TABLE shoal.coordinator (
    id uuid PRIMARY KEY,
    only_one boolean NOT NULL DEFAULT true UNIQUE CHECK (only_one),
    host text NOT NULL,
    pid integer NOT NULL,
    alive_at timestamptz NOT NULL,
    max_frame_bytes bigint NOT NULL,
    max_header_bytes bigint NOT NULL
) WITH (fillfactor = 20);

CREATE TABLE shoal.run (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    header bytea NOT NULL,
    frames uuid[] NOT NULL,
    silence_s double precision NOT NULL,
    begun_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE shoal.facts (
    name text PRIMARY KEY,
    value jsonb NOT NULL
);

-- --- frames ---------------------------------------------------------------------------------------------

-- What workers send and what must survive. `uses` counts the rows that hold the blob; the last one to let go deletes it. A part without a
-- blob cannot be committed, so an upload that nobody owns in the end leaves nothing behind.
CREATE TABLE shoal.blobs (
    id uuid PRIMARY KEY,
    bytes bigint NOT NULL,
    uses integer NOT NULL CHECK (uses >= 0)
) WITH (fillfactor = 70);

CREATE TABLE shoal.parts (
    blob uuid NOT NULL REFERENCES shoal.blobs ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED,
    n integer NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (blob, n)
);
ALTER TABLE shoal.parts ALTER data SET STORAGE EXTERNAL;

-- What the coordinator hands out, each frame once, however many read it.
CREATE UNLOGGED TABLE shoal.flyers (
    id uuid PRIMARY KEY,
    bytes bigint NOT NULL
);

CREATE UNLOGGED TABLE shoal.flyer_parts (
    flyer uuid NOT NULL REFERENCES shoal.flyers ON DELETE CASCADE,
    n integer NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (flyer, n)
);
ALTER TABLE shoal.flyer_parts ALTER data SET STORAGE EXTERNAL;

-- --- questions and answers --------------------------------------------------------------------------------

CREATE TABLE shoal.requests (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    peer uuid NOT NULL UNIQUE,
    number bigint NOT NULL,
    header bytea NOT NULL,
    frames uuid[] NOT NULL,
    too_large text,
    at timestamptz NOT NULL DEFAULT now()
);

CREATE UNLOGGED TABLE shoal.replies (
    peer uuid PRIMARY KEY,
    number bigint NOT NULL,
    header bytea NOT NULL,
    frames uuid[] NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);

-- --- the board of units -----------------------------------------------------------------------------------

CREATE TABLE shoal.workers (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    secret uuid NOT NULL UNIQUE,
    about jsonb NOT NULL,
    state text NOT NULL DEFAULT 'joined',
    figures jsonb NOT NULL DEFAULT '{}',
    joined_at timestamptz NOT NULL DEFAULT now(),
    seen_at timestamptz NOT NULL DEFAULT now(),
    left_at timestamptz,
    completed bigint NOT NULL DEFAULT 0,
    late bigint NOT NULL DEFAULT 0,
    cancelled bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    last_unit bigint,
    last_lease uuid,
    last_outcome text
) WITH (fillfactor = 50);

-- The newest row is the one that counts. Rows are added and deleted, never changed: the newest is found at once, however many dead ones
-- a long transaction keeps.
CREATE TABLE shoal.iterations (
    iteration bigint PRIMARY KEY,
    floor bigint NOT NULL,
    lease_timeout_s double precision NOT NULL,
    max_retries integer NOT NULL,
    quorum bigint
);

CREATE SEQUENCE shoal.places;

-- A unit that is pending again takes a new place at the end, so what a worker has passed by does not come to life behind it, and it looks for
-- the next from where it was: the dead rows before that are never walked through.
CREATE TABLE shoal.units (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    iteration bigint NOT NULL,
    epoch bigint NOT NULL,
    start bigint NOT NULL,
    batches bigint NOT NULL,
    state text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'claimed', 'completed', 'failed', 'cancelled')),
    place bigint NOT NULL DEFAULT nextval('shoal.places'),
    attempts integer NOT NULL DEFAULT 0,
    worker bigint,
    lease uuid,
    deadline timestamptz,
    reason text
);
CREATE INDEX units_pending ON shoal.units (place) WHERE state = 'pending';
CREATE INDEX units_claimed ON shoal.units (deadline) WHERE state = 'claimed';

-- Units that are no longer on the board, by what became of them.
CREATE TABLE shoal.tallies (
    state text PRIMARY KEY,
    units bigint NOT NULL
);

-- What the coordinator has not taken into its journal yet: results, and units that failed for good.
CREATE TABLE shoal.contributions (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text NOT NULL CHECK (kind IN ('delivered', 'failed')),
    worker text,
    unit bigint NOT NULL,
    iteration bigint NOT NULL,
    epoch bigint NOT NULL,
    start bigint NOT NULL,
    batches bigint NOT NULL,
    reason text,
    header bytea,
    frames uuid[] NOT NULL DEFAULT '{}',
    at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX contributions_iteration ON shoal.contributions (iteration);

CREATE UNLOGGED TABLE shoal.weights (
    version bigint NOT NULL,
    kind text NOT NULL CHECK (kind IN ('full', 'difference')),
    base bigint,
    header bytea NOT NULL,
    frames uuid[] NOT NULL,
    PRIMARY KEY (version, kind)
);

-- --- what survives the coordinator --------------------------------------------------------------------------

CREATE TABLE shoal.journals (
    number bigint PRIMARY KEY
);

CREATE TABLE shoal.records (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    journal bigint NOT NULL REFERENCES shoal.journals,
    record bytea NOT NULL,
    frames uuid[] NOT NULL,
    bytes bigint NOT NULL
);
CREATE INDEX records_journal ON shoal.records (journal, id);

CREATE TABLE shoal.ledger (
    line bigint PRIMARY KEY,
    entry text NOT NULL
);

CREATE TABLE shoal.snapshots (
    number bigint PRIMARY KEY,
    header text NOT NULL,
    frames uuid[] NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);

-- --- for people to look at ----------------------------------------------------------------------------------

CREATE TABLE shoal.metrics (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    step bigint NOT NULL,
    figures jsonb NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE shoal.picture (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    step bigint NOT NULL,
    png bytea NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE shoal.picture ALTER png SET STORAGE EXTERNAL;

CREATE VIEW shoal.worker_list AS
    SELECT w.id, w.name, w.about, w.state, w.figures, w.joined_at, w.seen_at, w.left_at, w.completed, w.late, w.cancelled, w.failed,
        w.left_at IS NULL AND w.seen_at > now() - make_interval(secs => coalesce((SELECT r.silence_s FROM shoal.run r), 90)) AS alive
    FROM shoal.workers w;

CREATE VIEW shoal.unit_counts AS
    SELECT s.state, sum(s.units)::bigint AS units FROM (
        SELECT u.state, count(*) AS units FROM shoal.units u GROUP BY u.state
        UNION ALL SELECT t.state, t.units FROM shoal.tallies t
        UNION ALL SELECT 'dropped', coalesce(sum(w.late + w.cancelled), 0) FROM shoal.workers w
    ) s GROUP BY s.state;

CREATE VIEW shoal.progress AS
    SELECT r.begun_at,
        (SELECT max(i.iteration) FROM shoal.iterations i) AS iteration,
        (SELECT max(v.version) FROM shoal.weights v) AS version,
        (SELECT c.alive_at FROM shoal.coordinator c) AS coordinator_seen_at
    FROM shoal.run r;

-- --- dead rows are cleared by their number, not by their share --------------------------------------------------

DO $$
DECLARE
    busy text;
BEGIN
    FOREACH busy IN ARRAY ARRAY['blobs', 'flyers', 'requests', 'replies', 'workers', 'units', 'contributions', 'weights', 'coordinator', 'records'] LOOP
        EXECUTE format('ALTER TABLE shoal.%I SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500,
            autovacuum_analyze_scale_factor = 0.1, autovacuum_analyze_threshold = 500, autovacuum_vacuum_cost_delay = 0)', busy);
    END LOOP;
    FOREACH busy IN ARRAY ARRAY['parts', 'flyer_parts', 'picture'] LOOP
        EXECUTE format('ALTER TABLE shoal.%I SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 64,
            autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 8000,
            toast.autovacuum_vacuum_cost_delay = 0)', busy);
    END LOOP;
END $$;
