-- What the recorder writes. It may write a row twice (it repeats lines after a kill); the keys make that harmless.

-- name: add_exposures
INSERT INTO exposures (request_id, pipeline, rollout, step, user_hash, assigned, served, release, status, flags,
                       seconds, first_byte, at)
VALUES (%(request_id)s, %(pipeline)s, %(rollout)s, %(step)s, %(user_hash)s, %(assigned)s, %(served)s, %(release)s,
        %(status)s, %(flags)s, %(seconds)s, %(first_byte)s, %(at)s)
ON CONFLICT (request_id) DO NOTHING;

-- name: add_feedback
-- The first word stands: a user who clicks twice has said it once.
INSERT INTO feedback (request_id, resolved, at)
VALUES (%(request_id)s, %(resolved)s, to_timestamp(%(at)s))
ON CONFLICT (request_id) DO NOTHING;

-- name: add_shadow_pairs
INSERT INTO shadow_pairs (rollout, request_id, champion_answer, candidate_answer, champion_seconds, candidate_seconds,
                          champion_status, candidate_status)
VALUES (%(rollout)s, %(request_id)s, %(champion_answer)s, %(candidate_answer)s, %(champion_seconds)s,
        %(candidate_seconds)s, %(champion_status)s, %(candidate_status)s)
ON CONFLICT (rollout, request_id) DO NOTHING;
