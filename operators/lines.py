"""Business lines as DAGs: one pipeline file, one line; schedule, form, documentation and house rules follow from it.

A file that cannot be read, or is wrong, hides no other: it becomes a line that says why and refuses to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import Asset, AssetOrTimeSchedule, CronTriggerTimetable, Param

from operators.outcome import DAG_PREFIX, note_fault
from operators.retries import FAILURES, ByKind
from refit.errors import BadSpec
from refit.form import OVERRIDES, form_fields, overrides_schema
from refit.pipeline import load
from refit.spec import Pipeline

INVALID = "invalid"


@dataclass(frozen=True)
class Line:
    """A pipeline file: the spec it holds, or (`spec` None) what is wrong with it."""

    path: Path
    spec: Pipeline | None
    fault: str = ""

    @property
    def name(self) -> str:
        """The line's name; a broken file's is that of the file."""
        return self.spec.name if self.spec else self.path.stem

    @property
    def dag_id(self) -> str:
        """One DAG a line."""
        return f"{DAG_PREFIX}{self.name}"

    @property
    def steps(self) -> tuple[int, ...]:
        """The shares of the rollout, as the file has them."""
        return self.spec.rollout.steps if self.spec else ()

    def schedule(self) -> Any:
        """By the clock, when new raw data lands, or both."""
        if self.spec is None:
            return None
        assets = [Asset(name=f"raw_{self.name}", uri=f"refit://raw/{self.name}")] if self.spec.on_new_data else []
        if self.spec.schedule is None:
            return assets or None
        clock = CronTriggerTimetable(self.spec.schedule, timezone="UTC")
        return AssetOrTimeSchedule(timetable=clock, assets=assets) if assets else clock

    def form(self) -> dict[str, Param]:
        """The trigger form: the dozen things people change, and `overrides` for everything else."""
        if self.spec is None:
            return {}
        fields = {field.name: _param(field.default, field.section, field.schema) for field in form_fields(self.spec)}
        help = (
            "Any other setting, by its place in the pipeline file, as in "
            '`{"train": {"ranks": 2, "accumulation": 2}}`. Unknown names are refused.'
        )
        schema = {**overrides_schema(), "title": "Everything else", "description": help}
        return {**fields, OVERRIDES: _param({}, "Everything else", schema)}

    def docs(self) -> str:
        """What the DAG's page says."""
        if self.spec is None:
            faults = "\n".join(f"- {fault}" for fault in self.fault.splitlines())
            return f"# {self.path.name} cannot be used\n\n{faults}\n\nCorrect the file; the line comes back by itself."
        spec = self.spec
        sources = "\n".join(
            f"| {source.name} | `{source.uri}` | {source.format} | {source.weight:g} |" for source in spec.data.sources
        )
        steps = " → ".join(["shadow", *(f"{step} %" for step in spec.rollout.steps)])
        return (
            f"# {spec.title}\n\n{spec.description}\n\n"
            f"Team **{spec.team}**, owner {spec.owner}. Settings: `{self.path.name}`.\n\n"
            f"| source | where | format | weight |\n|---|---|---|---|\n{sources}\n\n"
            f"Trains `{spec.train.base}` ({spec.train.method}, {spec.train.max_steps} steps), "
            f"asks {spec.evaluate.max_items} held-out items, rolls out {steps}.\n\n"
            "Data, training and evaluation that were done before are answered from their folders. A candidate that is "
            "not better stops at `evaluate.gate`; one that does harm is taken back by the controller."
        )

    def house_rules(self) -> dict[str, Any]:
        """What all lines have in common, as arguments of a DAG."""
        spec = self.spec
        return {
            "dag_display_name": f"Retrain: {spec.title}" if spec else f"Invalid: {self.path.name}",
            "description": spec.description if spec else self.fault.splitlines()[0],
            "catchup": False,
            "max_active_runs": 1,
            "dagrun_timeout": timedelta(hours=spec.timeout_hours) if spec else None,
            "tags": ["retrain", spec.team] if spec else ["retrain", INVALID],
            "default_args": {
                "owner": spec.owner if spec else "nobody",
                "retries": FAILURES,
                "retry_delay": timedelta(seconds=15),
                "retry_policy": ByKind(),
                "on_failure_callback": note_fault,
            },
        }


def load_lines(folder: Path) -> list[Line]:
    """Every pipeline file of a folder, the broken ones too."""
    lines: dict[str, Line] = {}
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        try:
            line = Line(path, load(path))
        except BadSpec as error:
            line = Line(path, None, str(error))
        if (other := lines.get(line.name)) is not None:
            why = f"{path}: name is {line.name!r}, and {other.path.name} has that name already; give it another."
            line = Line(path.with_stem(f"{path.stem}_again"), None, line.fault or why)
        lines[line.name] = line
    return list(lines.values())


def _param(default: Any, section: str, schema: dict[str, Any]) -> Param:
    rest = {name: value for name, value in schema.items() if name not in ("default", "description")}
    return Param(default, section=section, description_md=schema.get("description"), **rest)
