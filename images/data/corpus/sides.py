"""A side's rows with their tokens: which document of which shard's flat set each row is."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus import flat, record, rows
from corpus.flat import Flat
from corpus.mix import TIMES
from corpus.settings import Learn
from corpus.tokenize import NAME, write
from corpus.tokens import ANY_LENGTH, Encoder

DRILL = "drill"


def open_sets(folders: Sequence[Path]) -> list[Flat]:
    """The tokens of all shards, mapped. Each map keeps a file open, so as many are allowed as the system lets us."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return [flat.read(folder, NAME) for folder in folders]


@dataclass(frozen=True)
class Side:
    """Rows, and of each (number of the set, number of the document), an array of shape (rows, 2)."""

    table: pa.Table
    sets: Sequence[Flat]
    documents: NDArray[np.int64]

    @property
    def times(self) -> NDArray[np.int64]:
        """How often an epoch sees each row."""
        if TIMES not in self.table.column_names:
            return np.ones(len(self.documents), np.int64)
        times: NDArray[np.int64] = self.table.column(TIMES).to_numpy().astype(np.int64)
        return times

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return self._of_each(Flat.lengths)

    @property
    def refused(self) -> NDArray[np.bool_]:
        """Which rows have no tokens."""
        refused: NDArray[np.bool_] = self._of_each(lambda one: one.kinds) == flat.REFUSED
        return refused

    def only(self, wanted: NDArray[np.bool_]) -> Side:
        """Some of the rows."""
        return replace(
            self, table=self.table.filter(pa.array(wanted)).combine_chunks(), documents=self.documents[wanted]
        )

    def _of_each(self, column: Callable[[Flat], NDArray[np.generic]]) -> NDArray[np.int64]:
        found = np.zeros(len(self.documents), np.int64)
        keys = self.documents[:, 0]
        for number, own in rows.grouped(keys, np.argsort(keys, kind="stable")):
            found[own] = column(self.sets[number])[self.documents[own, 1]]
        return found


def open_side(
    table: pa.Table, sets: Sequence[Flat], shards: Sequence[Path], encoder: Encoder, scratch: Path,
    learn: Learn = "answers",
) -> Side:  # fmt: skip
    """The tokens of a side, those that were refused left out.

    Where a drill gave rows another one's answer their own tokens are of no use: they are made anew, below `scratch`.
    """
    documents = np.stack([table.column(name).to_numpy().astype(np.int64) for name in ("shard", "row")], axis=1)
    side = Side(table, sets, documents)
    side = side.only(~side.refused)
    if "answer_row" in table.column_names:
        _tokenize_drilled(side.table, shards, encoder, sets, scratch, learn)
        drilled = flat.read(scratch, DRILL)
        documents = np.stack([np.full(len(drilled), len(sets)), np.arange(len(drilled))], axis=1)
        side = Side(side.table, [*sets, drilled], documents)
        side = side.only(~side.refused)
    return side


def _tokenize_drilled(
    table: pa.Table, shards: Sequence[Path], encoder: Encoder, sets: Sequence[Flat], scratch: Path, learn: Learn
) -> None:
    others = table.select(["answer_shard", "answer_row"]).rename_columns(["shard", "row"])
    asked = dict(rows.conversations(table, shards))
    answers = {number: messages[-1] for number, messages in rows.conversations(others, shards)}
    header = sets[0].header
    with flat.Writer(
        scratch, DRILL, vocabulary=header.vocabulary, vocabulary_size=header.vocabulary_size, pairs=learn == "pairs"
    ) as out:
        names = table.column("id").to_pylist()
        for first in range(0, table.num_rows, record.GROUP_ROWS):
            group = range(first, min(first + record.GROUP_ROWS, table.num_rows))
            given = [[*asked[number][:-1], answers[number]] for number in group]
            write(out, encoder, given, [names[number] for number in group], ANY_LENGTH, learn)
