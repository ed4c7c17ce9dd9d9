"""A model's score of each record: its perplexity and its quality, and what follows from them.

The model is what `corpus fit` made: two NumPy files, no pickle, and no library but NumPy to read them. What a score
does is the spec's to say (`data.score`): drop a record, or let it weigh less in the loss.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus import tools
from corpus.ngrams import Ngrams
from corpus.quality import BUCKETS, Linear
from corpus.record import TEXT, WEIGHT, Message
from corpus.shingles import Texts
from refit.errors import BadInput
from refit.spec import ScoreLimits

KIND = "score"
PERPLEXITY, QUALITY = "perplexity.npz", "quality.npz"
_NGRAMS = {"keys": np.uint64, "counts": np.uint32, "totals": np.uint32, "distinct": np.uint32, "start": np.int64}
_LINEAR = {"weights": np.float32, "bias": np.float64}


@dataclass(frozen=True)
class Model:
    """A folder of kind `score`, in memory."""

    ngrams: Ngrams
    linear: Linear


class Scores(NamedTuple):
    """An entry a text: perplexity a word, quality 0 to 1 (both NaN where it has no word), number of words."""

    perplexity: NDArray[np.float64]
    quality: NDArray[np.float64]
    words: NDArray[np.int64]


class Verdict(NamedTuple):
    """Why a record goes (None: it stays), and its weight in the loss: from the floor to 1."""

    drop: str | None
    weight: float


def load(folder: Path) -> Model:
    """The model of a folder.

    Raises:
        BadInput: the folder holds no such model, or one that is damaged.
    """
    counted, linear = _arrays(folder / PERPLEXITY, _NGRAMS), _arrays(folder / QUALITY, _LINEAR)
    rows, start = len(counted["keys"]), counted["start"]
    if (
        any(len(counted[name]) != rows for name in ("counts", "totals", "distinct"))
        or len(start) != 2
        or min(start) < 1
    ):
        raise BadInput(f"{folder / PERPLEXITY}: its arrays do not belong together. {_ANEW}")
    if linear["weights"].shape != (BUCKETS,) or linear["bias"].shape != (1,):
        raise BadInput(f"{folder / QUALITY}: expected {BUCKETS} weights and a bias. {_ANEW}")
    return Model(Ngrams(**counted), Linear(linear["weights"], float(linear["bias"][0])))


def save(model: Model, folder: Path) -> None:
    """Write what `load` reads."""
    np.savez_compressed(folder / PERPLEXITY, **{name: getattr(model.ngrams, name) for name in _NGRAMS})
    np.savez_compressed(folder / QUALITY, weights=model.linear.weights, bias=np.array([model.linear.bias]))


def score(model: Model, texts: Sequence[str]) -> Scores:
    """The scores of texts; each depends on that text alone."""
    given = Texts.of(texts)
    perplexity, words = model.ngrams.perplexity(given)
    return Scores(perplexity, model.linear.quality(given), words)


def judge(scores: Scores, settings: ScoreLimits) -> list[Verdict]:
    """What the settings make of scores. A text of fewer than `min_words` words stays, at full weight."""
    columns = zip(scores.perplexity.tolist(), scores.quality.tolist(), scores.words.tolist(), strict=True)
    return [_judge(*row, settings) for row in columns]


def _judge(perplexity: float, quality: float, words: int, settings: ScoreLimits) -> Verdict:
    if words < max(1, settings.min_words):
        return Verdict(None, 1.0)
    weight = max(settings.weight_floor, round(quality, 3)) if settings.weight == "quality" else 1.0
    if quality < settings.drop_below_quality:
        why = f"quality {quality:.3f} is below {settings.drop_below_quality:g}"
        return Verdict(f"score: {why}", weight)
    if settings.drop_above_perplexity is not None and perplexity > settings.drop_above_perplexity:
        return Verdict(f"score: perplexity {perplexity:.0f} is above {settings.drop_above_perplexity:g}", weight)
    return Verdict(None, weight)


def weigh(messages: Sequence[Message], weight: float) -> None:
    """Scale what the answers of a record, or its text, count in the loss; the messages are changed."""
    for message in messages:
        own = message.get(WEIGHT, 1.0)
        if weight < 1 and own > 0 and message["role"] in ("assistant", TEXT):
            # Never to 0: that would say not to learn it.
            message[WEIGHT] = max(0.001, round(own * weight, 3))


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """What of a record is scored: all that was said, without the system message and calls of tools."""
    return "\n".join(
        message["content"]
        for message in messages
        if message["role"] != "system" and not tools.is_call(message["content"])
    )


_ANEW = "Fit it anew with `corpus fit`."


def _arrays(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            found = {name: stored[name] for name in types}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path}: cannot be read as a score's model: {error}. {_ANEW}") from error
    wrong = [name for name, kind in types.items() if found[name].dtype != kind or found[name].ndim != 1]
    if wrong:
        raise BadInput(f"{path}: {wrong[0]} is {found[wrong[0]].dtype} of {found[wrong[0]].ndim} dimensions. {_ANEW}")
    return found
