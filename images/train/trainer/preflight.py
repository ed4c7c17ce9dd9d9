"""Before a big run: is every rank's place fit for it? Reports of all ranks of this machine, judged together.

Nothing is answered from an earlier time: free disk, free memory, clocks, the store and the health of cards change from
hour to hour, and what does not change costs a second to look at.

What it does not do: reach other machines. Run it on each and hand the answers of the others to the last by `--with`;
the judge takes reports of any number of nodes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from refit.errors import BadInput, PreflightRefused, StoreUnavailable
from refit.spec import Train
from refit.store import FileStore, store_for
from trainer import checkpoints
from trainer.judge import Check, Need, judge
from trainer.memory import least, on_cards
from trainer.rank import PARENT
from trainer.reports import Report

PROBE_SECONDS = 120.0
"""How long a rank may take to its report. A store that does not answer is given up on before."""

EXPORT_BYTES = 4
"""A parameter's bytes in the model that is written at the end, at most."""


def preflight(train: Train, plan: dict[str, Any], output: str, others: Iterable[Report] = ()) -> dict[str, Any]:
    """Start a probe a rank, judge what they and `others` report; the answer where all is well.

    Raises:
        PreflightRefused: something does not fit; the message names every fault.
        StoreUnavailable: the store does not answer, and nothing else is wrong.
    """
    reports = [*gather(train.ranks, output, train.checkpoint.copy_to), *others]
    checks = judge(reports, need_of(train, plan, output))
    show(checks, reports)
    refuse(checks)
    return {
        "ok": True, "ranks": [report.model_dump(mode="json") for report in reports],
        "checks": [check.facts() for check in checks],
    }  # fmt: skip


def gather(ranks: int, output: str, copies: str | None = None) -> list[Report]:
    """A report of every rank of this machine, from processes of their own that look at the same time."""
    environment = {**os.environ, PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer.reports", str(rank), output, *([copies] if copies else [])],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    deadline = time.monotonic() + PROBE_SECONDS
    try:
        return [_report(rank, process, deadline) for rank, process in enumerate(processes)]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def _report(rank: int, process: subprocess.Popen[str], deadline: float) -> Report:
    host = socket.gethostname()
    try:
        out, said = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a dead network disk holds even the killed
            process.communicate(timeout=1)
        return Report(host=host, rank=rank, silent=f"nothing within {PROBE_SECONDS:.0f} s")
    if process.returncode != 0:
        last = said.strip().splitlines()[-1:] or ["no word"]
        return Report(host=host, rank=rank, silent=f"ended by {process.returncode}: {last[0]}")
    return Report.model_validate_json(out.strip().splitlines()[-1])


def need_of(train: Train, plan: dict[str, Any], output: str) -> Need:
    """What a plan needs of each node. Checkpoints that are there already have their room."""
    store = store_for(output)
    one = int(plan["checkpoint_bytes"])
    if isinstance(store, FileStore):
        held = min(train.checkpoint.keep_last, sum(1 for _ in checkpoints.committed(output)))
        count = train.checkpoint.keep_last + 1 - held
    else:
        count = 1  # the one being written; finished ones are in the store
    model = EXPORT_BYTES * int(plan["parameters"])
    if train.checkpoint.fast_every_steps or train.checkpoint.fast_every_minutes:
        # A fast one is a third of a full one: the weights, without both moments.
        count += -(-(train.checkpoint.keep_fast + 1) // 3)
    kinds = plan["bytes_per_rank"]
    return Need(
        ranks=train.ranks, gpus=train.gpus_per_node, disk=count * one + model,
        disk_for=f"{count} checkpoint(s) of {one / (1 << 30):.2f} GiB, and {model / (1 << 30):.2f} GiB for the model",
        memory_per_rank=sum(kinds.values()) - sum(on_cards(train, kinds).values()), memory_per_card=least(train, kinds),
    )  # fmt: skip


def read_reports(path: Path) -> list[Report]:
    """The reports in another machine's answer.

    Raises:
        BadInput: the file is not one.
    """
    try:
        answer = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
        return [Report.model_validate(report) for report in answer["ranks"]]
    except (OSError, LookupError, TypeError, ValueError, ValidationError) as error:
        raise BadInput(
            f"{path}: not the answer of a preflight that passed ({type(error).__name__}). Give the last line that "
            "trainer preflight prints on the other machine."
        ) from error


def show(checks: list[Check], reports: list[Report]) -> None:
    """The checks as a table for people."""
    hosts = sorted({report.host for report in reports})
    print(f"preflight of {len(reports)} rank(s) on {', '.join(hosts)}", file=sys.stderr)
    for check in checks:
        print(f"  {check.name:<10}{'ok' if not check.faults else f'{len(check.faults)} fault(s)'}", file=sys.stderr)


def refuse(checks: list[Check]) -> None:
    """Raise what the faults amount to; nothing where there are none."""
    faults = [fault for check in checks for fault in check.faults]
    if not faults:
        return
    kind = StoreUnavailable if all(fault.passing for fault in faults) else PreflightRefused
    raise kind("\n".join(map(str, faults)))
