"""Airflow's pools: how much of each stage may be under way at once, deferred tasks included.

A deferred task holds no worker, but its job holds a card: so a pool here counts it (`include_deferred`). In a cluster
Kueue's quota is what really decides; these are the embedded default's.
"""

from __future__ import annotations

from typing import Any

import httpx

from refit.errors import ServerUnavailable

POOLS = {
    "data": (2, "Data jobs under way"),
    "train": (1, "Trainings under way, planned and tried ones too: one card, one training"),
    "evaluate": (1, "Evaluations under way: two at once would measure each other's latency"),
    "serve": (2, "Model servers that are starting"),
}
"""Name → slots, and what they count."""


def ensure(airflow: str, token: str) -> list[str]:
    """Make the pools that are missing; what a person changed stays as it is.

    Args:
        airflow: the address of the API server.
        token: of a user who may change pools.

    Returns:
        The names that were new.
    """
    made = []
    with httpx.Client(
        base_url=airflow, headers={"authorization": f"Bearer {token}"}, timeout=30, trust_env=False
    ) as client:
        for name, (slots, description) in POOLS.items():
            pool: dict[str, Any] = {"name": name, "slots": slots, "description": description, "include_deferred": True}
            answer = client.post("/api/v2/pools", json=pool)
            if answer.status_code == 409:
                continue
            if answer.is_error:
                raise ServerUnavailable(f"Airflow does not make the pool {name}: {answer.status_code}: {answer.text}")
            made.append(name)
    return made
