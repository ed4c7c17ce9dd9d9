"""Phase 8, mix: how often training sees each record, so that the sources have the shares their weights ask for.

An epoch has as many records as there are to train on. A source that has too few is seen again, whole rounds first and
a seeded choice for the rest; one that has too many gives a seeded choice. Validation and held-out records are as they
come: they are measured on, not mixed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from corpus import record, rows
from corpus.rows import ROWS, SIDES
from corpus.settings import MixSettings
from corpus.task import Facts, Task
from refit.errors import BadRecords

TIMES = "times"


def run(task: Task) -> Facts:
    """Write the training records with `times`, how often an epoch sees each, and the other sides as they are."""
    settings: MixSettings = task.settings
    table = rows.read(task.inputs["rows"] / ROWS)
    sides = {name: table.filter(pc.field("split") == name).combine_chunks() for name in SIDES}
    train = sides["train"]
    sources = _names(train, "source")
    counts = {name: int((sources == name).sum()) for name in settings.weights}
    goals = shares(counts, tempered(settings.weights, counts, settings.temperature))
    if not goals:
        raise BadRecords(
            "no record is left to train on: every source with a weight is empty after cleaning, dedup and split. "
            "Deliver more, or give other sources a weight."
        )
    times = np.zeros(train.num_rows, np.int32)
    for name, goal in goals.items():
        own = np.flatnonzero(sources == name)
        times[own] = rounds(len(own), goal, _generator(settings.seed, "mix", name))
    if settings.drill == "shuffle_labels":
        train = shuffle_answers(train, _generator(settings.seed, "drill", ""), spare=settings.rehearsal)
    seen = np.flatnonzero(times)
    sides["train"] = train.append_column(TIMES, pa.array(times)).take(pa.array(seen))
    for name, side in sides.items():
        record.write(task.folder / f"{name}.parquet", side)
    total = int(times.sum())
    return {
        "records_in": table.num_rows,
        "records_out": sum(side.num_rows for side in sides.values()),
        "quarantined": 0,
        "drill": settings.drill,
        "seed": settings.seed,
        "epoch": total,
        "shares": {
            name: {
                "weight": settings.weights[name],
                "records": counts[name],
                "seen": int(times[sources == name].sum()),
                "share": int(times[sources == name].sum()) / total,
            }
            for name in settings.weights
        },
    }


def tempered(weights: dict[str, float], counts: dict[str, int], temperature: float | None) -> dict[str, float]:
    """Weights that let sizes count, by weight x records^(1/temperature); as they are without a temperature.

    Source: Conneau et al. 2019, Unsupervised Cross-lingual Representation Learning at Scale, section 3 (alpha there).
    """
    if temperature is None:
        return weights
    return {name: weight * counts[name] ** (1 / temperature) for name, weight in weights.items()}


def shares(counts: dict[str, int], weights: dict[str, float]) -> dict[str, int]:
    """How many records of an epoch each source gives; they sum to the number of records, by largest remainder.

    A source without records cannot have its share: the others take it over. One with a weight gives at least one.
    """
    live = {name: weights[name] for name in counts if counts[name] and weights[name] > 0}
    total = sum(counts[name] for name in live)
    exact = {name: total * weight / sum(live.values()) for name, weight in live.items()}
    goals = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(live, key=lambda name: (goals[name] - exact[name], name))
    for name in by_remainder[: total - sum(goals.values())]:
        goals[name] += 1
    return {name: max(1, goal) for name, goal in goals.items()}


def rounds(records: int, goal: int, generator: np.random.Generator) -> NDArray[np.int32]:
    """How often each of `records` is seen so that they are seen `goal` times in all; no two differ by more than one."""
    times = np.full(records, goal // records, np.int32)
    times[generator.permutation(records)[: goal % records]] += 1
    return times


def shuffle_answers(train: pa.Table, generator: np.random.Generator, *, spare: Sequence[str] = ()) -> pa.Table:
    """A drill: every training record gets another one's answer and label. What is asked stays, and so do the sources
    in `spare`. Whose answer a row gets stands in `answer_shard` and `answer_row`."""
    given = np.arange(train.num_rows)
    mixed = np.flatnonzero(~np.isin(_names(train, "source"), list(spare)))
    given[mixed] = generator.permutation(mixed)
    others = train.take(pa.array(given))
    train = train.set_column(train.schema.get_field_index("label"), "label", others.column("label"))
    for name in ("shard", "row"):
        train = train.append_column(f"answer_{name}", others.column(name))
    return train


def _names(table: pa.Table, column: str) -> NDArray[np.object_]:
    names: NDArray[np.object_] = table.column(column).to_numpy(zero_copy_only=False)
    return names


def _generator(seed: int, purpose: str, name: str) -> np.random.Generator:
    """A stream of its own for every use: a further source moves no other one's choice."""
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{name}".encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))
