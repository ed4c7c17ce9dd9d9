"""Machines in quarantine: written down when a rank is slow there, and avoided by the pods of the next try.

Avoided where that can be: a slow machine is better than none, so a pod may still come back to one (nothing else is
free, or its operator has an affinity of its own). A job leaves each machine once; where it comes back, it stays.

It ends by itself after a day, so that what was taken for a bad machine wrongly does not empty a cluster; a person ends
it sooner by the query `release_node`. Nobody looks whether a machine is well again: the next training there does.

What it does not do: cordon a node. That takes rights in the cluster that a workflow should not have.
"""

from __future__ import annotations

import logging

from kubernetes import client as k8s

from operators import projection
from refit.sql import query

log = logging.getLogger(__name__)

HOURS = 24.0
"""How long a machine is avoided."""

HOSTNAME = "kubernetes.io/hostname"
"""The label by which a pod avoids a node."""


def quarantine(name: str, reason: str, job: str) -> bool:
    """Have a machine avoided from now on; whether its job should leave it.

    Not where there is no database to write it to, or it is away; nor a second time.
    """
    key = f"node/{name}/{job}"
    row = {"name": name, "reason": reason, "job": job, "hours": HOURS}
    left = projection.configured() and projection.alerted(key)
    written = projection.configured() and projection.quarantine_node(**row)
    projection.alert("suspicious", "node", f"{name}: {reason}", key=key, node=name)
    return written and not left


def quarantined() -> list[str]:
    """The machines to be avoided; none where nobody knows, for a job is better there than nowhere."""
    if not projection.configured():
        return []
    import psycopg

    try:
        with projection.connection() as database:
            return [str(name) for (name,) in database.execute(query("quarantined_nodes")).fetchall()]
    except psycopg.OperationalError as error:
        log.warning("Postgres is away, no node is avoided: %s", str(error).strip().splitlines()[0])
        return []


def elsewhere(names: list[str]) -> k8s.V1Affinity:
    """What keeps a pod off these nodes, unless nothing else is free."""
    avoid = k8s.V1NodeSelectorRequirement(key=HOSTNAME, operator="NotIn", values=names)
    preferred = k8s.V1PreferredSchedulingTerm(weight=100, preference=k8s.V1NodeSelectorTerm(match_expressions=[avoid]))
    return k8s.V1Affinity(
        node_affinity=k8s.V1NodeAffinity(preferred_during_scheduling_ignored_during_execution=[preferred])
    )
