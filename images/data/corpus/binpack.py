"""Best-fit decreasing: documents into packs, longest first, each where the least room is left over.

Source: Johnson 1974; never more than 11/9 of the fewest packs possible (plus a constant), and with many short
documents next to none of the room is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus.jit import kernel

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Where each document lies: the number of its pack, and its first token's place in it."""

    pack: Index
    place: Index
    packs: int


def best_fit_decreasing(lengths: Index, capacity: int) -> Packing:
    """Pack documents of 1 to `capacity` tokens; equal lengths keep their order, so the result is always the same."""
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()}, a pack holds 1 to {capacity}")
    order = np.argsort(-lengths, kind="stable")
    pack = np.empty(len(lengths), np.int64)
    place = np.empty(len(lengths), np.int64)
    packs = _fit(lengths.astype(np.int64), order, capacity, pack, place)
    return Packing(pack, place, packs)


@kernel
def _fit(lengths: Index, order: Index, capacity: int, pack: Index, place: Index) -> int:
    # Open packs hang in a list for each amount of room; a tree over the amounts finds the least one that is enough.
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    some = np.zeros(2 * leaves, np.bool_)
    head = np.full(capacity + 1, -1, np.int64)
    behind = np.full(len(lengths), -1, np.int64)
    packs = 0
    for document in order:
        need = lengths[document]
        room = _least(some, leaves, need)
        if room < 0:
            room = capacity
            into = packs
            packs += 1
        else:
            into = head[room]
            head[room] = behind[into]
            if head[room] < 0:
                _mark(some, leaves, room, False)
        pack[document] = into
        place[document] = capacity - room
        left = room - need
        if left > 0:
            behind[into] = head[left]
            if head[left] < 0:
                _mark(some, leaves, left, True)
            head[left] = into
    return packs


@kernel
def _mark(some: NDArray[np.bool_], leaves: int, amount: int, value: bool) -> None:
    node = leaves + amount
    some[node] = value
    node //= 2
    while node >= 1:
        some[node] = some[2 * node] or some[2 * node + 1]
        node //= 2


@kernel
def _least(some: NDArray[np.bool_], leaves: int, amount: int) -> int:
    """The smallest amount ≥ `amount` with an open pack, -1 where there is none."""
    node = leaves + amount
    if some[node]:
        return amount
    while node > 1:
        if node % 2 == 0 and some[node + 1]:
            node += 1
            while node < leaves:
                node = 2 * node if some[2 * node] else 2 * node + 1
            return node - leaves
        node //= 2
    return -1
