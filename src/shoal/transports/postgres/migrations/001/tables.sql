-- The tables of a run, its indexes and views. A database holds one run, all of it in the schema `shoal`.
-- UNLOGGED tables hold only what the coordinator can write again: they are empty after a crash of the server, and the coordinator fills them anew.

-- --- roles and the coordinator ------------------------------------------------------------------------------

-- Roles of this server that may use the run. `enrolled_at` and `enrolled_from` are null for a role that the owner granted by hand.
CREATE TABLE shoal.roles (
    name text PRIMARY KEY,
    kind text NOT NULL CHECK (kind IN ('student', 'reader', 'coordinator', 'class')),
    enrolled_at timestamptz,
    enrolled_from text
);

-- The functions that a student's role may call. `shoal db init` fills the table.
CREATE TABLE shoal.student_functions (
    name text PRIMARY KEY
);

-- The one process that coordinates. Each of its transactions holds FOR KEY SHARE on `id`: heartbeats (alive_at, beat_at, lease_at) do not wait for
-- that lock, and a successor, which writes a new id, does. `lease_at`: what the clock of leases showed at `beat_at`.
CREATE TABLE shoal.coordinator (
    id uuid PRIMARY KEY,
    only_one boolean NOT NULL DEFAULT true UNIQUE CHECK (only_one),
    host text NOT NULL,
    pid integer NOT NULL,
    alive_at timestamptz NOT NULL,
    max_frame_bytes bigint NOT NULL,
    max_header_bytes bigint NOT NULL,
    beat_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 20);

-- The last transaction that the coordinator committed: each writes a new token. After a lost connection it tells whether a commit happened. A
-- transaction's number would not: after a crash of the server it may belong to another transaction.
CREATE TABLE shoal.last_commit (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    token uuid NOT NULL
) WITH (fillfactor = 20);
INSERT INTO shoal.last_commit VALUES (true, gen_random_uuid());

-- The clock of leases, which all deadlines follow. Each heartbeat of the coordinator moves it on by what the coordinator's monotonic clock
-- measured; in between the server's clock counts, for 5 s at most and never backwards. So no jump of a machine's clock ends a lease or makes it
-- last, and the clock stops while no coordinator runs: workers lose no lease to that.
CREATE FUNCTION shoal.lease_now() RETURNS timestamptz LANGUAGE sql SET search_path = shoal, pg_temp AS $$
    SELECT coalesce((SELECT c.lease_at + least(greatest(clock_timestamp() - c.beat_at, interval '0'), interval '5 s') FROM coordinator c), clock_timestamp())
$$;

-- --- the run ------------------------------------------------------------------------------------------------

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

-- The data set in pieces, for workers that do not have it.
CREATE TABLE shoal.pieces (
    number integer PRIMARY KEY,
    data bytea NOT NULL
);
ALTER TABLE shoal.pieces ALTER data SET STORAGE EXTERNAL;

-- --- frames -------------------------------------------------------------------------------------------------

-- Frames that workers send, and frames that must survive. `uses` counts the rows that refer to a blob; a blob without any is deleted.
-- A part cannot be committed without its blob, so an upload that no row refers to in the end leaves nothing behind.
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

-- Bytes that a connection has uploaded in its present transaction. Nothing else bounds a transaction that is never committed.
CREATE UNLOGGED TABLE shoal.uploads (
    role text NOT NULL,
    pid integer NOT NULL,
    transaction xid8 NOT NULL,
    bytes bigint NOT NULL,
    PRIMARY KEY (role, pid)
) WITH (fillfactor = 50);

-- Frames that the coordinator publishes: each is stored once, however many workers read it.
CREATE UNLOGGED TABLE shoal.published_frames (
    id uuid PRIMARY KEY,
    bytes bigint NOT NULL
);

CREATE UNLOGGED TABLE shoal.published_parts (
    frame uuid NOT NULL REFERENCES shoal.published_frames ON DELETE CASCADE,
    n integer NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (frame, n)
);
ALTER TABLE shoal.published_parts ALTER data SET STORAGE EXTERNAL;

-- --- requests and replies -----------------------------------------------------------------------------------

CREATE TABLE shoal.requests (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    peer uuid NOT NULL UNIQUE,
    number bigint NOT NULL,
    header bytea NOT NULL,
    frames uuid[] NOT NULL,
    too_large text,
    at timestamptz NOT NULL DEFAULT now(),
    role text NOT NULL DEFAULT session_user
);
CREATE INDEX requests_role ON shoal.requests (role);

CREATE UNLOGGED TABLE shoal.replies (
    peer uuid PRIMARY KEY,
    number bigint NOT NULL,
    header bytea NOT NULL,
    frames uuid[] NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);

-- --- workers and units --------------------------------------------------------------------------------------

-- `unit_s`: the usual time of the worker for one unit.
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
    last_outcome text,
    role text NOT NULL DEFAULT session_user,
    unit_s double precision
) WITH (fillfactor = 50);
CREATE INDEX workers_role ON shoal.workers (role);

-- The newest row is the current iteration. Rows are added and deleted, never changed, so the newest is found at once even while a long
-- transaction keeps many dead rows. `max_lag`: how many iterations a leased unit may lag; `oldest`: the oldest iteration whose leases count.
CREATE TABLE shoal.iterations (
    iteration bigint PRIMARY KEY,
    first_position bigint NOT NULL,
    lease_timeout_s double precision NOT NULL,
    max_retries integer NOT NULL,
    quorum bigint,
    max_lag bigint NOT NULL,
    oldest bigint NOT NULL
);

CREATE VIEW shoal.current_iteration AS
    SELECT * FROM shoal.iterations i ORDER BY i.iteration DESC LIMIT 1;

-- Positions in the queue of pending units.
CREATE SEQUENCE shoal.unit_queue;

-- A unit that is pending again moves to the end of the queue. So a worker continues its search from its last position, and never walks
-- through the dead rows before it.
CREATE TABLE shoal.units (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    iteration bigint NOT NULL,
    epoch bigint NOT NULL,
    start bigint NOT NULL,
    batches bigint NOT NULL,
    state text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'claimed', 'completed', 'failed', 'cancelled')),
    queue_position bigint NOT NULL DEFAULT nextval('shoal.unit_queue'),
    attempts integer NOT NULL DEFAULT 0,
    worker bigint,
    lease uuid,
    deadline timestamptz,
    reason text,
    claimed_at timestamptz
);
CREATE INDEX units_pending ON shoal.units (queue_position) WHERE state = 'pending';
CREATE INDEX units_claimed ON shoal.units (deadline) WHERE state = 'claimed';
CREATE INDEX units_held ON shoal.units (worker) WHERE state = 'claimed';
CREATE INDEX units_completed ON shoal.units (iteration) WHERE state = 'completed';

-- How many units of past iterations ended in which state.
CREATE TABLE shoal.unit_totals (
    state text PRIMARY KEY,
    units bigint NOT NULL
);

-- Results, and units that failed for good, which are not in the coordinator's journal yet.
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

CREATE UNLOGGED TABLE shoal.weights (
    version bigint NOT NULL,
    kind text NOT NULL CHECK (kind IN ('full', 'difference')),
    base bigint,
    header bytea NOT NULL,
    frames uuid[] NOT NULL,
    PRIMARY KEY (version, kind)
);

-- --- how students are doing ---------------------------------------------------------------------------------

-- A row comes with the first result, failure or offence of a role. `disproved`: units that failed at this role and that others completed.
-- `ended`: connections that the watchdog ended.
CREATE TABLE shoal.standings (
    role text PRIMARY KEY,
    completed bigint NOT NULL DEFAULT 0,
    failed_in_row integer NOT NULL DEFAULT 0,
    disproved integer NOT NULL DEFAULT 0,
    ended integer NOT NULL DEFAULT 0,
    paused_until timestamptz,
    quarantined text,
    slow_at timestamptz,
    failed bigint NOT NULL DEFAULT 0
);

-- Which role failed which piece of the data, how often, and when first and last by the clock of leases.
CREATE TABLE shoal.failures (
    epoch bigint NOT NULL,
    start bigint NOT NULL,
    role text NOT NULL,
    reason text,
    at timestamptz NOT NULL,
    times integer NOT NULL DEFAULT 1,
    first_at timestamptz NOT NULL,
    PRIMARY KEY (epoch, start, role)
);

-- Messages for the owner. The coordinator deletes them as it prints them.
CREATE TABLE shoal.notes (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    note text NOT NULL
);

-- For subjects that occur often: when the last note was written, and how many occurrences there were since.
CREATE TABLE shoal.note_times (
    subject text PRIMARY KEY,
    told_at timestamptz NOT NULL DEFAULT '-infinity',
    untold integer NOT NULL DEFAULT 0
);

-- --- what survives the coordinator --------------------------------------------------------------------------

CREATE TABLE shoal.journals (
    number bigint PRIMARY KEY
);

-- `checksum` covers the record and its frames; `before` is the checksum of the record before it, in this journal or the one before.
CREATE TABLE shoal.records (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    journal bigint NOT NULL REFERENCES shoal.journals,
    record bytea NOT NULL,
    frames uuid[] NOT NULL,
    bytes bigint NOT NULL,
    checksum bigint NOT NULL,
    before bigint
);
CREATE INDEX records_journal ON shoal.records (journal, id);

-- `record` is the newest record at the time of the line, so records that are missing at the end are noticed.
CREATE TABLE shoal.ledger (
    line bigint PRIMARY KEY,
    entry text NOT NULL,
    checksum bigint NOT NULL,
    record bigint
);

CREATE TABLE shoal.snapshots (
    number bigint PRIMARY KEY,
    header text NOT NULL,
    frames uuid[] NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    checksum bigint NOT NULL
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
    SELECT w.id, w.name, w.about,
        coalesce('in quarantine: ' || regexp_replace((SELECT s.quarantined FROM shoal.standings s WHERE s.role = w.role), '[^ -~]', '?', 'g'), w.state) AS state, w.figures, w.joined_at, w.seen_at, w.left_at, w.completed, w.late, w.cancelled, w.failed,
        w.left_at IS NULL AND abs(extract(epoch FROM now() - w.seen_at)) < coalesce((SELECT r.silence_s FROM shoal.run r), 90) AS alive
    FROM shoal.workers w;

CREATE VIEW shoal.unit_counts AS
    SELECT s.state, sum(s.units)::bigint AS units FROM (
        SELECT u.state, count(*) AS units FROM shoal.units u GROUP BY u.state
        UNION ALL SELECT t.state, t.units FROM shoal.unit_totals t
        UNION ALL SELECT 'dropped', coalesce(sum(w.late + w.cancelled), 0) FROM shoal.workers w
    ) s GROUP BY s.state;

CREATE VIEW shoal.progress AS
    SELECT r.begun_at,
        (SELECT max(i.iteration) FROM shoal.iterations i) AS iteration,
        (SELECT max(v.version) FROM shoal.weights v) AS version,
        (SELECT c.alive_at FROM shoal.coordinator c) AS coordinator_seen_at
    FROM shoal.run r;

-- Roles whose workers are here and have not failed too many units in a row. `reliable`: it completed more units than it failed.
CREATE VIEW shoal.active_roles AS
    SELECT DISTINCT w.role, coalesce(s.completed > s.failed, false) AS reliable
    FROM shoal.worker_list l JOIN shoal.workers w USING (id) LEFT JOIN shoal.standings s ON s.role = w.role
    WHERE l.alive AND s.quarantined IS NULL AND coalesce(s.failed_in_row, 0) < 5;

-- --- autovacuum by the number of dead rows, not by their share ------------------------------------------------

DO $$
DECLARE
    busy text;
BEGIN
    FOREACH busy IN ARRAY ARRAY['blobs', 'published_frames', 'requests', 'replies', 'workers', 'units', 'contributions', 'weights', 'coordinator', 'last_commit', 'records'] LOOP
        EXECUTE format('ALTER TABLE shoal.%I SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500,
            autovacuum_analyze_scale_factor = 0.1, autovacuum_analyze_threshold = 500, autovacuum_vacuum_cost_delay = 0)', busy);
    END LOOP;
    FOREACH busy IN ARRAY ARRAY['parts', 'published_parts', 'picture'] LOOP
        EXECUTE format('ALTER TABLE shoal.%I SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 64,
            autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 8000,
            toast.autovacuum_vacuum_cost_delay = 0)', busy);
    END LOOP;
END $$;

CREATE FUNCTION shoal.schema_version() RETURNS integer LANGUAGE sql STABLE SECURITY DEFINER SET search_path = shoal, pg_temp AS
    'SELECT max(version) FROM migrations';
