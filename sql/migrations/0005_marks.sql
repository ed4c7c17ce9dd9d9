-- What the Airflow side knows of a job and the job cannot say (that it waits, that it was killed) stands among the job's
-- own events: `mark` counts it after the job's event `sequence`, by which it came; the job's own have mark 0.

ALTER TABLE job_events ADD COLUMN mark integer NOT NULL DEFAULT 0;
ALTER TABLE job_events DROP CONSTRAINT job_events_pkey;
ALTER TABLE job_events ADD PRIMARY KEY (job, sequence, mark);
