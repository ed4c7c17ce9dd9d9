"""The gate of the fast tokenizer: it is used only where it says exactly what Hugging Face's says.

It must agree on the torture set when it is loaded, and in every batch on a sample of texts spread evenly over it. At
the first difference the batch and all that follow are tokenized by Hugging Face's, and one line says what differed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from corpus import torture
from corpus.bpe import Fast, Ids, Reference, Unsupported
from refit import log

SAMPLE = 2000
ONE_IN = 64
LEAST = 256


class Gated:
    """A tokenizer.json as fast as it can be read exactly."""

    def __init__(self, file: Path) -> None:
        self._source = file.read_text(encoding="utf-8")
        self._reference = Reference(self._source)
        self._fast: Fast | None = None
        self._asked = False

    @property
    def name(self) -> str:
        """Library and version that tokenize large batches, as far as that is known by now."""
        return (self._fast or self._reference).name

    def __call__(self, texts: Sequence[str]) -> Ids:
        """Tokenize texts as plain text. What is no more than a sample is left to Hugging Face's at once."""
        if len(texts) <= SAMPLE:
            return self._reference(texts)
        if not self._asked:
            self._asked = True
            self._fast = self._load()
        if self._fast is not None:
            ids = self._fast(texts)
            step = len(texts) // min(SAMPLE, max(LEAST, len(texts) // ONE_IN))
            if self._agrees(ids, texts, range(0, len(texts), step), "sample"):
                return ids
            self._fast = None
        return self._reference(texts)

    def _load(self) -> Fast | None:
        try:
            fast = Fast(self._source, self._reference)
        except Unsupported as error:
            log.event("fast_tokenizer_not_used", reason=str(error))
            return None
        texts = torture.texts(self._reference.added)
        return fast if self._agrees(fast(texts), texts, range(len(texts)), "torture") else None

    def _agrees(self, ids: Ids, texts: Sequence[str], places: range, what: str) -> bool:
        """Whether the texts at some places were tokenized as Hugging Face's does it; if not, say where it begins."""
        right = self._reference([texts[place] for place in places])
        for at, place in enumerate(places):
            found = ids.tokens[ids.offsets[place] : ids.offsets[place + 1]]
            expected = right.tokens[right.offsets[at] : right.offsets[at + 1]]
            if not np.array_equal(found, expected):
                shared = min(len(found), len(expected))
                first = int(np.argmin([*(found[:shared] == expected[:shared]), False]))
                log.event(
                    "fast_tokenizer_not_used", reason="differs", **{"in": what}, text=place, token=first,
                    found=found[first : first + 8].tolist(), expected=expected[first : first + 8].tolist(),
                )  # fmt: skip
                return False
        return True
