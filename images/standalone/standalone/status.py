"""What runs, and whether it works."""

from __future__ import annotations

import time
from typing import Any

import httpx
import psutil

from refit.errors import BadInput, ServerUnavailable
from standalone.home import Home
from standalone.ports import HOST, Ports
from standalone.probes import PROBES
from standalone.programs import log_file
from standalone.record import Record
from standalone.supervisor import Supervisor


def addresses(ports: Ports) -> dict[str, str]:
    """What a person opens in a browser, or calls."""
    return {
        "airflow": f"http://{HOST}:{ports.airflow}",
        "mlflow": f"http://{HOST}:{ports.mlflow}",
        "gateway": f"http://{HOST}:{ports.gateway}",
    }


def problem_of(home: Home, ports: Ports, process: dict[str, Any]) -> str | None:
    """Why a program does not work, or None when it does.

    Args:
        home: where the stack keeps its files.
        ports: the stack's ports.
        process: supervisor's description of it.
    """
    if process["statename"] != "RUNNING":
        return f"{process['statename'].lower()} {process['spawnerr'] or process['description']}".strip()
    probe = PROBES.get(process["name"])  # a vLLM server has none here: the controller watches it
    return probe(home, ports, float(process["start"])) if probe else None


def status(home: Home) -> dict[str, Any]:
    """The stack as one document; `running` is False when there is none."""
    record = Record.read(home)
    if record is None or not record.runs():
        return {"running": False, "home": str(home.path), "programs": {}}
    with Supervisor(record.socket) as supervisor:
        processes = supervisor.processes()
    programs = {name: _describe(home, record.ports, process) for name, process in processes.items()}
    started = [program for program in programs.values() if program["state"] != "stopped"]
    return {
        "running": True,
        "ready": bool(started) and all(program["ready"] for program in started),
        "home": str(home.path),
        "memory_bytes": sum(program["memory_bytes"] for program in programs.values()),
        "addresses": addresses(record.ports),
        "programs": programs,
    }


def pipeline_status(home: Home, pipeline: str) -> dict[str, Any]:
    """What serves a line: champion, previous, challenger, split and rollout, from the controller.

    Raises:
        BadInput: there is no such line.
        ServerUnavailable: the controller does not answer.
    """
    record = Record.read(home)
    ports = record.ports if record else Ports.from_environment()
    try:
        answer = httpx.get(
            f"http://{HOST}:{ports.controller}/v1/pipelines/{pipeline}",
            headers={"Authorization": f"Bearer {home.secret('token')}"},
            timeout=10,
            trust_env=False,
        )
    except (httpx.HTTPError, FileNotFoundError) as error:
        raise ServerUnavailable(f"the rollout controller does not answer ({error}); `make up` starts it.") from error
    if answer.status_code == 404:
        raise BadInput(f"the controller knows no line named {pipeline!r}; the lines are the files in dags/pipelines/.")
    if answer.status_code != 200:
        raise ServerUnavailable(f"the rollout controller answers {answer.status_code}: {answer.text[:300]}")
    document: dict[str, Any] = answer.json()
    return document


def table(document: dict[str, Any]) -> list[str]:
    """The document for people: a line a program."""
    if not document["running"]:
        return [f"no stack runs in {document['home']}; `make up` starts it."]
    lines = [f"{'program':<24}{'state':<10}{'pid':>8}{'up':>8}{'memory':>9}  "]
    for name, program in document["programs"].items():
        state = "ready" if program["ready"] else program["state"]
        memory = f"{program['memory_bytes'] / 1e6:.0f} MB"
        up = f"{program['seconds'] // 60:.0f} min" if program["seconds"] >= 60 else f"{program['seconds']:.0f} s"
        note = program["why"] or ""
        lines.append(f"{name:<24}{state:<10}{program['pid'] or '-':>8}{up:>8}{memory:>9}  {note}".rstrip())
    lines += [f"{name:<24}{address}" for name, address in document["addresses"].items()]
    return lines


def _describe(home: Home, ports: Ports, process: dict[str, Any]) -> dict[str, Any]:
    stopped = process["statename"] == "STOPPED"
    problem = None if stopped else problem_of(home, ports, process)
    running = process["statename"] == "RUNNING"
    return {
        "state": process["statename"].lower(),
        "ready": running and problem is None,
        "why": problem,
        "pid": process["pid"] or None,
        "seconds": round(time.time() - process["start"], 1) if running else 0.0,
        "memory_bytes": memory_of(process["pid"]) if running else 0,
        "log": str(log_file(home, process["name"])),
    }


def memory_of(pid: int) -> int:
    """Bytes of a process and its descendants; pages that they share are counted once (PSS) where the kernel tells."""
    total = 0
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    for member in members:
        try:
            total += member.memory_full_info().pss
        except psutil.AccessDenied:
            total += member.memory_info().rss
        except psutil.Error:
            continue
    return total
