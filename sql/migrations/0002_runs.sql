-- How each run of a retraining line ended, in one word and one sentence. The run's outcome.json says the same.
CREATE TABLE runs (
    id          text PRIMARY KEY,
    pipeline    text NOT NULL,
    team        text NOT NULL REFERENCES teams (name),
    outcome     text NOT NULL CHECK (outcome IN ('promoted', 'already champion', 'stopped at gate', 'rolled back',
                                                 'failed')),
    why         text NOT NULL DEFAULT '',
    started_at  timestamptz,
    ended_at    timestamptz NOT NULL,
    facts       jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX runs_by_pipeline ON runs (pipeline, ended_at DESC);
