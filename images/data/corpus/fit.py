"""`corpus fit`: a perplexity model of good texts and a classifier of good against bad, as a folder of the store.

A tenth of either side is held back, and the models are measured on that. The same texts give the same bytes, in
whatever order and in whichever files they come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus import formats, quality, score
from corpus.decontaminate import everything, gather
from corpus.ngrams import ORDER, Counts, Ngrams, grams
from corpus.quality import BUCKETS, Linear
from corpus.record import Bad
from corpus.score import Model
from corpus.shingles import Hashes, Texts, room
from refit import fingerprint
from refit.errors import BadInput
from refit.manifest import Manifest
from refit.store import store_for

HELD_BACK = 10
"""One text in so many is held back."""
MIN_TEXTS = 20
MAX_GRAMS = 500_000
"""n-grams of one length that are kept, the commonest first: the model stays small however much it was fitted on."""
STRENGTH = 10.0
"""C of the logistic regression: how far the weights follow the samples."""


@dataclass(frozen=True)
class Side:
    """The different texts of a side, in an order that their hashes give."""

    texts: list[str]

    @property
    def held_back(self) -> list[str]:
        """Those that the models are measured on."""
        return self.texts[: max(1, len(self.texts) // HELD_BACK)]

    @property
    def fitted(self) -> list[str]:
        """Those that they are fitted on."""
        return self.texts[len(self.held_back) :]


def fit(good: Sequence[Path], bad: Sequence[Path], output: str, *, max_texts: int, seed: int) -> dict[str, Any]:
    """Fit both models, measure them, and publish them at the URI `output`.

    Args:
        good: files of any format that the data stage reads, with texts to be like.
        bad: the same with texts to be unlike.
        output: a folder that does not exist yet.
        max_texts: of a side with more, so many are drawn.
        seed: which are drawn, and which held back.

    Raises:
        BadInput: a file is missing, a side holds too few texts, or `output` holds something else already.
    """
    started = time.perf_counter()
    sides, unread = _sides(good, bad, max_texts, seed)
    digests = {name: fingerprint.digest(side.texts) for name, side in sides.items()}
    name = fingerprint.fingerprint("fit", fingerprint.code_digest(__name__), {"seed": seed}, digests)
    store = store_for(output)
    there = store.manifest(output)
    if there is not None and there.fingerprint != name:
        raise BadInput(f"--output is {output!r}: it holds a {there.kind} already. Name a folder that is not there yet.")
    counted = count(Texts.of(sides["good"].fitted))
    if not counted.start[0]:
        raise BadInput("--good: its texts hold no words; there is nothing to fit on. Give other files.")
    model = Model(counted, separate(sides["good"].fitted, sides["bad"].fitted, seed))
    facts: dict[str, Any] = {
        "texts": {name: len(side.texts) for name, side in sides.items()},
        "held_back": {name: len(side.held_back) for name, side in sides.items()},
        "unread": unread,
        **measure(model, sides["good"].held_back, sides["bad"].held_back),
    }
    with store.publish(output) as draft:
        score.save(model, draft.path)
        manifest = draft.commit(Manifest(kind=score.KIND, fingerprint=name, inputs=digests, facts=facts))
    return {"model": output, "fingerprint": name, "bytes": sum(file.size for file in manifest.files), **facts,
            "seconds": round(time.perf_counter() - started, 3)}  # fmt: skip


def count(texts: Texts) -> Ngrams:
    """The n-grams of texts, with what came after each."""
    most = sum(room(*span) for span in zip(texts.offsets[:-1].tolist(), texts.offsets[1:].tolist(), strict=True))
    keys, contexts = np.empty(most, np.uint64), np.empty(most, np.uint64)
    found: list[tuple[Hashes, Counts, Counts, Counts]] = []
    start = np.zeros(2, np.int64)
    for n in range(1, ORDER + 1):
        number = grams(texts.data, texts.offsets, n, keys, contexts)
        own, first, counts = np.unique(keys[:number], return_index=True, return_counts=True)
        kept = _commonest(counts)
        if found:
            kept &= np.isin(contexts[first], found[-1][0])
        own, before, often = own[kept], contexts[first][kept], counts[kept].astype(np.uint32)
        if found:
            place = np.searchsorted(found[-1][0], before)
            np.add.at(found[-1][2], place, often)
            np.add.at(found[-1][3], place, np.uint32(1))
        else:
            start[:] = often.sum(), len(own)
        found.append((own, often, np.zeros(len(own), np.uint32), np.zeros(len(own), np.uint32)))
    all_keys, all_counts, totals, distinct = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(all_keys)
    return Ngrams(all_keys[order], all_counts[order], totals[order], distinct[order], start)


def _commonest(counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which to keep: all where they are few enough, else those above the count at which they are too many."""
    if len(counts) <= MAX_GRAMS:
        return np.ones(len(counts), np.bool_)
    return np.asarray(counts > np.partition(counts, -MAX_GRAMS - 1)[-MAX_GRAMS - 1])


def separate(good: Sequence[str], bad: Sequence[str], seed: int) -> Linear:
    """The weights that tell good from bad: logistic regression, both sides counting the same."""
    from sklearn.linear_model import LogisticRegression

    labels = np.repeat([1, 0], [len(good), len(bad)])
    # liblinear: one thread and a seed give one answer, and it is the fastest on features as sparse as these.
    fitted = LogisticRegression(C=STRENGTH, class_weight="balanced", solver="liblinear", random_state=seed)
    fitted.fit(_features(Texts.of([*good, *bad])), labels)
    return Linear(fitted.coef_[0].astype(np.float32), float(fitted.intercept_[0]))


def _features(texts: Texts) -> Any:
    """A sparse matrix, a row a text, in which a score is a sum as in `quality`."""
    from scipy.sparse import csr_matrix

    columns, ends, values = [], [0], []
    for start, stop in zip(texts.offsets[:-1].tolist(), texts.offsets[1:].tolist(), strict=True):
        out = np.empty(quality.ORDER * room(start, stop), np.int64)
        number = quality.buckets(texts.data, start, stop, out)
        columns.append(out[:number].copy())
        values.append(np.full(number, 1 / np.sqrt(max(1, number))))
        ends.append(ends[-1] + number)
    matrix = csr_matrix((np.concatenate(values), np.concatenate(columns), ends), shape=(len(texts), BUCKETS))
    matrix.sum_duplicates()
    return matrix


def measure(model: Model, good: Sequence[str], bad: Sequence[str]) -> dict[str, Any]:
    """How well texts that the models have not seen are told apart; texts without words are passed over.

    Returns:
        accuracy at a quality of 0.5 and AUC of the classifier; of the perplexity its geometric mean on either side
        (a plain one would be that of the few strangest texts), its AUC, and what 95 of 100 good texts stay below: a
        place to begin for `data.score.drop_above_perplexity`.
    """
    from sklearn.metrics import roc_auc_score

    scores = score.score(model, [*good, *bad])
    is_good = np.repeat([True, False], [len(good), len(bad)])
    said = scores.words > 0
    if not said[is_good].any() or not said[~is_good].any():
        raise BadInput("the texts that were held back have no words on one side. Give more, and longer ones.")
    is_good, perplexity, goodness = is_good[said], scores.perplexity[said], scores.quality[said]
    return {
        "accuracy": round(float(((goodness >= 0.5) == is_good).mean()), 4),
        "auc": round(float(roc_auc_score(is_good, goodness)), 4),
        "perplexity": {
            "good": round(float(np.exp(np.log(perplexity[is_good]).mean())), 1),
            "bad": round(float(np.exp(np.log(perplexity[~is_good]).mean())), 1),
            "good_p95": round(float(np.quantile(perplexity[is_good], 0.95)), 1),
            "auc": round(float(roc_auc_score(~is_good, perplexity)), 4),
        },
    }


def _sides(good: Sequence[Path], bad: Sequence[Path], max_texts: int, seed: int) -> tuple[dict[str, Side], int]:
    """Both sides, without what stands on both, and how many rows could not be read."""
    gathered = {name: gather(paths, _text_of) for name, paths in (("good", good), ("bad", bad))}
    texts = {name: set(found.texts) for name, found in gathered.items()}
    both = texts["good"] & texts["bad"]
    sides = {}
    for name, own in texts.items():
        ordered = sorted(own - both, key=lambda text: (xxhash.xxh3_128_digest(text.encode(), seed), text))
        if len(ordered) < MIN_TEXTS:
            raise BadInput(
                f"--{name}: {len(ordered)} different texts that are not on the other side too; "
                f"at least {MIN_TEXTS} are needed. Give more files."
            )
        sides[name] = Side(ordered[:max_texts])
    return sides, sum(found.unread for found in gathered.values())


def _text_of(row: Any) -> str:
    """A row's text as `score` judges it in a record; all strings of a row of no known format."""
    try:
        return score.text_of(formats.conversation(row, "auto", {}))
    except Bad:
        return everything(row)
