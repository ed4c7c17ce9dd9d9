"""`refit run PIPELINE` and `refit rollback PIPELINE`: what the UI's form and button do, from a terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from refit import runs
from refit.errors import BadInput, BadSpec, GateRefused, Infrastructure, RefitError, ServerUnavailable
from refit.form import OVERRIDES, form_fields
from refit.pipeline import check_sources, load, merge, parse_set
from refit.store import join, store_for
from standalone.airflow import Airflow
from standalone.controller import Controller
from standalone.home import Home, root
from standalone.watch import Watch

POLL_SECONDS = 1.0
READ_SECONDS = 180.0
"""How long Airflow may take to read the pipeline files; a loaded machine imports its providers slowly."""
ENDED = ("success", "failed")


def register(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this module's subcommands."""
    run = subcommands.add_parser("run", help="retrain a line, as its trigger form would")
    run.add_argument("pipeline", metavar="PIPELINE", help="the name of a line, as tiny")
    run.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="sets",
                     help="override a field: train.max_steps=60")  # fmt: skip
    run.add_argument("--wait", action="store_true", help="show the progress, and end as the run ends")
    run.set_defaults(command=_run)

    back = subcommands.add_parser("rollback", help="take a running rollout back, or put the previous champion back")
    back.add_argument("pipeline", metavar="PIPELINE", help="the name of a line, as tiny")
    back.add_argument("--to", metavar="RELEASE", help="an earlier champion; default: the previous one")
    back.add_argument("--reason", default="from the command line", help="kept with the history")
    back.set_defaults(command=_rollback)


def start(airflow: Airflow, pipeline: str, sets: Iterable[str] = ()) -> str:
    """Check everything that can be checked here, then start a run; returns its id.

    Raises:
        BadSpec: every fault of the file, the settings and the sources at once, before anything is started.
    """
    conf = form_values(pipeline, list(sets))
    _await_line(airflow, f"retrain_{pipeline}")
    airflow.unpause(f"retrain_{pipeline}")
    return airflow.trigger(f"retrain_{pipeline}", conf)


def _await_line(airflow: Airflow, dag_id: str) -> None:
    """A stack that has just started, or a file that was just written, has to be read by Airflow first."""
    deadline = time.monotonic() + READ_SECONDS
    while not airflow.knows(dag_id):
        if time.monotonic() > deadline:
            raise ServerUnavailable(
                f"Airflow has not read {dag_id} within {READ_SECONDS:.0f} s; see logs/airflow-dag-processor.log."
            )
        time.sleep(POLL_SECONDS)


def form_values(pipeline: str, sets: list[str]) -> dict[str, Any]:
    """`--set` strings as the trigger form's values: a field of the form by its name, the rest as overrides."""
    path = file_of(pipeline)
    spec = load(path, sets)
    if faults := check_sources(spec, path.name):
        raise BadSpec("\n".join(faults))
    fields = {field.name for field in form_fields(spec)}
    conf: dict[str, Any] = {}
    for text in sets:
        name = text.partition("=")[0].strip()
        nested = parse_set(text)
        if name in fields:
            value: Any = nested
            for part in name.split("."):
                value = value[part]
            conf[name] = value
        else:
            conf[OVERRIDES] = merge(conf.get(OVERRIDES, {}), nested)
    return conf


def file_of(pipeline: str) -> Path:
    """The file of a line.

    Raises:
        BadInput: there is no line of that name; the message names those there are.
    """
    folder = Path(os.environ.get("REFIT_PIPELINES") or root() / "dags" / "pipelines")
    known: dict[str, Path] = {}
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        try:
            known[load(path).name] = path
        except BadSpec:
            known[path.stem] = path
    if pipeline not in known:
        raise BadInput(f"there is no line named {pipeline!r}; the lines are {', '.join(known)}.")
    return known[pipeline]


def store_of(home: Home) -> str:
    """The store of the stack that runs in a home."""
    return os.environ.get("REFIT_STORE") or home.store.as_uri()


def recent(home: Home, pipeline: str, limit: int = 5) -> list[dict[str, Any]]:
    """The newest runs of a line, the newest first: when, how it stands, how it ended and why."""
    with Airflow(home) as airflow:
        found = airflow.runs(f"retrain_{pipeline}", limit)
    return [
        {
            "run_id": run["dag_run_id"],
            "state": run["state"],
            "started": run.get("start_date"),
            "ended": run.get("end_date"),
            **outcome_of(store_of(home), pipeline, run["dag_run_id"]),
        }
        for run in found
    ]


def outcome_of(store: str, pipeline: str, run_id: str) -> dict[str, Any]:
    """A run's outcome and why, as its last task wrote them; None twice where it has not yet."""
    place = runs.folder(store, pipeline, run_id)
    try:
        document = json.loads(store_for(place).read(join(place, runs.OUTCOME)))
    except (FileNotFoundError, ValueError):
        document = {}
    return {"outcome": document.get("outcome"), "why": document.get("why")}


def follow(
    airflow: Airflow, home: Home, pipeline: str, run_id: str, meanwhile: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Show a run's progress until it ends, doing `meanwhile` at each look; returns its outcome document."""
    watch = Watch(airflow, store_of(home), pipeline, run_id, lambda: Controller(home).line(pipeline)["rollout"])
    away_since: float | None = None
    while True:
        try:
            state = watch.look()
            away_since = None
        except ServerUnavailable:  # Airflow may be restarted under a run
            away_since = away_since or time.monotonic()
            if time.monotonic() - away_since > 300:
                raise
            state = ""
        if state in ENDED:
            return watch.outcome(state)
        meanwhile()
        time.sleep(POLL_SECONDS)


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    home = Home.from_environment()
    with Airflow(home) as airflow:
        run_id = start(airflow, arguments.pipeline, arguments.sets)
        address = f"{airflow.url}/dags/retrain_{arguments.pipeline}/runs/{run_id}"
        print(f"started {run_id}: {address}", file=sys.stderr)
        if not arguments.wait:
            return {"pipeline": arguments.pipeline, "run_id": run_id, "address": address}
        document = follow(airflow, home, arguments.pipeline, run_id)
    outcome, why = document["outcome"], document.get("why") or ""
    if document["state"] != "success":
        raise _error(outcome)(f"{outcome}: {why}")
    print(f"{outcome}: {why}", file=sys.stderr)
    return {"pipeline": arguments.pipeline, "run_id": run_id, "outcome": outcome, "why": why, "address": address}


def _error(outcome: str) -> type[RefitError]:
    return GateRefused if outcome in ("stopped at gate", "rolled back") else Infrastructure


def _rollback(arguments: argparse.Namespace) -> dict[str, Any]:
    controller = Controller(Home.from_environment())
    document = controller.roll_back(arguments.pipeline, arguments.reason, arguments.to)
    print(json.dumps(document, indent=1), file=sys.stderr)
    return document
