"""Documents of a pack, kept from each other in models that would not do so themselves.

Most decoders of transformers see from the positions, which start at 0 in each document, where a document begins, and
mask what lies before. Some do not: they take no positions, build their mask otherwise, or carry a state along the pack
(Falcon, OPT, Bloom, MPT, gpt-oss; Mamba, RWKV, Jamba, LFM2, Qwen3-Next). They answer without complaint, having read
documents that are none of their business. So each model is asked once, by two documents in one pack and apart; one that
answers differently is given a document a row, which no model can confuse.

What it does not do: fill rows as well as packs are filled. Padding is computed too, at most about as much again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainer.batches import Batch

LENGTHS = (3, 4)
"""Tokens of the two documents that a model is asked about."""

TOLERANCE = {False: 1e-3, True: 5e-2}
"""How far the answers may lie apart, root mean square over their standard deviation, in float32 and in bfloat16: what
rounds otherwise in another shape. A document that was read too moves them by tenths."""

Ask = Callable[[Tensor, Tensor], Tensor]
"""Logits, shape (rows, length, vocabulary), of tokens and positions, shape (rows, length)."""


@torch.no_grad()
def sees_apart(ask: Ask, vocabulary: int, device: torch.device, *, coarse: bool) -> bool:
    """Whether a model answers documents in a pack as it answers them alone."""
    positions = [torch.arange(length, device=device) for length in LENGTHS]
    tokens = [(1 + position + 7 * at) % vocabulary for at, position in enumerate(positions)]
    packed = ask(torch.cat(tokens)[None], torch.cat(positions)[None])[0, LENGTHS[0] :].float()
    alone = ask(tokens[1][None], positions[1][None])[0].float()
    difference = (packed - alone).pow(2).mean().sqrt() / alone.std()
    # What is not finite here cannot be told apart; training finds that out by itself.
    return not bool(difference > TOLERANCE[coarse])


def rows(batch: Batch, places: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, positions and selected places of a batch's documents, a document a row, padded on the right.

    The documents come in the batch's order, so their targets do; those without a target are left out. With `places`
    they come in runs of at most so many places (or one document), without it in one.
    """
    flat, select = batch.tokens.reshape(-1), batch.select.reshape(-1)
    starts = torch.nonzero(batch.positions.reshape(-1) == 0)[:, 0]
    sizes = torch.diff(starts, append=starts.new_tensor([len(flat)]))
    learnt = torch.zeros_like(starts).index_add(0, torch.cumsum(batch.positions.reshape(-1) == 0, 0) - 1, select.long())
    starts, sizes = starts[learnt > 0], sizes[learnt > 0]
    for first, last in _runs(sizes.tolist(), places):
        size = sizes[first:last, None]
        offsets = torch.arange(int(size.max()), device=flat.device).expand(last - first, -1)
        inside = offsets < size
        where = torch.where(inside, starts[first:last, None] + offsets, 0)
        yield torch.where(inside, flat[where], 0), offsets, select[where] & inside


def _runs(sizes: list[int], places: int | None) -> Iterator[tuple[int, int]]:
    """Documents first to last (exclusive) of each run."""
    first, longest = 0, 0
    for at, size in enumerate(sizes):
        longest = max(longest, size)
        if places is not None and at > first and longest * (at + 1 - first) > places:
            yield first, at
            first, longest = at, size
    if first < len(sizes):
        yield first, len(sizes)
