"""What a step's packs hold, known before anything is computed with them: padding, documents that came before, domains.

Documents are told apart by a hash of their tokens and of where they stand; only exact copies count as duplicates, and
only in other packs or beside each other, for a pack comes again with every epoch. Those of fewer than `LEAST_TOKENS`
tokens (the ends of documents that were cut) say nothing.

A pure function of the step: what the steps before held is computed again after a resume.
"""

from __future__ import annotations

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


class Contents:
    """Looks into the steps of a training, one after the other."""

    def __init__(self, loader: Loader, domains: Domains | None) -> None:
        self._loader, self._domains = loader, domains
        self._next = 0
        self._seen: dict[int, tuple[int, int]] = {}  # of a hash: its pack and step, oldest first
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
                self._count(before, self._loader.packs_of(before))
        documents, duplicates = self._count(number, step.packs)
        self._next = number + 1
        found: dict[str, Any] = {
            "documents": documents,
            "padding": 1 - step.tokens / (len(step.packs) * self._loader.length),
            "duplicates": duplicates / documents if documents else 0.0,
        }
        if self._domains:
            found["domains"] = self._shares(self._domains, step.packs)
        return found

    def _count(self, number: int, packs: NDArray[np.int64]) -> tuple[int, int]:
        """Documents of the packs, and how many of them came before; they are known from here on."""
        packs = np.unique(packs)  # at the border of two epochs one may be there twice
        split = self._loader.split
        hashes, rows, sizes = hashed(split.tokens[packs], split.segments[packs])
        long = sizes >= LEAST_TOKENS
        again, known = 0, set()
        for key, pack in zip(hashes[long].tolist(), packs[rows[long]].tolist(), strict=True):
            before = self._seen.pop(key, None)
            again += key in known or (before is not None and before[0] != pack)
            known.add(key)
            self._seen[key] = pack, number
        while self._seen and next(iter(self._seen.values()))[1] <= number - RECENT_STEPS:
            del self._seen[next(iter(self._seen))]
        return len(hashes), again

    def _shares(self, domains: Domains, packs: NDArray[np.int64]) -> dict[str, float]:
        of = domains.of(packs, self._loader.split.segments[packs])
        counts = np.bincount(of[of >= 0], minlength=len(domains.names))
        whole = max(1, int(counts.sum()))
        shares = {domains.names[place]: int(counts[place]) / whole for place in self._named}
        if len(domains.names) > NAMED_DOMAINS:
            shares[OTHERS] = 1 - sum(shares.values())
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
