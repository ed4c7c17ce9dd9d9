"""What a benchmark measures with, and where it writes: one table, printed and kept in bench-<stage>.json."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULT = Path(os.environ.get("REFIT_BENCH_TABLE") or "bench-data.json")
PYTHON_OF_PEERS = ROOT / ".venv-peers/bin/python"


def rate(work: Callable[[], int], runs: int = 5) -> float:
    """Items a second: the median of some runs, after one to warm up."""
    work()
    found = []
    for _ in range(runs):
        started = time.perf_counter()
        done = work()
        found.append(done / (time.perf_counter() - started))
    return statistics.median(found)


def peer(work: str, name: str, file: Path, count: int, *more: str) -> float | None:
    """Documents a second of a library in the peers' venv; none where that is not made."""
    if not PYTHON_OF_PEERS.exists():
        print("\nno peers: `make bench-data` makes their venv")
        return None
    program = Path(__file__).parent / "peers.py"
    done = subprocess.run(
        [PYTHON_OF_PEERS, program, work, name, file, str(count), *more], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    return float(answer["documents"] / answer["seconds"])


def note(name: str, ours: float, peer: float | None = None, unit: str = "/s", **more: float | str) -> None:
    """Print a line of the table and keep it; `more` are columns that only this line has."""
    table = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    row = {"ours": ours, "peer": peer, "ratio": ours / peer if peer else None, "unit": unit, **more}
    table[name] = row
    RESULT.write_text(json.dumps(table, indent=1))
    beside = (
        f"   peer {peer:12,.{0 if peer >= 100 else 2}f}{unit}   ratio {ours / peer:6.{1 if ours / peer >= 10 else 3}f}"
        if peer
        else ""
    )
    told = "".join(
        f"   {key.replace('_', ' ')} {value if isinstance(value, str) else format(value, ',.6g')}"
        for key, value in more.items()
    )
    print(f"\n{name:<50}{ours:12,.{0 if ours >= 100 else 2 if ours >= 1 else 4}f}{unit}{beside}{told}")
