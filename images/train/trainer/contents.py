"""What a step's packs hold, known before anything is computed with them: padding, documents that came before, domains.

Documents are told apart by a hash of their tokens and of where they stand; only exact copies count as duplicates, and
only in other packs or beside each other, for a pack comes again with every epoch. Those of fewer than `LEAST_TOKENS`
tokens (the ends of documents that were cut) say nothing.

A pure function of the step: what the steps before held is computed again after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refit.domains import Domains
from refit.packed import position_ids
from trainer.batches import Loader, Step

RECENT_STEPS = 32
"""A document is a duplicate of one in so many steps before it."""

LEAST_TOKENS = 8

NAMED_DOMAINS = 30
"""So many domains, the largest, are told by name; the others together as OTHERS."""
OTHERS = "(others)"

_MIX_1, _MIX_2, _MIX_3 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class _Held:
    """What a step holds, seen for itself: its documents, those of them that are long as (hash, pack), its domains."""

    documents: int
    long: list[tuple[int, int]]
    domains: dict[str, float]


class Contents:
    """Looks into the steps of a training, one after the other."""

    def __init__(self, loader: Loader, domains: Domains | None) -> None:
        self._loader, self._domains = loader, domains
        self._next = 0
        self._seen: dict[int, tuple[int, int]] = {}  # of a hash: its pack and step, oldest first
        self._ahead: dict[int, _Held] = {}
        if domains:
            counts = np.bincount(domains.own, minlength=len(domains.names))
            self._named = np.argsort(-counts, kind="stable")[:NAMED_DOMAINS]

    def of(self, number: int, step: Step) -> dict[str, Any]:
        """What step `number` (from 0) holds.

        `documents` there are, `padding` is the share of its places that are empty, `duplicates` that of its documents
        which came before, `domains` that of its tokens by domain, where the dataset knows them.
        """
        if number != self._next:
            self._seen.clear()
            for before in range(max(0, number - RECENT_STEPS), number):
                self._count(before, self._held(before))
        held = self._held(number)
        duplicates = self._count(number, held)
        self._next = number + 1
        return {
            "documents": held.documents,
            "padding": 1 - step.tokens / (len(step.packs) * self._loader.length),
            "duplicates": duplicates / held.documents if held.documents else 0.0,
            **({"domains": held.domains} if self._domains else {}),
        }

    def _count(self, number: int, held: _Held) -> int:
        """How many documents of a step came before; they are known from here on."""
        again, known = 0, set()
        for key, pack in held.long:
            before = self._seen.pop(key, None)
            again += key in known or (before is not None and before[0] != pack)
            known.add(key)
            self._seen[key] = pack, number
        while self._seen and next(iter(self._seen.values()))[1] <= number - RECENT_STEPS:
            del self._seen[next(iter(self._seen))]
        return again

    def _held(self, number: int) -> _Held:
        if number not in self._ahead:
            order = self._loader.packs_of(number, self._loader.ahead)
            self._ahead = dict(enumerate(self._look_ahead(order), start=number))
        return self._ahead.pop(number)

    def _look_ahead(self, order: NDArray[np.int64]) -> list[_Held]:
        """What some steps hold, whose packs have shape (steps, packs)."""
        split, steps = self._loader.split, len(order)
        # At the border of two epochs a step may have a pack twice; it is looked at once.
        step, packs = np.divmod(np.unique(np.arange(steps)[:, None] * self._loader.packs + order), self._loader.packs)
        segments = split.segments[packs]
        hashes, rows, sizes = hashed(split.tokens[packs], segments)
        documents = np.bincount(step[rows], minlength=steps).tolist()
        long = sizes >= LEAST_TOKENS
        ends = np.cumsum(np.bincount(step[rows[long]], minlength=steps)).tolist()
        pairs = list(zip(hashes[long].tolist(), packs[rows[long]].tolist(), strict=True))
        shares = self._shares(order) if self._domains else [{}] * steps
        of_each = [pairs[begin:end] for begin, end in pairwise([0, *ends])]
        return [_Held(*held) for held in zip(documents, of_each, shares, strict=True)]

    def _shares(self, order: NDArray[np.int64]) -> list[dict[str, float]]:
        """The shares of domains in the tokens of some steps, whose packs have shape (steps, packs)."""
        assert self._domains is not None
        names, packs = self._domains.names, order.ravel()
        of = self._domains.of(packs, self._loader.split.segments[packs]).reshape(len(order), -1)
        places = (np.arange(len(order))[:, None] * len(names) + of)[of >= 0]
        counts = np.bincount(places, minlength=len(order) * len(names)).reshape(len(order), -1)
        whole = np.maximum(1, counts.sum(axis=1, keepdims=True))
        told = [names[place] for place in self._named]
        shares = [dict(zip(told, row, strict=True)) for row in (counts[:, self._named] / whole).tolist()]
        if len(names) > NAMED_DOMAINS:
            shares = [{**one, OTHERS: 1 - sum(one.values())} for one in shares]
        return shares


def hashed(
    tokens: NDArray[np.integer], segments: NDArray[np.integer]
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """A hash of each document of some packs, the row of its pack and its length; arrays of shape (packs, length).

    The sum, modulo 2^64, of splitmix64 of every token with its position (Steele et al. 2014).
    """
    starts = np.ones(segments.shape, dtype=bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    places = np.flatnonzero(starts)
    word = (position_ids(segments).astype(np.uint64) << np.uint64(32)) + tokens.astype(np.uint64)
    word = (word + np.uint64(1)) * _MIX_1
    word = (word ^ (word >> np.uint64(30))) * _MIX_2
    word = (word ^ (word >> np.uint64(27))) * _MIX_3
    word ^= word >> np.uint64(31)
    sums = np.add.reduceat(word.ravel(), places)
    sizes = np.diff(places, append=segments.size)
    full = segments.ravel()[places] > 0
    return sums[full], places[full] // segments.shape[1], sizes[full]
