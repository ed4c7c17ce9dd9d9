"""Flat documents into packs: cut where they may be, set aside where not, and written without being held in memory.

Lengths alone decide where everything lies; the tokens are then copied from the maps of the flat sets into the maps of
the packed split, some packs at a time. What does not fit into a pack follows a policy, apart for conversations (half
an answer teaches to stop in the middle) and for plain texts, and is counted: every token that comes in goes out or is
in a count, which is asserted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from corpus.binpack import best_fit_decreasing
from corpus.flat import CONVERSATION, PAIR, REFUSED, TEXT, Flat
from corpus.jit import kernel
from refit import packed
from refit.errors import BadInput

Index = NDArray[np.int64]

BLOCK = 1 << 24  # tokens that are copied before going on to the next packs
MOST = (1 << 16) - 1  # documents that the segments of a pack can number


@dataclass(frozen=True)
class Overflow:
    """What becomes of a document that is longer than a pack.

    A conversation is refused, or loses its tail where an answer's token is left in its head. A plain text is split
    into as few even pieces as fit, or dropped. A pair is refused always: its sides must be compared as they are.
    """

    conversation: Literal["refuse", "truncate"] = "refuse"
    text: Literal["split", "drop"] = "split"


@dataclass(frozen=True)
class Lost:
    """Documents that a policy touched, and the tokens it took: a document that is seen n times counts n times."""

    documents: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What came in and what became of it. `documents` are those packed, each as often as it is seen."""

    tokens_in: int
    documents: int
    pieces: int
    packs: int
    tokens: int
    targets: int
    waste: float
    split: int
    refused: Lost
    truncated: Lost
    dropped: Lost

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Result:
    """The split that was written. `refused` and `dropped` are indices into `chosen`, rising.

    `pieces` has one of each piece, pack by pack as they lie there, and `packs` the pack of each; of pairs each side
    is a piece.
    """

    header: packed.Header
    counts: Counts
    refused: Index
    dropped: Index
    pieces: Index
    packs: Index


@dataclass(frozen=True)
class _Spans:
    """Stretches of tokens: in which set, where, and how long. Arrays of one shape."""

    sets: Index
    starts: Index
    lengths: Index


@dataclass(frozen=True)
class _Layout:
    """Pieces by pack and place: where each comes from, its pack, its first token's place in the split, its number.

    Documents of a pack are numbered from 1. `order` has for each the place that it had among the pieces before.
    """

    packs: int
    order: Index
    sources: _Spans
    packs_of: Index
    targets: Index
    numbers: Index


def pack_documents(
    sets: Sequence[Flat], chosen: Index, times: Index, *, length: int, pad: int, seed: int, folder: Path, split: str,
    vocabulary: str, vocabulary_size: int, overflow: Overflow = Overflow(),
) -> Result:  # fmt: skip
    """Pack documents of flat sets into a split of `folder`.

    Args:
        sets: all of one vocabulary, and all of pairs or none.
        chosen: of shape (n, 2): number of the set, number of the document in it; none that its set refused.
        times: of shape (n,): how often an epoch sees each, 0 or more.
        length: tokens of a pack.
        pad: the token that fills a pack up.
        seed: of the order of the packs. Best-fit puts long documents into the first; training would see them first.
        folder, split: where the packed format goes.
        vocabulary, vocabulary_size: sha256 of the tokenizer.json, and how many ids it has.
        overflow: what becomes of documents longer than a pack.

    Raises:
        BadInput: a set is of another vocabulary, or a pack would hold more documents than can be numbered.
        ValueError: `chosen` names a document that is not there or was refused; `times` is of another shape or negative.
    """
    documents, kinds = _chosen(sets, chosen, times, vocabulary, vocabulary_size)
    kept = _kept(sets, documents, kinds, length, overflow)
    pieces, of = _pieces(_Spans(documents.sets, documents.starts, kept), times, length)
    layout = _lay_out(pieces, length, seed)
    halves = _halves(sets, chosen)
    if halves is not None:
        layout = _halved(layout, halves[of[layout.order]])
    _require_numbers(layout, length)
    draft = packed.create(
        folder, split, layout.packs, length, vocabulary=vocabulary, vocabulary_size=vocabulary_size,
        pairs=halves is not None,
    )  # fmt: skip
    _fill(draft, sets, layout, pad)
    header = draft.finish(len(layout.numbers))
    is_talk = kinds != TEXT
    counts = Counts(
        tokens_in=int(documents.lengths @ times), documents=int(times[kept > 0].sum()), pieces=header.samples,
        packs=header.packs, tokens=header.tokens, targets=header.targets,
        waste=1 - header.tokens / (header.packs * length) if header.packs else 0.0,
        split=int(times[kept > length].sum()), refused=_lost(documents.lengths - kept, times, is_talk & (kept == 0)),
        truncated=_lost(documents.lengths - kept, times, is_talk & (kept > 0) & (kept < documents.lengths)),
        dropped=_lost(documents.lengths - kept, times, ~is_talk & (kept == 0)),
    )  # fmt: skip
    lost = counts.refused.tokens + counts.truncated.tokens + counts.dropped.tokens
    if counts.tokens_in != counts.tokens + lost:
        raise AssertionError(f"packing lost or doubled tokens: {counts}")
    if header.pairs is not None and header.pairs != counts.documents:
        raise AssertionError(f"packing lost or doubled a pair: {header.pairs} for {counts.documents}")
    return Result(
        header, counts, np.flatnonzero(is_talk & (kept == 0)), np.flatnonzero(~is_talk & (kept == 0)), of[layout.order],
        layout.packs_of,
    )  # fmt: skip


def _lost(tokens: Index, times: Index, which: NDArray[np.bool_]) -> Lost:
    return Lost(int(times[which].sum()), int(tokens[which] @ times[which]))


def _chosen(
    sets: Sequence[Flat], chosen: Index, times: Index, vocabulary: str, vocabulary_size: int
) -> tuple[_Spans, NDArray[np.uint8]]:
    """Where each chosen document lies, and its kind."""
    for number, found in enumerate(sets):
        if (found.header.vocabulary, found.header.vocabulary_size) != (vocabulary, vocabulary_size):
            raise BadInput(
                f"set {number} was written with the tokenizer {found.header.vocabulary[:12]} "
                f"({found.header.vocabulary_size} ids), packs are asked for {vocabulary[:12]} ({vocabulary_size}). "
                "Tokenize again with the one that is trained."
            )
    if times.shape != (len(chosen),) or (times < 0).any():
        raise ValueError(f"times of shape {times.shape} for {len(chosen)} documents; each is 0 or more")
    counts = np.array([len(found) for found in sets], np.int64)
    if len(chosen) and not (
        chosen.min() >= 0 and chosen[:, 0].max() < len(sets) and (chosen[:, 1] < counts[chosen[:, 0]]).all()
    ):
        raise ValueError(f"chosen names a document that none of the {len(sets)} sets has")
    spans = _Spans(chosen[:, 0].astype(np.int64), *(np.zeros(len(chosen), np.int64) for _ in range(2)))
    kinds = np.zeros(len(chosen), np.uint8)
    for number, found in enumerate(sets):
        rows = np.flatnonzero(spans.sets == number)
        documents = chosen[rows, 1].astype(np.int64)
        spans.starts[rows] = found.offsets[documents]
        spans.lengths[rows] = found.offsets[documents + 1].astype(np.int64) - spans.starts[rows]
        kinds[rows] = found.kinds[documents]
    if (kinds == REFUSED).any():
        raise ValueError(f"document {chosen[kinds == REFUSED][0].tolist()} was refused: it has nothing to pack")
    return spans, kinds


def _kept(sets: Sequence[Flat], documents: _Spans, kinds: NDArray[np.uint8], length: int, overflow: Overflow) -> Index:
    """How many tokens of each document are packed, by the policies; 0 where none."""
    kept = documents.lengths.copy()
    too_long = documents.lengths > length
    if overflow.text == "drop":
        kept[too_long & (kinds == TEXT)] = 0
    kept[too_long & (kinds == PAIR)] = 0
    for row in np.flatnonzero(too_long & (kinds == CONVERSATION)):
        start = int(documents.starts[row])
        head = sets[int(documents.sets[row])].mask[start + 1 : start + length]  # the first token is never a target
        kept[row] = length if overflow.conversation == "truncate" and head.any() else 0
    return kept


def _pieces(documents: _Spans, times: Index, length: int) -> tuple[_Spans, Index]:
    """Each document as often as it is seen, in as few even pieces as fit: 8192 n + 1 tokens leave none of one token.

    Returns:
        The pieces, and of which document each is.
    """
    seen = np.repeat(np.arange(len(times)), np.where(documents.lengths > 0, times, 0))
    whole = documents.lengths[seen]
    count = -(-whole // length)
    of = np.repeat(np.arange(len(seen)), count)
    number = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    first, last = (whole[of] * edge // count[of] for edge in (number, number + 1))
    return _Spans(documents.sets[seen][of], documents.starts[seen][of] + first, last - first), seen[of]


def _lay_out(pieces: _Spans, length: int, seed: int) -> _Layout:
    """Best-fit packs in a seeded order, and the pieces in the order in which they lie in them."""
    packing = best_fit_decreasing(pieces.lengths, length)
    pack = np.random.default_rng(seed).permutation(packing.packs)[packing.pack]
    order = np.lexsort((packing.place, pack))
    pack = pack[order]
    numbers = np.arange(len(pack)) - np.searchsorted(pack, np.arange(packing.packs))[pack] + 1
    sources = _Spans(pieces.sets[order], pieces.starts[order], pieces.lengths[order])
    return _Layout(packing.packs, order, sources, pack, pack * length + packing.place[order], numbers)


def _halves(sets: Sequence[Flat], chosen: Index) -> Index | None:
    """How long the first side of each chosen pair is; None where documents are no pairs."""
    of_pairs = {found.halves is not None for found in sets}
    if of_pairs == {True, False}:
        raise ValueError("some sets are of pairs and some are not; they cannot share a pack")
    if True not in of_pairs:
        return None
    halves = np.zeros(len(chosen), np.int64)
    for number, found in enumerate(sets):
        if found.halves is not None:
            rows = np.flatnonzero(chosen[:, 0] == number)
            halves[rows] = found.halves[chosen[rows, 1]]
    return halves


def _halved(layout: _Layout, halves: Index) -> _Layout:
    """The same with both sides of each pair as pieces of their own, numbered 2 n - 1 and 2 n; none moves."""

    def sides(first: Index, second: Index) -> Index:
        return np.stack([first, second], axis=1).reshape(-1)

    spans = layout.sources
    return _Layout(
        packs=layout.packs, order=np.repeat(layout.order, 2),
        sources=_Spans(
            np.repeat(spans.sets, 2), sides(spans.starts, spans.starts + halves), sides(halves, spans.lengths - halves)
        ),
        packs_of=np.repeat(layout.packs_of, 2), targets=sides(layout.targets, layout.targets + halves),
        numbers=sides(2 * layout.numbers - 1, 2 * layout.numbers),
    )  # fmt: skip


def _require_numbers(layout: _Layout, length: int) -> None:
    most = layout.numbers.max(initial=0)
    if most > MOST:
        raise BadInput(f"a pack of {length} tokens would hold {most} documents, {MOST} at most. Shorten it.")


def _fill(draft: packed.Draft, sets: Sequence[Flat], layout: _Layout, pad: int) -> None:
    """Copy every piece to its place, number it, and pad what is left of each pack."""
    packs, length = draft.tokens.shape
    tokens, segments, mask = (np.asarray(array).reshape(-1) for array in (draft.tokens, draft.segments, draft.mask))
    sources, targets = layout.sources, layout.targets
    edges = [*np.searchsorted(layout.packs_of, np.arange(0, packs, max(1, BLOCK // length))).tolist(), len(targets)]
    for begin, end in pairwise(edges):
        by_set = begin + np.argsort(sources.sets[begin:end], kind="stable")
        here, at = np.unique(sources.sets[by_set], return_index=True)
        for number, rows in zip(here.tolist(), np.split(by_set, at[1:]), strict=True):
            span = sources.starts[rows], targets[rows], sources.lengths[rows]
            _copy(np.asarray(sets[number].tokens), tokens, *span)
            _copy(np.asarray(sets[number].mask), mask, *span)
            packed.let_go(sets[number].tokens, sets[number].mask)
        mask[targets[begin:end]] = 0  # nothing comes before the first token of a piece to predict it from
        _number(segments, targets[begin:end], sources.lengths[begin:end], layout.numbers[begin:end])
        packed.let_go(draft.tokens, draft.segments, draft.mask)
    _pad(tokens, targets + sources.lengths, layout.packs_of, length, pad)


@kernel
def _copy(source: Any, target: Any, starts: Index, places: Index, lengths: Index) -> None:
    for piece in range(len(starts)):
        for token in range(lengths[piece]):
            target[places[piece] + token] = source[starts[piece] + token]


@kernel
def _number(segments: Any, places: Index, lengths: Index, numbers: Index) -> None:
    for piece in range(len(places)):
        segments[places[piece] : places[piece] + lengths[piece]] = numbers[piece]


@kernel
def _pad(tokens: Any, ends: Index, packs: Index, length: int, pad: int) -> None:
    """Padding behind the last piece of each pack; pieces lie in order and without gaps."""
    for piece in range(len(ends)):
        if piece + 1 == len(ends) or packs[piece + 1] != packs[piece]:
            tokens[ends[piece] : (packs[piece] + 1) * length] = pad
