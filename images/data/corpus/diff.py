"""How the data moved between two datasets of a line: what came and went, and which distributions changed.

Measures, each between 0 (the same) and 1 (nothing in common) but for the first:

- `psi`, the population stability index of a length, over the old dataset's deciles; above 0.2 counts as moved;
- `distance`, total variation between two shares (domains, sources, labels, scripts); above 0.1 counts as moved;
- `divergence`, Jensen-Shannon between word frequencies (base 2; Lin 1991); above 0.1 counts as moved.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from corpus import record, rows
from corpus.rows import SIDES
from corpus.task import SHARDS
from refit.errors import BadInput
from refit.manifest import MANIFEST, Manifest
from refit.store import join, store_for

PSI, DISTANCE = 0.2, 0.1
SHARES = ("domain", "source", "label", "script")
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
_SCRIPTS = {
    "han": re.compile(r"[\u3400-\u9fff]"),
    "kana": re.compile(r"[\u3040-\u30ff]"),
    "hangul": re.compile(r"[\uac00-\ud7af]"),
    "cyrillic": re.compile(r"[\u0400-\u04ff]"),
    "arabic": re.compile(r"[\u0600-\u06ff]"),
    "devanagari": re.compile(r"[\u0900-\u097f]"),
    "latin": re.compile(r"[A-Za-z\u00c0-\u024f]"),
}


@dataclass(frozen=True)
class Dataset:
    """What a comparison needs of a dataset."""

    uri: str
    fingerprint: str
    ids: frozenset[str]
    sides: dict[str, int]
    lengths: dict[str, list[int]]
    shares: dict[str, Counter[str]]
    words: Counter[str]
    removed: dict[str, int]

    @property
    def records(self) -> int:
        """How many records it has, on all sides."""
        return sum(self.sides.values())


def diff(old: str, new: str) -> dict[str, Any]:
    """Compare two datasets, by the addresses of their folders or manifests.

    Raises:
        BadInput: one is no prepared dataset, or its records are no longer in the store.
    """
    before, after = load(old), load(new)
    lengths = {name: _length(before.lengths[name], after.lengths[name]) for name in before.lengths}
    shares = {name: _shares(before.shares[name], after.shares[name]) for name in SHARES}
    vocabulary = _vocabulary(before.words, after.words)
    moved = [name for name, found in lengths.items() if found["psi"] > PSI]
    moved += [name for name, found in shares.items() if found["distance"] > DISTANCE]
    moved += ["vocabulary"] * (vocabulary["divergence"] > DISTANCE)
    return {
        "old": {"uri": before.uri, "fingerprint": before.fingerprint, "records": before.records, "sides": before.sides},
        "new": {"uri": after.uri, "fingerprint": after.fingerprint, "records": after.records, "sides": after.sides},
        "records": {
            "added": len(after.ids - before.ids),
            "removed": len(before.ids - after.ids),
            "kept": len(before.ids & after.ids),
        },
        "lengths": lengths,
        "shares": shares,
        "vocabulary": vocabulary,
        "duplicates": {"old": before.removed, "new": after.removed},
        "moved": moved,
    }


def load(uri: str) -> Dataset:
    """A dataset's records as they were split: all there are, before weights chose among them and they became tokens.

    Raises:
        BadInput: it is no prepared dataset, or its records are no longer in the store.
    """
    place = uri.removesuffix(f"/{MANIFEST}")
    store = store_for(place)
    manifest = store.require(place, "dataset")
    phases = {phase["name"]: phase for phase in manifest.facts["before"]}
    root = place.rsplit("/", 2)[0]
    split, clean = (join(root, name, phases[name]["fingerprint"]) for name in ("split", "clean"))
    try:
        made = json.loads(store.read(join(clean, SHARDS)))
        shards = [join(root, "shards", "clean", one["name"]) for one in made]
        gone = next((uri for uri in (split, *shards) if store.manifest(uri) is None), None)
    except FileNotFoundError:
        gone = clean
    if gone:
        raise BadInput(f"{place}: its records are not in the store any more ({gone}). Run `corpus prepare` again.")
    table = rows.read(store.local(split) / rows.ROWS)
    sides = Counter(table.column("split").to_pylist())
    words: Counter[str] = Counter()
    scripts: Counter[str] = Counter()
    for _, messages in rows.conversations(table, [store.local(uri) for uri in shards]):
        asked = record.prompt(messages)
        scripts[script(asked)] += 1
        words.update(_WORD.findall(asked.lower()))
    return Dataset(
        uri=place, fingerprint=manifest.fingerprint,
        ids=frozenset(table.column("id").to_pylist()),
        sides={side: sides[side] for side in SIDES},
        lengths={name: table.column(f"{name}_chars").to_pylist() for name in ("prompt", "answer")},
        shares={
            **{name: _counted(table.column(name).to_pylist()) for name in SHARES if name != "script"},
            "script": scripts,
        },
        words=words,
        removed=_removed(manifest, phases),
    )  # fmt: skip


def script(text: str) -> str:
    """The script that most letters of a text are of; Japanese has kana between its Han."""
    counts = {name: len(pattern.findall(text)) for name, pattern in _SCRIPTS.items()}
    if counts["kana"] and counts["han"]:
        return "kana"
    most = max(counts, key=lambda name: counts[name])
    return most if counts[most] else "none"


def _counted(values: Iterable[str | None]) -> Counter[str]:
    return Counter("none" if value is None else str(value) for value in values)


def _removed(manifest: Manifest, phases: Mapping[str, Any]) -> dict[str, int]:
    found = {"quarantined": int(manifest.facts["quarantined"])}
    for phase in ("dedup", "split"):
        for how, count in phases[phase]["removed"].items():
            found[f"{phase} {how}"] = int(count)
    return found


def _length(old: Sequence[int], new: Sequence[int]) -> dict[str, Any]:
    edges = np.unique(np.quantile(old, np.linspace(0, 1, 11))) if old else np.array([0.0])
    inner = edges[1:-1] if len(edges) > 2 else edges[:1]
    counts = [np.bincount(np.searchsorted(inner, side, side="right"), minlength=len(inner) + 1) for side in (old, new)]
    return {
        "old": _quantiles(old),
        "new": _quantiles(new),
        "psi": psi(counts[0].tolist(), counts[1].tolist()),
        "buckets": {"edges": inner.tolist(), "old": counts[0].tolist(), "new": counts[1].tolist()},
    }


def psi(old: Sequence[int], new: Sequence[int]) -> float:
    """The population stability index of two histograms; an empty bucket counts as half a record."""
    shares = [np.maximum(np.array(side, float), 0.5) / max(1, sum(side)) for side in (old, new)]
    return float(np.sum((shares[1] - shares[0]) * np.log(shares[1] / shares[0])))


def _quantiles(lengths: Sequence[int]) -> dict[str, float]:
    found = np.quantile(lengths, (0.05, 0.5, 0.95)) if lengths else np.full(3, math.nan)
    return {"p5": float(found[0]), "median": float(found[1]), "p95": float(found[2])}


def _shares(old: Counter[str], new: Counter[str]) -> dict[str, Any]:
    names = sorted(old.keys() | new.keys(), key=lambda name: (-(old[name] + new[name]), name))
    sums = max(1, old.total()), max(1, new.total())
    shares = {name: [old[name] / sums[0], new[name] / sums[1]] for name in names}
    return {"distance": sum(abs(a - b) for a, b in shares.values()) / 2, "shares": shares}


def _vocabulary(old: Counter[str], new: Counter[str]) -> dict[str, Any]:
    unseen = {word: count for word, count in new.items() if word not in old}
    return {
        "words": [len(old), len(new)],
        "divergence": jensen_shannon(old, new),
        "unseen_share": sum(unseen.values()) / max(1, new.total()),
        "unseen": [word for word, _ in Counter(unseen).most_common(20)],
        "gone": [word for word, _ in Counter({w: n for w, n in old.items() if w not in new}).most_common(20)],
    }


def jensen_shannon(old: Counter[str], new: Counter[str]) -> float:
    """The Jensen-Shannon divergence of two word frequencies, in bits: 0 the same, 1 nothing in common."""
    if not old or not new:
        return 0.0 if not old and not new else 1.0
    words = list(old.keys() | new.keys())
    p, q = (np.array([side[word] for word in words], float) / side.total() for side in (old, new))
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [np.where(side > 0, side * np.log2(side / middle), 0.0).sum() for side in (p, q)]
    return float(min(1.0, max(0.0, sum(parts) / 2)))
