-- Machines that trainings are kept away from for a while, because one of them was slow or broken there.

CREATE TABLE nodes (
    name            text PRIMARY KEY,
    reason          text NOT NULL,
    job             text,
    quarantined_at  timestamptz NOT NULL DEFAULT now(),
    until           timestamptz NOT NULL
);
