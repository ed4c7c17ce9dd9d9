-- What the Airflow side writes of jobs and runs. Everything can be said twice: what is there already stays as it is.

-- name: project_team
INSERT INTO teams (name) VALUES (%(team)s) ON CONFLICT DO NOTHING;

-- name: project_job
INSERT INTO jobs (id, kind, pipeline, team, owner, run_id, output)
VALUES (%(id)s, %(kind)s, %(pipeline)s, %(team)s, %(owner)s, %(run_id)s, %(output)s)
ON CONFLICT (id) DO UPDATE SET run_id = coalesce(excluded.run_id, jobs.run_id);

-- name: project_event
INSERT INTO job_events (job, sequence, at, state, reason, attempt, details)
VALUES (%(job)s, %(sequence)s, %(at)s, %(state)s, %(reason)s, %(attempt)s, %(details)s)
ON CONFLICT (job, sequence, mark) DO NOTHING;

-- name: project_pending
-- What a job begins with, before it or anybody has said something of it.
INSERT INTO job_events (job, sequence, mark, at, state, reason, attempt)
SELECT %(job)s, 0, 1, %(at)s, 'pending', 'waits to be submitted', %(attempt)s
WHERE NOT EXISTS (SELECT FROM job_events WHERE job = %(job)s)
ON CONFLICT DO NOTHING;

-- name: project_state
-- A job stands where its newest event or mark says; its time runs from its own first event to its own last.
UPDATE jobs SET
    state = newest.state,
    reason = newest.reason,
    attempt = newest.attempt,
    host = coalesce(%(host)s, jobs.host),
    started_at = own.first,
    ended_at = CASE WHEN newest.state IN ('succeeded', 'failed', 'suspended') THEN newest.at END,
    device_seconds = coalesce(%(devices)s * extract(epoch FROM own.last - own.first), 0),
    facts = coalesce(%(facts)s, jobs.facts)
FROM (SELECT * FROM job_events WHERE job = %(job)s ORDER BY sequence DESC, mark DESC LIMIT 1) AS newest,
     (SELECT min(at) AS first, max(at) AS last FROM job_events WHERE job = %(job)s AND mark = 0) AS own
WHERE jobs.id = %(job)s;

-- name: project_commit
-- A job whose manifest is there has succeeded, and its time ran until then, also where no event could say so.
UPDATE jobs SET
    state = 'succeeded',
    reason = %(reason)s,
    ended_at = %(at)s,
    device_seconds = greatest(device_seconds, coalesce(%(devices)s * extract(epoch FROM %(at)s - started_at), 0))
WHERE id = %(job)s AND state <> 'succeeded';

-- name: mark_job
-- What a job cannot say of itself: that it was killed. Only a job in one of the states `before` can become that.
WITH told AS (
    INSERT INTO job_events (job, sequence, mark, at, state, reason, attempt)
    SELECT jobs.id, coalesce(newest.sequence, 0), coalesce(newest.mark, 0) + 1, %(at)s, %(state)s, %(reason)s,
           %(attempt)s
    FROM jobs LEFT JOIN LATERAL (
        SELECT sequence, mark FROM job_events WHERE job = jobs.id ORDER BY sequence DESC, mark DESC LIMIT 1
    ) AS newest ON true
    WHERE jobs.id = %(id)s AND jobs.state = ANY(%(before)s)
    ON CONFLICT DO NOTHING
    RETURNING job, at, state, reason, attempt
)
UPDATE jobs SET
    state = told.state,
    reason = told.reason,
    attempt = told.attempt,
    ended_at = CASE WHEN told.state IN ('succeeded', 'failed', 'suspended') THEN told.at END
FROM told WHERE jobs.id = told.job;

-- name: project_evaluation
INSERT INTO evaluations (id, pipeline, release, champion, run_id, verdict, forced, score, low, high, report, facts)
VALUES (%(id)s, %(pipeline)s, %(release)s, %(champion)s, %(run_id)s, %(verdict)s, %(forced)s, %(score)s, %(low)s,
        %(high)s, %(report)s, %(facts)s)
ON CONFLICT (id) DO NOTHING;

-- name: project_run
INSERT INTO runs (id, pipeline, team, outcome, why, started_at, ended_at, facts)
VALUES (%(id)s, %(pipeline)s, %(team)s, %(outcome)s, %(why)s, %(started_at)s, %(ended_at)s, %(facts)s)
ON CONFLICT (id) DO UPDATE SET
    outcome = excluded.outcome, why = excluded.why, ended_at = excluded.ended_at, facts = excluded.facts;

-- name: alert_of
-- The alert of an occasion, if there was one.
SELECT id FROM alerts WHERE key = %(key)s;

-- name: raise_alert
-- The same thing is said once: `key` names the occasion.
INSERT INTO alerts (level, source, pipeline, message, details, key)
VALUES (%(level)s, %(source)s, %(pipeline)s, %(message)s, %(details)s, %(key)s)
ON CONFLICT (key) DO NOTHING;
