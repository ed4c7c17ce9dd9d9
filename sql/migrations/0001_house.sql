-- The state of the house. What is expensive to add later is here from the start: who it belongs to, what it cost.
-- Times are timestamptz; ids are text (fingerprints, digests); money and device time are numeric.

CREATE TABLE teams (
    name        text PRIMARY KEY,
    created_at  timestamptz NOT NULL DEFAULT now()
);

-- ------------------------------------------------------------------------------------------------------------- jobs

-- One row a job; its folder's manifest is right about outputs, this table about history.
CREATE TABLE jobs (
    id              text PRIMARY KEY,
    kind            text NOT NULL,
    pipeline        text NOT NULL,
    team            text NOT NULL REFERENCES teams (name),
    owner           text NOT NULL,
    run_id          text,
    output          text NOT NULL,
    state           text NOT NULL DEFAULT 'pending'
                    CHECK (state IN ('pending', 'scheduled', 'running', 'suspended', 'retrying', 'succeeded', 'failed')),
    reason          text NOT NULL DEFAULT '',
    attempt         integer NOT NULL DEFAULT 1,
    host            text,
    started_at      timestamptz,
    ended_at        timestamptz,
    device_seconds  numeric NOT NULL DEFAULT 0,
    cost            numeric NOT NULL DEFAULT 0,
    facts           jsonb NOT NULL DEFAULT '{}',
    created_at      timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX jobs_by_pipeline ON jobs (pipeline, created_at DESC);
CREATE INDEX jobs_alive ON jobs (state) WHERE state IN ('pending', 'scheduled', 'running', 'suspended', 'retrying');

-- What a job said in events.jsonl, projected idempotently by (job, sequence).
CREATE TABLE job_events (
    job       text NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    sequence  integer NOT NULL,
    at        timestamptz NOT NULL,
    state     text NOT NULL,
    reason    text NOT NULL,
    attempt   integer NOT NULL,
    details   jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (job, sequence)
);

CREATE TABLE bad_records (
    dataset  text NOT NULL,
    source   text NOT NULL,
    file     text NOT NULL,
    line     bigint NOT NULL,
    reason   text NOT NULL,
    sample   text NOT NULL,
    PRIMARY KEY (dataset, source, file, line, reason)
);

CREATE TABLE evaluations (
    id          text PRIMARY KEY,
    pipeline    text NOT NULL,
    release     text NOT NULL,
    champion    text,
    run_id      text,
    verdict     text CHECK (verdict IN ('pass', 'fail', 'hold')),
    forced      boolean NOT NULL DEFAULT false,
    score       double precision,
    low         double precision,
    high        double precision,
    report      text,
    facts       jsonb NOT NULL DEFAULT '{}',
    created_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX evaluations_by_pipeline ON evaluations (pipeline, created_at DESC);

-- --------------------------------------------------------------------------------------------- releases, champions

CREATE TABLE releases (
    id          text PRIMARY KEY,
    pipeline    text NOT NULL,
    team        text NOT NULL REFERENCES teams (name),
    owner       text NOT NULL,
    digest      text NOT NULL,
    model       text NOT NULL,
    profile     jsonb NOT NULL,
    manifest    jsonb NOT NULL DEFAULT '{}',
    created_at  timestamptz NOT NULL DEFAULT now()
);

-- Append-only: the newest row of a pipeline says who is champion and who was before.
CREATE TABLE champions (
    sequence  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    pipeline  text NOT NULL,
    champion  text NOT NULL REFERENCES releases (id),
    previous  text REFERENCES releases (id),
    rollout   text,
    reason    text NOT NULL,
    actor     text NOT NULL,
    -- The controller's own name of the change: it writes its journal first, and a replay after an outage adds nothing.
    key       text UNIQUE,
    at        timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX champions_newest ON champions (pipeline, sequence DESC);

-- --------------------------------------------------------------------------------------------------------- rollouts

CREATE TABLE rollouts (
    id          text PRIMARY KEY,
    pipeline    text NOT NULL,
    candidate   text NOT NULL REFERENCES releases (id),
    champion    text NOT NULL REFERENCES releases (id),
    run_id      text,
    policy      jsonb NOT NULL,
    state       text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'rolled_back', 'finished')),
    step        integer NOT NULL DEFAULT 0,
    weight      integer NOT NULL DEFAULT 0 CHECK (weight BETWEEN 0 AND 100),
    started_at  timestamptz NOT NULL DEFAULT now(),
    ended_at    timestamptz
);
CREATE UNIQUE INDEX rollouts_one_running ON rollouts (pipeline) WHERE state = 'running';

-- Every step and verdict, numbered by the controller's own journal, so that a replay after an outage is idempotent.
CREATE TABLE rollout_journal (
    rollout   text NOT NULL REFERENCES rollouts (id),
    sequence  integer NOT NULL,
    at        timestamptz NOT NULL,
    step      integer NOT NULL,
    weight    integer NOT NULL,
    action    text NOT NULL,
    verdict   text,
    why       text NOT NULL,
    measured  jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (rollout, sequence)
);

-- One row a request. `assigned` is the side the split chose, `served` the side that answered; analysis goes by the
-- assigned one. A user is a salted hash, never the id itself.
CREATE TABLE exposures (
    request_id  text PRIMARY KEY,
    pipeline    text NOT NULL,
    rollout     text,
    step        integer,
    user_hash   text,
    assigned    text NOT NULL,
    served      text,
    release     text,
    status      integer NOT NULL,
    flags       text NOT NULL DEFAULT '',
    seconds     double precision NOT NULL,
    first_byte  double precision,
    at          timestamptz NOT NULL
);
CREATE INDEX exposures_by_rollout ON exposures (rollout, assigned, at);
CREATE INDEX exposures_by_pipeline ON exposures (pipeline, at);

CREATE TABLE feedback (
    request_id  text PRIMARY KEY,
    resolved    boolean NOT NULL,
    at          timestamptz NOT NULL DEFAULT now()
);

-- No reference to rollouts: the recorder writes these, also while the controller's own rows are still in its journal.
CREATE TABLE shadow_pairs (
    rollout           text NOT NULL,
    request_id        text NOT NULL,
    champion_answer   text NOT NULL,
    candidate_answer  text NOT NULL,
    champion_seconds  double precision,
    candidate_seconds double precision,
    champion_status   integer,
    candidate_status  integer,
    at                timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (rollout, request_id)
);

-- --------------------------------------------------------------------------------------------------- devices, alerts

CREATE TABLE devices (
    id        text PRIMARY KEY,
    node      text NOT NULL,
    kind      text NOT NULL,
    memory    bigint,
    seen_at   timestamptz NOT NULL DEFAULT now()
);

-- Who holds which card, and what it costs: the answer to "which card does what".
CREATE TABLE device_leases (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    device      text NOT NULL REFERENCES devices (id),
    job         text REFERENCES jobs (id),
    release     text REFERENCES releases (id),
    team        text NOT NULL REFERENCES teams (name),
    from_at     timestamptz NOT NULL DEFAULT now(),
    until_at    timestamptz,
    rate        numeric NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX device_leases_one_open ON device_leases (device) WHERE until_at IS NULL;

CREATE TABLE quarantined_nodes (
    node         text PRIMARY KEY,
    reason       text NOT NULL,
    job          text,
    at           timestamptz NOT NULL DEFAULT now(),
    released_at  timestamptz
);

CREATE TABLE alerts (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    level     text NOT NULL CHECK (level IN ('suspicious', 'dangerous')),
    source    text NOT NULL,
    pipeline  text,
    message   text NOT NULL,
    details   jsonb NOT NULL DEFAULT '{}',
    key       text UNIQUE,
    at        timestamptz NOT NULL DEFAULT now(),
    notified_at timestamptz
);
CREATE INDEX alerts_newest ON alerts (at DESC);
