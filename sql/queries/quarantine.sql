-- The bad records of the data stage: what the Airflow side copies of a quarantine, and what its page asks.

-- name: quarantine_known
SELECT 1 FROM quarantines WHERE dataset = %(dataset)s;

-- name: begin_quarantine
-- Gives a row to the one who shall copy the records; who comes second waits for the first, and gets none.
INSERT INTO quarantines (dataset, records, examples) VALUES (%(dataset)s, %(records)s, %(examples)s)
ON CONFLICT (dataset) DO NOTHING
RETURNING dataset;

-- name: add_quarantine_reasons
COPY quarantine_reasons (dataset, source, kind, records) FROM STDIN;

-- name: add_bad_records
COPY bad_records (dataset, number, source, file, line, kind, reason, sample) FROM STDIN;

-- name: forget_job_quarantines
-- What an earlier try of the job met and this one did not.
DELETE FROM job_quarantines WHERE job = %(job)s AND dataset <> ALL (%(datasets)s);

-- name: link_job_quarantine
INSERT INTO job_quarantines (job, dataset) VALUES (%(job)s, %(dataset)s) ON CONFLICT DO NOTHING;

-- name: quarantine_jobs
-- One row a data job with bad records, the newest of each line first.
SELECT id, pipeline, run_id, state, reason, at, records, examples FROM (
    SELECT j.id, j.pipeline, j.run_id, j.state, j.reason, coalesce(j.ended_at, j.created_at) AS at,
           sum(q.records)::bigint AS records, sum(q.examples)::bigint AS examples,
           row_number() OVER (PARTITION BY j.pipeline ORDER BY coalesce(j.ended_at, j.created_at) DESC) AS newest
    FROM job_quarantines l
    JOIN jobs j ON j.id = l.job
    JOIN quarantines q ON q.dataset = l.dataset
    GROUP BY j.id
) AS met
WHERE newest <= 12
ORDER BY at DESC;

-- name: quarantine_job
SELECT j.id, j.pipeline, j.run_id, j.state, j.reason, coalesce(j.ended_at, j.created_at) AS at
FROM jobs j
WHERE j.id = %(job)s AND EXISTS (SELECT 1 FROM job_quarantines l WHERE l.job = j.id);

-- name: quarantine_folders
SELECT l.dataset, q.records FROM job_quarantines l JOIN quarantines q ON q.dataset = l.dataset
WHERE l.job = %(job)s
ORDER BY l.dataset;

-- name: quarantine_kinds
-- One row a source and kind of reason.
SELECT r.source, r.kind, sum(r.records)::bigint AS records
FROM job_quarantines l JOIN quarantine_reasons r ON r.dataset = l.dataset
WHERE l.job = %(job)s
GROUP BY r.source, r.kind
ORDER BY records DESC, r.source, r.kind;

-- name: quarantine_samples
-- One row a bad record, taken from every kind of reason in turn, so that the rare ones are seen too.
SELECT source, file, line, kind, reason, sample FROM (
    SELECT b.*, row_number() OVER (PARTITION BY b.source, b.kind ORDER BY b.dataset, b.number) AS turn
    FROM job_quarantines l JOIN bad_records b ON b.dataset = l.dataset
    WHERE l.job = %(job)s
      AND (%(source)s::text IS NULL OR b.source = %(source)s)
      AND (%(kind)s::text IS NULL OR b.kind = %(kind)s)
) AS taken
ORDER BY turn, source, kind
LIMIT %(most)s;
