"""One look at a step of a rollout: the named statements of `sql/`, asked and put into the words of `verdicts`."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from refit.sql import metric, query
from refit.statistics import Summary
from serving.database import Connection, Row
from serving.routes import CHALLENGER, CHAMPION
from serving.verdicts import NOBODY, Measured, Shadow, Side

METRIC = "resolved"


def measure(connection: Connection, rollout: str, step: int, weight: int, window: float) -> Measured:
    """What there is to know about a step.

    Args:
        weight: the challenger's share; 0 is the shadow step, at 100 the step before is the control.
        window: seconds that count as recent.
    """
    if weight == 0:
        return Measured(shadow=_shadow(connection, rollout))
    outcomes = {
        (row["step"], row["assigned"]): row
        for row in connection.execute(metric(METRIC).encode(), {"rollout": rollout}).fetchall()
    }
    concurrent = weight < 100
    control = step if concurrent else step - 1
    return Measured(
        champion=_side(connection, rollout, control, CHAMPION, window, outcomes.get((control, CHAMPION))),
        challenger=_side(connection, rollout, step, CHALLENGER, window, outcomes.get((step, CHALLENGER))),
        strata=tuple(
            (_summary(outcomes[number, CHAMPION]), _summary(outcomes[number, CHALLENGER]))
            for number in range(1, step + 1)
            if (number, CHAMPION) in outcomes and (number, CHALLENGER) in outcomes
        ),
        concurrent=concurrent,
    )


def _side(connection: Connection, rollout: str, step: int, assigned: str, window: float, outcome: Row | None) -> Side:
    given = {"rollout": rollout, "step": step, "window": window, "assigned": assigned}
    traffic = connection.execute(query("rollout_traffic").encode(), given).fetchall()
    row = next((row for row in traffic if row["assigned"] == assigned), None)
    if row is None:
        return Side()
    latencies = connection.execute(query("rollout_latencies").encode(), given).fetchall()
    return Side(
        requests=row["requests"],
        users=row["users"],
        errors=row["errors"],
        recent=row["recent"],
        failovers=row["failovers"],
        age=row["age"],
        latencies=tuple(found["seconds"] for found in latencies),
        outcomes=_summary(outcome) if outcome else NOBODY,
        events=outcome["events"] if outcome else 0,
        feedback_age=(datetime.now(UTC) - outcome["newest"]).total_seconds() if outcome else math.inf,
    )


def _shadow(connection: Connection, rollout: str) -> Shadow:
    rows = connection.execute(query("shadow_pairs_of").encode(), {"rollout": rollout}).fetchall()
    return Shadow(
        statuses=tuple(row["candidate_status"] or 0 for row in rows),
        champion_seconds=tuple(row["champion_seconds"] or 0.0 for row in rows),
        candidate_seconds=tuple(row["candidate_seconds"] or 0.0 for row in rows),
        same=sum(bool(row["same"]) for row in rows),
        age=min((row["age"] for row in rows), default=math.inf),
    )


def _summary(row: Row) -> Summary:
    mean, variance = row["mean"], row["variance"]
    return Summary(
        row["users"], math.nan if mean is None else float(mean), math.nan if variance is None else float(variance)
    )
