-- What the controller asks and writes. Its own journal is written first; all of these can be repeated.

-- name: rollout_traffic
-- Requests of users at one step, by assigned side. An error is an answer the user did not get; that they hung up is not.
SELECT assigned,
       count(*) AS requests,
       count(DISTINCT user_hash) AS users,
       count(*) FILTER (WHERE status >= 500 OR (status = 0 AND flags NOT LIKE '%%DC%%')) AS errors,
       count(*) FILTER (WHERE at > now() - make_interval(secs => %(window)s)) AS recent,
       count(*) FILTER (WHERE at > now() - make_interval(secs => %(window)s) AND assigned = 'challenger'
                          AND served = 'champion') AS failovers,
       extract(epoch FROM now() - max(at))::float8 AS age
FROM exposures
WHERE rollout = %(rollout)s AND step = %(step)s AND user_hash IS NOT NULL
GROUP BY assigned;

-- name: rollout_latencies
-- Seconds of the newest answered requests of a side at a step.
SELECT seconds
FROM exposures
WHERE rollout = %(rollout)s AND step = %(step)s AND assigned = %(assigned)s AND user_hash IS NOT NULL
  AND status BETWEEN 200 AND 299
ORDER BY at DESC
LIMIT 2000;

-- name: shadow_pairs_of
-- Pairs in which the champion answered; a pair says something about the candidate only then.
SELECT candidate_status, champion_seconds, candidate_seconds, champion_answer = candidate_answer AS same,
       extract(epoch FROM now() - at)::float8 AS age
FROM shadow_pairs
WHERE rollout = %(rollout)s AND champion_status BETWEEN 200 AND 299
ORDER BY at DESC
LIMIT 2000;

-- name: add_team
INSERT INTO teams (name) VALUES (%(team)s) ON CONFLICT (name) DO NOTHING;

-- name: add_release
INSERT INTO releases (id, pipeline, team, owner, digest, model, profile)
VALUES (%(id)s, %(pipeline)s, %(team)s, %(owner)s, %(digest)s, %(model)s, %(profile)s)
ON CONFLICT (id) DO NOTHING;

-- name: put_rollout
INSERT INTO rollouts (id, pipeline, candidate, champion, run_id, policy, state, step, weight, started_at, ended_at)
VALUES (%(id)s, %(pipeline)s, %(candidate)s, %(champion)s, %(run_id)s, %(policy)s, %(state)s, %(step)s, %(weight)s,
        to_timestamp(%(started_at)s), to_timestamp(%(ended_at)s))
ON CONFLICT (id) DO UPDATE
SET state = excluded.state, step = excluded.step, weight = excluded.weight, ended_at = excluded.ended_at;

-- name: journal_written
SELECT coalesce(max(sequence), 0) AS sequence FROM rollout_journal WHERE rollout = %(rollout)s;

-- name: add_journal
INSERT INTO rollout_journal (rollout, sequence, at, step, weight, action, verdict, why, measured)
VALUES (%(rollout)s, %(sequence)s, to_timestamp(%(at)s), %(step)s, %(weight)s, %(action)s, %(verdict)s, %(why)s,
        %(measured)s)
ON CONFLICT (rollout, sequence) DO NOTHING;

-- name: add_champion
INSERT INTO champions (pipeline, champion, previous, rollout, reason, actor, key, at)
VALUES (%(pipeline)s, %(champion)s, %(previous)s, %(rollout)s, %(reason)s, %(actor)s, %(key)s, to_timestamp(%(at)s))
ON CONFLICT (key) DO NOTHING;

-- name: add_alert
INSERT INTO alerts (level, source, pipeline, message, details, key, at, notified_at)
VALUES (%(level)s, %(source)s, %(pipeline)s, %(message)s, %(details)s, %(key)s, to_timestamp(%(at)s),
        to_timestamp(%(notified_at)s))
ON CONFLICT (key) DO UPDATE SET notified_at = coalesce(alerts.notified_at, excluded.notified_at);

-- name: try_lead
SELECT pg_try_advisory_lock(%(key)s) AS leads;
