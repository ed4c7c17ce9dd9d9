"""`refit demo PIPELINE`: the whole line, watched. Drills are asked for by environment, as `make` passes them.

DEMO_RESET=1       the first champion serves again; what was computed stays cached
SABOTAGE=labels    a candidate trained on shuffled labels: the gate must stop it
FORCE_GATE=1       with SABOTAGE: let it through the gate; the rollout must take it back by itself
DEMO_RATE=8        requests a second of the replayed users during a rollout
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refit import files, runs
from refit.errors import BadInput, GateRefused, RefitError, ServerUnavailable
from refit.store import join, store_for
from standalone import run, stack
from standalone.airflow import Airflow
from standalone.controller import Controller
from standalone.demo.memory import PeakMemory
from standalone.demo.summary import Finished, page, summarize
from standalone.demo.users import StandIn
from standalone.environment import for_programs, variables
from standalone.home import Home, root
from standalone.ports import Ports
from standalone.programs import select
from standalone.record import Record
from standalone.status import addresses

QUIET_RATE, BUSY_RATE = 0.5, 8.0
RESET_SECONDS = 300.0
GOOD = ("promoted", "already champion")


def register(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this module's subcommand."""
    demo = subcommands.add_parser("demo", help="retrain a line, roll it out to replayed users, and say what changed")
    demo.add_argument("pipeline", metavar="PIPELINE", help="the name of a line, as tiny")
    demo.set_defaults(command=_demo)


def _demo(arguments: argparse.Namespace) -> dict[str, Any]:
    home, pipeline = Home.from_environment(), arguments.pipeline
    sabotage, forced = _drill()
    run.file_of(pipeline)
    stack.up(home, Ports.from_environment(), select(None), seconds=300.0)
    controller = Controller(home)
    if os.environ.get("DEMO_RESET") == "1":
        _reset(controller, pipeline)
    if sabotage and len(controller.line(pipeline)["history"]) < 2:
        print("demo: a properly trained champion first, for the drill to be worth something", file=sys.stderr)
        _expect(_run(home, pipeline, ()), GOOD)
    sets = [*(["data.drill=shuffle_labels"] if sabotage else []), *(["evaluate.gate.force=true"] if forced else [])]
    summary = _run(home, pipeline, sets)
    files.write(home.path / "summary.json", json.dumps(summary, indent=1).encode())
    for line in page(summary):
        print(line, file=sys.stderr)
    _expect(summary, ("rolled back",) if forced else ("stopped at gate",) if sabotage else GOOD)
    return summary


def _drill() -> tuple[bool, bool]:
    sabotage, forced = os.environ.get("SABOTAGE", ""), os.environ.get("FORCE_GATE", "") == "1"
    if sabotage not in ("", "labels"):
        raise BadInput(f"SABOTAGE is {sabotage!r}; the one drill there is is SABOTAGE=labels.")
    if forced and not sabotage:
        raise BadInput("FORCE_GATE=1 is for a drill; use it with SABOTAGE=labels.")
    return bool(sabotage), forced


def _expect(summary: Mapping[str, Any], outcomes: Sequence[str]) -> None:
    if summary["outcome"] not in outcomes:
        raise GateRefused(f"expected {' or '.join(outcomes)}, the run ended as {summary['outcome']}: {summary['why']}")


def _reset(controller: Controller, pipeline: str) -> None:
    """The first champion serves again. A line that never had one has nothing to reset."""
    line = controller.line(pipeline)
    if not line["history"]:
        return
    first = line["history"][0]["release"]
    if (line["champion"] or {}).get("id") != first:
        controller.roll_back(pipeline, "the demo is shown again", to=first)
    deadline = time.monotonic() + RESET_SECONDS
    while (controller.line(pipeline)["champion"] or {}).get("id") != first:
        if time.monotonic() > deadline:
            raise ServerUnavailable(
                f"the first champion {first} is not back after {RESET_SECONDS:.0f} s; see `make status`."
            )
        time.sleep(1)
    print(f"demo: the first champion {first} serves again", file=sys.stderr)


def _run(home: Home, pipeline: str, sets: Sequence[str]) -> dict[str, Any]:
    """One run of the line, with users around it; returns its summary."""
    record = Record.read(home)
    assert record is not None  # the stack is up
    environment = for_programs(home, variables(home, record.ports, record.socket))
    users, controller = StandIn(pipeline, home.path / "demo", environment), Controller(home)
    with Airflow(home) as airflow, PeakMemory(str(home.path)) as memory:
        run_id = run.start(airflow, pipeline, sets)
        address = f"{airflow.url}/dags/retrain_{pipeline}/runs/{run_id}"
        print(f"demo: started {run_id}: {address}", file=sys.stderr)
        folder = runs.folder(run.store_of(home), pipeline, run_id)
        try:
            crowd = Crowd(users, controller, pipeline, folder)
            outcome = run.follow(airflow, home, pipeline, run_id, crowd.adjust)
        finally:
            users.leave()
        rollout = (outcome.get("rollout") or {}).get("id")
        return summarize(
            Finished(
                pipeline=pipeline, run_id=run_id, folder=folder, outcome=outcome,
                run=airflow.run(f"retrain_{pipeline}", run_id), tasks=airflow.tasks(f"retrain_{pipeline}", run_id),
                rollout=controller.rollout(rollout) if rollout else None, requests=users.counts(),
                split=_split(pipeline, environment), peak_memory_bytes=memory.bytes,
                addresses={"run": address, **addresses(record.ports), **_report(outcome)},
            )
        )  # fmt: skip


class Crowd:
    """Users come when there is somebody to answer them, and come in numbers when there is a rollout to judge."""

    def __init__(self, users: StandIn, controller: Controller, pipeline: str, folder: str) -> None:
        self._users, self._controller, self._pipeline, self._folder = users, controller, pipeline, folder
        self._rate = 0.0

    def adjust(self) -> None:
        """Let the rate follow what happens; a service that is away changes nothing."""
        try:
            line = self._controller.line(self._pipeline)
        except RefitError:
            return
        items = self._items()
        if items is None or line["champion"] is None:
            return
        busy = float(os.environ.get("DEMO_RATE") or BUSY_RATE)
        rate = busy if line["rollout"] else QUIET_RATE
        if rate != self._rate:
            self._users.ask(items, rate=rate)
            self._rate = rate

    def _items(self) -> Path | None:
        for record in runs.noted(self._folder):
            manifest = store_for(record["output"]).manifest(record["output"]) if record["kind"] == "prepare" else None
            if manifest is not None:
                dataset = manifest.outputs["dataset"]
                return store_for(dataset).local(dataset) / "heldout.parquet"
        return None


def _split(pipeline: str, environment: Mapping[str, str]) -> int | None:
    """The challenger's share as Envoy itself has it; None where nobody can say."""
    asked = subprocess.run(
        [str(root() / ".venv" / "bin" / "serving"), "split", pipeline],
        env=dict(environment), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return int(json.loads(asked.stdout.splitlines()[-1])["weight"]) if asked.returncode == 0 else None


def _report(outcome: Mapping[str, Any]) -> dict[str, str]:
    output = next((job["output"] for job in outcome.get("jobs") or [] if job["kind"] == "compare"), None)
    return {"report": join(output, "report.html")} if output else {}
