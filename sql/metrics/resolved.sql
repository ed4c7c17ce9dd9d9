-- Were people helped? The share of a user's requests that ended resolved, by step of a rollout and assigned side.
-- A user counts once in a step, with the mean of their requests, on the side they were assigned, whatever served them:
-- a challenger that is dead and replaced by the champion must not look good by it.
WITH users AS (
    SELECT e.step, e.assigned, e.user_hash,
           avg(f.resolved::int)::float8 AS resolved,
           count(*) AS events,
           max(f.at) AS newest
    FROM exposures e
    JOIN feedback f USING (request_id)
    WHERE e.rollout = %(rollout)s AND e.user_hash IS NOT NULL
    GROUP BY e.step, e.assigned, e.user_hash
)
SELECT step, assigned,
       count(*) AS users,
       avg(resolved) AS mean,
       var_samp(resolved) AS variance,
       sum(events)::bigint AS events,
       max(newest) AS newest
FROM users
GROUP BY step, assigned
ORDER BY step, assigned;
