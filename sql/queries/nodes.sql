-- Machines in quarantine. It ends by itself, or by release_node once the machine was mended.

-- name: quarantine_node
INSERT INTO nodes (name, reason, job, until)
VALUES (%(name)s, %(reason)s, %(job)s, now() + %(hours)s * interval '1 hour')
ON CONFLICT (name) DO UPDATE SET
    reason = excluded.reason, job = excluded.job, quarantined_at = excluded.quarantined_at, until = excluded.until;

-- name: quarantined_nodes
-- One row a machine that is to be avoided now.
SELECT name FROM nodes WHERE until > now() ORDER BY name;

-- name: release_node
DELETE FROM nodes WHERE name = %(name)s;
