-- Bad records, bounded: a dataset with a million of them has examples of every reason here, the true counts beside
-- them, and all of them in its quarantine.parquet. Nothing wrote to bad_records before.

-- One row a folder of the store with a quarantine.parquet: a dataset's, or that of a phase at which a job was refused.
CREATE TABLE quarantines (
    dataset    text PRIMARY KEY,
    records    bigint NOT NULL,
    examples   integer NOT NULL,
    copied_at  timestamptz NOT NULL DEFAULT now()
);

-- How many records each kind of reason took, by source.
CREATE TABLE quarantine_reasons (
    dataset  text NOT NULL REFERENCES quarantines (dataset) ON DELETE CASCADE,
    source   text NOT NULL,
    kind     text NOT NULL,
    records  bigint NOT NULL,
    PRIMARY KEY (dataset, source, kind)
);

-- Which jobs met which quarantine: a second run of the same fingerprint adds a row here and none of records.
CREATE TABLE job_quarantines (
    job      text NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    dataset  text NOT NULL REFERENCES quarantines (dataset) ON DELETE CASCADE,
    PRIMARY KEY (job, dataset)
);

-- A row is named by its place in the parquet file. File and reason are people's text, too long for an index.
ALTER TABLE bad_records DROP CONSTRAINT bad_records_pkey;
ALTER TABLE bad_records
    ADD COLUMN number bigint NOT NULL,
    ADD COLUMN kind text NOT NULL,
    ADD PRIMARY KEY (dataset, number),
    ADD FOREIGN KEY (dataset) REFERENCES quarantines (dataset) ON DELETE CASCADE;
CREATE INDEX bad_records_by_kind ON bad_records (dataset, source, kind, number);
