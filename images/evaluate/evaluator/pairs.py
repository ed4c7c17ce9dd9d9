"""Candidate and champion side by side, item by item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evaluator.answers import Answers
from refit.statistics import Interval, mcnemar, paired_difference

Row = Mapping[str, Any]
SAMPLE = 3


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Both sides of the same items: shares right, the difference, and what changed between them."""

    items: int
    candidate: Interval
    champion: Interval
    difference: Interval
    gained: int
    lost: int

    @property
    def p(self) -> float:
        """Exact p that gains and losses are equally likely."""
        return mcnemar(self.gained, self.lost)

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "items": self.items, "candidate": self.candidate.facts(), "champion": self.champion.facts(),
            "difference": self.difference.facts(), "gained": self.gained, "lost": self.lost, "p": self.p,
        }  # fmt: skip


@dataclass(frozen=True)
class Matched:
    """The items that both answered, in the champion's order, and in words what keeps the two from being comparable."""

    candidate: Answers
    champion: Answers
    faults: tuple[str, ...]

    def pair(self, metric: str, confidence: float) -> Pair:
        """One metric on both sides."""
        new, old = self.candidate.scores(metric), self.champion.scores(metric)
        return Pair(
            items=new.size,
            candidate=self.candidate.share(metric, confidence),
            champion=self.champion.share(metric, confidence),
            difference=paired_difference(new, old, confidence),
            gained=int((new > old).sum()),
            lost=int((new < old).sum()),
        )

    def by_domain(self, metric: str, confidence: float) -> dict[str, Pair]:
        """One metric in each domain."""
        both = list(zip(self.candidate.rows, self.champion.rows, strict=True))
        parts = {}
        for name in sorted({old["domain"] for _, old in both}):
            rows = [(new, old) for new, old in both if old["domain"] == name]
            part = Matched(Answers([new for new, _ in rows]), Answers([old for _, old in rows]), ())
            parts[name] = part.pair(metric, confidence)
        return parts

    def changed(self, metric: str, *, better: bool) -> list[tuple[Row, Row]]:
        """(candidate, champion) rows of the items that one got right and the other did not."""
        both = zip(self.candidate.rows, self.champion.rows, strict=True)
        return [pair for pair in both if [bool(row.get(metric)) for row in pair] == [better, not better]]


def match(candidate: Answers, champion: Answers, name: str) -> Matched:
    """Pair two sides' answers to one set by item; whatever is not on both sides, or not the same, is a fault."""
    new = {row["id"]: row for row in candidate.of_set(name).rows}
    old = {row["id"]: row for row in champion.of_set(name).rows}
    shared = [item for item in old if item in new and new[item]["digest"] == old[item]["digest"]]
    differing = [item for item in old if item in new and new[item]["digest"] != old[item]["digest"]]
    faults = []
    if not new or not old:
        lacking = " and ".join(side for side, rows in (("candidate", new), ("champion", old)) if not rows)
        faults.append(f"there are no answers of the {lacking} to the {name} set")
    else:
        for side, missing in (("candidate", old.keys() - new.keys()), ("champion", new.keys() - old.keys())):
            if missing:
                faults.append(f"the {side} did not answer {len(missing)} {name} items ({_some(missing)})")
        if differing:
            faults.append(
                f"{len(differing)} {name} items were not the same question on both sides ({_some(differing)})"
            )
    return Matched(Answers([new[item] for item in shared]), Answers([old[item] for item in shared]), tuple(faults))


def _some(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:SAMPLE]) + (", …" if len(names) > SAMPLE else "")
