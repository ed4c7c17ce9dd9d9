"""Machines in quarantine: written down when a rank is slow there, and avoided by the pods of the next try.

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
    """Have a machine avoided from now on; False where there is no database to write it to, or it is away."""
    row = {"name": name, "reason": reason, "job": job, "hours": HOURS}
    written = projection.configured() and projection.quarantine_node(**row)
    projection.alert("suspicious", "node", f"{name}: {reason}", key=f"node/{name}/{job}", node=name)
    return written


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
    """What keeps a pod off these nodes."""
    avoid = k8s.V1NodeSelectorRequirement(key=HOSTNAME, operator="NotIn", values=names)
    terms = [k8s.V1NodeSelectorTerm(match_expressions=[avoid])]
    return k8s.V1Affinity(
        node_affinity=k8s.V1NodeAffinity(
            required_during_scheduling_ignored_during_execution=k8s.V1NodeSelector(node_selector_terms=terms)
        )
    )
