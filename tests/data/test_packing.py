"""Flat documents into packs: no token is lost without being counted, whatever does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from corpus import flat, packing
from corpus.binpack import best_fit_decreasing
from corpus.flat import CONVERSATION, REFUSED, TEXT, Flat
from corpus.packing import Overflow, Result, pack_documents
from corpus.tokens import Row
from refit import domains, packed
from refit.errors import BadInput

SIZE = 70000
Document = tuple[int, int]  # length, kind


def flat_set(folder: Path, documents: list[Document], name: str = "documents", first: int = 1) -> Flat:
    """Documents of rising tokens, no token twice in a set, each of another weight; only the first is no target."""
    lengths = np.array([length for length, _ in documents], np.int64)
    total = int(lengths.sum())
    mask = (np.arange(total) % 255 + 1).astype(np.uint8)
    starts = np.cumsum(lengths) - lengths
    mask[starts[lengths > 0]] = 0
    kinds = np.array([kind for _, kind in documents], np.uint8)
    with flat.Writer(folder, name, vocabulary="v", vocabulary_size=SIZE) as writer:
        writer.append(first + np.arange(total), mask, lengths, np.zeros((len(documents), 16), np.uint8), kinds)
    return flat.read(folder, name)


def packs(folder: Path, sets: list[Flat], length: int, **more: Any) -> tuple[Result, packed.Packed]:
    """Every document once that was not refused, unless said otherwise."""
    every = [(n, m) for n, one in enumerate(sets) for m in range(len(one)) if one.kinds[m] != REFUSED]
    chosen = more.pop("chosen", np.array(every, np.int64).reshape(-1, 2))
    times = more.pop("times", np.ones(len(chosen), np.int64))
    asked = {"pad": 7, "seed": 1, "vocabulary": "v", "vocabulary_size": SIZE} | more
    result = pack_documents(sets, chosen, times, length=length, folder=folder, split="train", **asked)
    return result, packed.read(folder, "train")


def found(train: packed.Packed) -> list[tuple[list[int], list[int]]]:
    """Tokens and mask of every piece, sorted."""
    return sorted(
        (train.tokens[pack][here].tolist(), train.mask[pack][here].tolist())
        for pack in range(train.header.packs)
        for number in range(1, int(train.segments[pack].max()) + 1)
        for here in [train.segments[pack] == number]
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 60), st.sampled_from([CONVERSATION, TEXT])), max_size=12), max_size=3),
    st.sampled_from(["refuse", "truncate"]), st.sampled_from(["split", "drop"]), st.data(),
)  # fmt: skip
def test_every_token_is_packed_or_counted_under_any_policy(
    given_sets: list[list[Document]], talk: Any, text: Any, data: st.DataObject
) -> None:
    places = [(n, m) for n, documents in enumerate(given_sets) for m in range(len(documents))]
    times = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(places), max_size=len(places))), np.int64)
    with TemporaryDirectory() as name:
        folder = Path(name)
        sets = [flat_set(folder, documents, f"s{n}", 1 + 1000 * n) for n, documents in enumerate(given_sets)]
        result, train = packs(folder, sets, 24, times=times, overflow=Overflow(talk, text))
    expected, came = np.zeros(4000, np.int64), 0
    refused, dropped = [], []
    for number, ((n, m), seen) in enumerate(zip(places, times.tolist(), strict=True)):
        tokens, kind = 1 + 1000 * n + np.arange(*sets[n].offsets[m : m + 2].astype(int)), sets[n].kinds[m]
        came += seen * len(tokens)
        if len(tokens) > 24 and kind == CONVERSATION and talk == "refuse":
            refused.append(number)
        elif len(tokens) > 24 and kind == TEXT and text == "drop":
            dropped.append(number)
        else:
            expected[tokens[:24] if kind == CONVERSATION else tokens] += seen
    assert (np.bincount(train.tokens[train.segments > 0], minlength=4000) == expected).all()
    assert (result.refused.tolist(), result.dropped.tolist()) == (refused, dropped)
    assert (train.tokens[train.segments == 0] == 7).all()
    weights = np.zeros(4000, np.uint8)
    for n, one in enumerate(sets):
        weights[1 + 1000 * n + np.arange(len(one.mask))] = one.mask
    heads = packed.position_ids(train.segments) == 0
    assert (train.mask == np.where(heads | (train.segments == 0), 0, weights[train.tokens])).all()
    assert train.header.targets == (train.mask > 0).sum()
    counts = result.counts
    lost = counts.refused.tokens + counts.truncated.tokens + counts.dropped.tokens
    assert counts.tokens_in == came == expected.sum() + lost


def pieces(row: Row, length: int) -> Iterator[Row]:
    """The plain twin: a document in as few even pieces as fit; the first token of a piece is no target."""
    count = -(-len(row) // length)
    edges = [len(row) * piece // count for piece in range(count + 1)]
    for first, last in pairwise(edges):
        mask = row.mask[first:last].copy()
        mask[0] = 0
        yield Row(row.ids[first:last], mask)


def into_packs(
    documents: list[Row], length: int, pad: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """The twin of `packing.pack_documents` that holds everything in memory.

    Best-fit puts long documents into the first packs; without the shuffle training would see them first.
    """
    lengths = np.array([len(document) for document in documents], np.int64)
    packing = best_fit_decreasing(lengths, length)
    shape = (packing.packs, length)
    tokens, segments, mask = np.full(shape, pad, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.uint8)
    if not documents:
        return tokens, segments, mask
    pack = np.random.default_rng(seed).permutation(packing.packs)[packing.pack]
    # Documents of a pack are numbered from 1 in the order in which they lie there.
    order = np.lexsort((packing.place, pack))
    first_of_pack = np.searchsorted(pack[order], pack[order], side="left")
    number = np.empty(len(documents), np.int64)
    number[order] = np.arange(len(documents)) - first_of_pack + 1
    starts = np.cumsum(lengths) - lengths
    target = np.repeat(pack * length + packing.place - starts, lengths) + np.arange(lengths.sum())
    tokens.reshape(-1)[target] = np.concatenate([document.ids for document in documents])
    mask.reshape(-1)[target] = np.concatenate([document.mask for document in documents])
    segments.reshape(-1)[target] = np.repeat(number, lengths)
    if int((segments > 0).sum()) != int(lengths.sum()):
        raise AssertionError("packing lost or doubled tokens")
    return tokens, segments, mask


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 70), st.booleans(), st.integers(0, 3)), max_size=30), st.integers(0, 3))
def test_the_packs_are_byte_for_byte_those_of_the_way_through_memory(
    documents: list[tuple[int, bool, int]], seed: int
) -> None:
    given = [(length, TEXT if is_text or length > 32 else CONVERSATION) for length, is_text, _ in documents]
    with TemporaryDirectory() as name:
        read = flat_set(Path(name), given)
        times = np.array([n for _, _, n in documents], np.int64)
        _, train = packs(Path(name), [read], 32, seed=seed, times=times)
        rows = [Row(*(part.astype(np.int64) for part in read.document(n))) for n in range(len(read))]
        whole = [piece for row, n in zip(rows, times, strict=True) for piece in list(pieces(row, 32)) * n]
        tokens, segments, mask = into_packs(whole, 32, 7, seed)
        assert (train.tokens == tokens).all()
        assert (train.segments == segments).all()
        assert (train.mask == mask).all()


def test_one_token_too_many_gives_even_pieces(tmp_path: Path) -> None:
    """LongContext#14: 8192 n + 1 tokens must not leave a piece of one token."""
    result, train = packs(tmp_path, [flat_set(tmp_path, [(8192 * 3 + 1, TEXT)])], 8192)
    lengths = [int((row > 0).sum()) for row in train.segments]
    assert (result.counts.pieces, result.counts.split, result.counts.documents) == (4, 1, 1)
    assert sorted(lengths) == [6144, 6144, 6144, 6145]


def test_a_document_of_exactly_a_pack_is_whole(tmp_path: Path) -> None:
    result, _ = packs(tmp_path, [flat_set(tmp_path, [(16, CONVERSATION), (16, TEXT)])], 16)
    assert (result.counts.pieces, result.counts.split, result.counts.waste) == (2, 0, 0.0)


def test_the_first_token_of_a_piece_is_never_a_target(tmp_path: Path) -> None:
    _, train = packs(tmp_path, [flat_set(tmp_path, [(50, TEXT), (9, CONVERSATION)])], 16)
    assert all(mask[0] == 0 and all(mask[1:]) for _, mask in found(train))


def test_positions_start_anew_in_each_piece(tmp_path: Path) -> None:
    _, train = packs(tmp_path, [flat_set(tmp_path, [(50, TEXT), (9, CONVERSATION), (5, TEXT)])], 16)
    positions = packed.position_ids(train.segments)
    first = np.ones(positions.shape, bool)
    first[:, 1:] = train.segments[:, 1:] != train.segments[:, :-1]
    assert ((positions == 0) == first).all()
    assert positions.max() == 12


def test_a_long_conversation_is_refused_and_named(tmp_path: Path) -> None:
    result, train = packs(tmp_path, [flat_set(tmp_path, [(5, TEXT), (17, CONVERSATION), (4, CONVERSATION)])], 16)
    assert result.refused.tolist() == [1]
    assert result.counts.refused == packing.Lost(1, 17)
    assert [len(tokens) for tokens, _ in found(train)] == [5, 4]


def test_a_truncated_conversation_keeps_its_head_and_an_unanswered_head_is_refused(tmp_path: Path) -> None:
    tokens, mask = np.arange(40), np.zeros(40, np.uint8)
    mask[[10, 39]] = 1, 255  # the first is answered within the pack, the second is not
    with flat.Writer(tmp_path, "documents", vocabulary="v", vocabulary_size=SIZE) as writer:
        writer.append(tokens, mask, np.array([20, 20]), np.zeros((2, 16), np.uint8), np.zeros(2, np.uint8))
    sets = [flat.read(tmp_path, "documents")]
    result, train = packs(tmp_path, sets, 16, overflow=Overflow(conversation="truncate"))
    assert found(train) == [(list(range(16)), mask[:16].tolist())]
    assert (result.counts.truncated, result.counts.refused) == (packing.Lost(1, 4), packing.Lost(1, 20))
    assert result.refused.tolist() == [1]


def test_nothing_to_pack_gives_an_empty_split(tmp_path: Path) -> None:
    result, train = packs(tmp_path, [flat_set(tmp_path, [])], 16)
    assert result.header.packs == len(train.tokens) == 0
    assert packs(tmp_path, [], 16)[0].counts.tokens_in == 0


def test_what_is_written_a_block_at_a_time_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [(1 + n % 23, TEXT) for n in range(200)]
    sets = [flat_set(tmp_path, documents, "one"), flat_set(tmp_path, documents, "two", 9000)]
    whole = packs(tmp_path, sets, 32)[1].tokens.tobytes()
    monkeypatch.setattr(packing, "BLOCK", 64)
    assert packs(tmp_path, sets, 32)[1].tokens.tobytes() == whole
    assert packs(tmp_path, sets, 32, seed=2)[1].tokens.tobytes() != whole


def test_packs_come_in_another_order_than_best_fit_makes_them(tmp_path: Path) -> None:
    _, train = packs(tmp_path, [flat_set(tmp_path, [(length, TEXT) for length in range(1, 65)])], 64)
    longest = [int(np.bincount(row[row > 0]).max()) for row in train.segments]
    assert longest != sorted(longest, reverse=True)


def test_a_refused_document_cannot_be_chosen(tmp_path: Path) -> None:
    sets = [flat_set(tmp_path, [(5, TEXT), (0, REFUSED)])]
    with pytest.raises(ValueError, match=r"document \[0, 1\] was refused"):
        packs(tmp_path, sets, 16, chosen=np.array([[0, 0], [0, 1]]))


@pytest.mark.parametrize("place", [[0, 1], [1, 0], [0, -1], [-1, 0]])
def test_a_document_that_is_not_there_cannot_be_chosen(tmp_path: Path, place: list[int]) -> None:
    with pytest.raises(ValueError, match="none of the 1 sets has"):
        packs(tmp_path, [flat_set(tmp_path, [(5, TEXT)])], 16, chosen=np.array([place]))


def test_a_set_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="set 0 was written with the tokenizer v"):
        packs(tmp_path, [flat_set(tmp_path, [(5, TEXT)])], 16, vocabulary="w")


def test_more_documents_than_a_pack_can_number_are_refused(tmp_path: Path) -> None:
    sets = [flat_set(tmp_path, [(1, TEXT)])]
    with pytest.raises(BadInput, match="would hold 65536 documents, 65535 at most"):
        packs(tmp_path, sets, 1 << 17, times=np.array([1 << 16]))


def test_a_million_lengths_leave_a_thousandth_of_the_room_at_most() -> None:
    lengths = np.minimum(np.random.default_rng(1).lognormal(5.5, 1.0, 1_000_000).astype(np.int64) + 1, 4096)
    found = best_fit_decreasing(lengths, 4096)
    assert 1 - lengths.sum() / (found.packs * 4096) <= 0.001


def test_the_domain_of_every_token_is_that_of_its_document(tmp_path: Path) -> None:
    lengths = [5, 30, 1, 12, 45, 7, 16, 3]
    one = flat_set(tmp_path, [(length, TEXT) for length in lengths])
    result, train = packs(tmp_path, [one], 16, times=np.array([1, 2, 1, 0, 1, 3, 1, 1]))
    names = [f"d{number % 3}" for number in range(len(lengths))]
    domains.write(tmp_path, "train", [names[row] for row in result.pieces.tolist()], result.packs, train.header.packs)
    known = domains.read(tmp_path, "train")
    assert known is not None
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    order = np.random.default_rng(1).permutation(train.header.packs)
    segments = train.segments[order]
    found = known.of(order, segments)
    said = segments > 0
    assert (found[~said] == -1).all()
    wanted = [names[document_of[token - 1]] for token in train.tokens[order][said].tolist()]
    assert [known.names[number] for number in found[said].tolist()] == wanted


def test_domains_that_do_not_fit_their_packs_are_refused(tmp_path: Path) -> None:
    assert domains.read(tmp_path, "train") is None
    domains.write(tmp_path, "train", ["a", "b"], np.array([0, 1]), 2)
    (tmp_path / "train.domains.bin").write_bytes(b"\1\0")
    with pytest.raises(BadInput, match="Prepare the data again"):
        domains.read(tmp_path, "train")
