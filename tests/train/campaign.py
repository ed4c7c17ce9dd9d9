"""A campaign: numbered cases of a seed, any of which can be made again; what has passed is kept, and not done again.

`make soak SEED=1 COUNT=200` runs all of them at full size, `make test` a few of each. Case n of a seed is the same
on any machine but for the machine's speed. A case that fails ends nothing: the others are run, and it is named at the
end; called again only it, and what was not reached, is done.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refit import files
from refit.progress import duration

SEED = int(os.environ.get("REFIT_SOAK_SEED", "1"))
KEPT = os.environ.get("REFIT_SOAK_FOLDER")
COUNT = int(os.environ.get("REFIT_SOAK_COUNT", "200")) if KEPT else None
"""None in `make test`."""

FULL = 200
TELL_SECONDS = 10.0
Facts = dict[str, Any]
Case = Callable[[int, random.Random], Facts]


def size(full: int, sample: int) -> int:
    """How many cases: `full` of them at COUNT=200 and in proportion at others; `sample` in `make test`."""
    return sample if COUNT is None else max(1, full * COUNT // FULL)


def run(name: str, count: int, case: Case) -> list[Facts]:
    """Run the cases that have not passed yet; returns what each of all told.

    Raises:
        AssertionError: some failed; each by its number and what it said.
    """
    record = Path(KEPT) / f"soak-{name}-{SEED}.jsonl" if KEPT else None
    told = _passed(record)
    failed: list[str] = []
    began, shown = time.monotonic(), time.monotonic()
    left = [number for number in range(count) if number not in told]
    for done, number in enumerate(left, start=1):
        try:
            told[number] = case(number, random.Random(f"{SEED}-{name}-{number}"))
        except Exception as error:  # noqa: BLE001 (a campaign goes on; what failed is told at its end)
            failed.append(f"case {number}: {type(error).__name__}: {error}")
        else:
            if record:
                files.append(record, json.dumps({"case": number, **told[number]}).encode())
        if time.monotonic() - shown > TELL_SECONDS or done == len(left):
            shown = time.monotonic()
            ahead = (shown - began) / done * (len(left) - done)
            say(f"{name}: {done} of {len(left)}, {len(failed)} failed, {duration(ahead)} left")
    passed = [told[number] for number in range(count) if number in told]
    say(f"{name}, seed {SEED}: {len(passed)} of {count} passed{_summary(passed)}")
    assert not failed, f"{name}, seed {SEED}: {len(failed)} of {count} failed\n" + "\n".join(failed)
    return passed


def say(line: str) -> None:
    """Progress, for a person who looks on (`make soak` shows it)."""
    print(line, file=sys.stderr, flush=True)


def _passed(record: Path | None) -> dict[int, Facts]:
    lines = record.read_text(encoding="utf-8").splitlines() if record and record.is_file() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {int(facts.pop("case")): facts for facts in found}


def _summary(passed: list[Facts]) -> str:
    """Of each fact the range of its numbers, or how often it was what."""
    parts = []
    for key in sorted({key for facts in passed for key in facts}):
        values = [facts[key] for facts in passed if key in facts]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            parts.append(f"{key} {min(values):.6g} to {max(values):.6g}")
        else:
            counted = Counter(map(str, values)).most_common()
            parts.append(f"{key} " + ", ".join(f"{value} {count}" for value, count in counted))
    return "".join(f"; {part}" for part in parts)
