-- What the board shows. Reading only.

-- name: board_runs
-- The newest runs of each line, with what the comparison found; a run that still goes on has no outcome yet.
SELECT * FROM (
    SELECT coalesce(r.pipeline, e.pipeline) AS pipeline,
           coalesce(split_part(r.id, '/', 2), e.run_id) AS run_id,
           r.outcome, r.why, r.started_at, coalesce(r.ended_at, e.created_at) AS at,
           coalesce(r.facts #> '{comparison,candidate}', e.facts -> 'candidate') AS candidate,
           coalesce(r.facts #> '{comparison,champion}', e.facts -> 'champion') AS champion,
           coalesce(r.facts #> '{comparison,difference}', e.facts -> 'difference') AS difference,
           coalesce(r.facts #>> '{comparison,verdict}', e.verdict) AS verdict,
           coalesce(r.facts #>> '{comparison,report}', e.report) AS report,
           row_number() OVER (PARTITION BY coalesce(r.pipeline, e.pipeline)
                              ORDER BY coalesce(r.ended_at, e.created_at) DESC) AS newest
    FROM runs r
    FULL JOIN evaluations e ON r.id = e.pipeline || '/' || e.run_id
) AS all_runs
WHERE newest <= 8
ORDER BY pipeline, newest;

-- name: board_jobs
-- What runs, and what ended in the last quarter of an hour.
SELECT id, kind, pipeline, team, state, reason, host, attempt, started_at, ended_at, output
FROM jobs
WHERE state IN ('pending', 'scheduled', 'running', 'retrying')
   OR ended_at > now() - interval '15 minutes'
ORDER BY ended_at DESC NULLS FIRST, started_at DESC
LIMIT 40;

-- name: board_devices
-- Which card does what, and for whom.
SELECT d.id AS device, d.node, d.kind, l.job, l.release, l.team, l.from_at
FROM devices d
LEFT JOIN device_leases l ON l.device = d.id AND l.until_at IS NULL
ORDER BY d.node, d.id;

-- name: board_alerts
SELECT level, source, pipeline, message, at FROM alerts ORDER BY at DESC LIMIT 12;

-- name: board_rollouts
-- The newest rollout of each line with its journal.
SELECT r.id, r.pipeline, r.candidate, r.champion, r.state, r.step, r.weight, r.started_at, r.ended_at, r.policy,
       coalesce((SELECT jsonb_agg(jsonb_build_object('at', j.at, 'step', j.step, 'weight', j.weight,
                                                     'action', j.action, 'verdict', j.verdict, 'why', j.why)
                                  ORDER BY j.sequence)
                 FROM rollout_journal j WHERE j.rollout = r.id), '[]') AS journal
FROM (SELECT DISTINCT ON (pipeline) * FROM rollouts ORDER BY pipeline, started_at DESC) AS r;
