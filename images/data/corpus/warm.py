"""`python -m corpus.warm`: compile every kernel and keep it on disk, so that no first run waits for the compiler."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from corpus import flat, grams, letters, lsh, minhash, overlap, repeated, shelf
from corpus.packing import pack_documents
from corpus.shingles import Texts
from refit.spec import Dedup

SETTINGS = Dedup(threshold=0.5, ngram=2)


def main() -> None:
    """Run each on a few texts, with the types that the phases use."""
    lines()
    clusters()
    texts, some = _texts(), np.arange(4, dtype=np.int64)
    signed = minhash.signed([texts], **SETTINGS.model_dump(exclude={"threshold"}))
    ranks = np.arange(len(texts), dtype=np.int64) % 3
    lsh.matches(signed, lambda shared: [letters.lowered(_array().take(pa.array(shared)))], ranks, SETTINGS)
    sets = grams.sets_of(lsh.whole([texts]), np.arange(len(texts)), signed.sizes, SETTINGS.ngram)
    sets.similarity(some, some + 1)
    lsh.connected(len(texts), some, some + 1)
    overlap.held(texts, overlap.Guarded.of(texts, SETTINGS.ngram, 2))
    repeated.none(texts, SETTINGS.ngram)
    packs()
    scores()


def clusters() -> None:
    """Those that `lsh.clusters` runs."""
    lsh.clusters([_texts()], SETTINGS)


def lines() -> None:
    """Those that read rows of jsonl, and take their texts."""
    with TemporaryDirectory() as name, shelf.Shelf(Path(name, "aside")) as rows:
        path = Path(name, "warm.jsonl")
        path.write_bytes(b'{"id": "a", "text": "b"}')
        rows.add_lines(path, lambda span: ())
        rows.texts(rows.blocks[0])
        rows.repeated_id()


def packs() -> None:
    """Those that packing runs, for both widths of a token."""
    one = np.ones(1, np.int64)
    for size in (1 << 16, 1 << 17):
        with TemporaryDirectory() as name:
            folder = Path(name)
            with flat.Writer(folder, "warm", vocabulary="", vocabulary_size=size) as writer:
                writer.append(one, one, one, np.zeros((1, flat.ID_BYTES), np.uint8), one)
            pack_documents(
                [flat.read(folder, "warm")], np.zeros((1, 2), np.int64), one, length=16, pad=1, seed=1, folder=folder,
                split="packs", vocabulary="", vocabulary_size=size,
            )  # fmt: skip


def scores() -> None:
    """Those that fit a score's model, and that ask one."""
    from corpus import fit, quality, score  # not needed, and not waited for, where only `clusters` is

    texts = _texts()
    model = score.Model(fit.count(texts), quality.Linear(np.zeros(quality.BUCKETS, np.float32), 0.0))
    score.score(model, ["été 退款", ""])
    quality.buckets(texts.data, 0, 10, np.empty(2 * 7, np.int64))


def _texts() -> Texts:
    return letters.lowered(_array())


def _array() -> pa.Array:
    sentences = [f"the quick brown fox number {number % 7} jumps over it" for number in range(600)]
    return pa.array([*sentences, "été 退款", ""], pa.large_string())


if __name__ == "__main__":
    main()
