"""The last step as Prometheus reads it: `metrics.prom` in the job's folder, for node_exporter's textfile collector.

A file opens no port and needs no library: its format is a line a figure. Point `--collector.textfile.directory` at a
folder of links to such files, or print it elsewhere by `trainer status OUTPUT --prometheus`.
Source: https://prometheus.io/docs/instrumenting/exposition_formats (text format 0.0.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FILE = "metrics.prom"

GAUGES = {
    "loss": ("loss", "Loss of the last step, nats a target"),
    "grad_norm": ("gradient_norm", "Norm of the gradient before clipping"),
    "lr": ("learning_rate", "Learning rate"),
    "seconds": ("step_seconds", "Seconds of the last step"),
    "tokens_per_second": ("tokens_per_second", "Tokens of all ranks by the second"),
    "mfu": ("mfu_ratio", "Share of the devices' peak FLOP/s that is used"),
    "resident": ("resident_bytes", "Memory of rank 0"),
    "validation_loss": ("validation_loss", "Loss on the validation split, when it was looked at in the last step"),
    "padding": ("padding_ratio", "Share of places of the last batch that are empty"),
    "duplicates": ("duplicate_documents_ratio", "Share of documents of the last batch that came before"),
    "skips": ("skipped_steps", "Steps that were skipped because they were not finite"),
    "utilisation": ("device_utilisation_ratio", "Share of the time in which rank 0's device computed"),
    "temperature": ("device_temperature_celsius", "Temperature of rank 0's device"),
    "power": ("device_power_watts", "Power of rank 0's device"),
    "device_memory": ("device_memory_bytes", "Memory of rank 0's device that is in use"),
    "device_peak": ("device_peak_bytes", "The most memory of rank 0's device that its tensors have taken"),
}  # fmt: skip

PARTS = ("data", "forward", "backward", "communication", "wait", "optimizer", "validation", "save")


def render(job: Mapping[str, str], record: Mapping[str, Any], *, heartbeat: float, total: int) -> str:
    """The lines; `job` are the labels that each has, `record` is a step's, empty before the first."""
    lines: list[str] = []
    _gauge(lines, "heartbeat_seconds", "When the trainer was last heard, in seconds since 1970", [(job, heartbeat)])
    _gauge(lines, "steps_planned", "Optimizer steps in all", [(job, total)])
    if "step" in record:
        _gauge(lines, "step", "Optimizer steps that are finished", [(job, record["step"])])
    for key, (name, text) in GAUGES.items():
        if isinstance(record.get(key), int | float):
            _gauge(lines, name, text, [(job, record[key])])
    parts = [({**job, "part": part}, record[part]) for part in PARTS if part in record]
    _gauge(lines, "step_part_seconds", "Seconds of the last step by part; a save counts to the step after it", parts)
    shares = [({**job, "domain": name}, share) for name, share in record.get("domains", {}).items()]
    _gauge(lines, "domain_tokens_ratio", "Share of the last batch's tokens by domain", shares)
    return "".join(f"{line}\n" for line in lines)


def _gauge(lines: list[str], name: str, text: str, values: Iterable[tuple[Mapping[str, str], float]]) -> None:
    told = [f"refit_train_{name}{{{_labels(labels)}}} {float(value)!r}" for labels, value in values]
    if told:
        lines += [f"# HELP refit_train_{name} {text}", f"# TYPE refit_train_{name} gauge", *told]


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
