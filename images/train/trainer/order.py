"""Which pack comes when: a pure function of (seed, epoch, position), so that a resume has nothing to fast-forward.

A permutation that is computed where it is needed: a Feistel network over the next power of four, walked until it lands
inside (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"). Finding the millionth sample costs what the
first one does, and no list of samples is ever made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
_BITS = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def packs_of_step(step: int, *, per_step: int, packs: int, seed: int) -> NDArray[np.int64]:
    """The packs that optimizer step `step` (from 0) learns from, in order; shape (per_step,).

    Epochs follow each other without a gap: a step may see the end of one and the beginning of the next.
    """
    return packs_at(np.arange(step * per_step, (step + 1) * per_step, dtype=np.int64), packs=packs, seed=seed)


def packs_at(places: NDArray[np.int64], *, packs: int, seed: int) -> NDArray[np.int64]:
    """The packs at absolute places in the endless sequence of shuffled epochs."""
    if packs < 1:
        raise ValueError("there is nothing to put in an order")
    epochs, positions = np.divmod(places, packs)
    return _permute(positions, packs, _mix(epochs.astype(np.uint64), np.uint64(seed & _BITS)))


def _permute(positions: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where each position goes in the permutation of so many that its key stands for."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    values = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half, keys[outside])
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_mix(right, keys + np.uint64(number * _GOLDEN & _BITS)) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64], key: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit of the result depends on every bit of value and key."""
    with np.errstate(over="ignore"):  # numpy warns of it where the key is one number
        x: NDArray[np.uint64] = (values + np.uint64(_GOLDEN)) ^ (key * np.uint64(_MIX_1))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))
