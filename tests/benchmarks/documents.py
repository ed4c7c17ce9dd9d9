"""Invented documents of about 1 KB, English-like and Chinese-like, some of them near duplicates of a former one.

Frequencies fall with the rank as those of real words do. A copy has one to three words changed; which pairs are planted
is known, so that what a library finds can be judged: recall, precision and F1.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PLANTED = 0.1
JUDGED = 100_000
"""Pairs are judged on the first texts: the sets of these fit into memory."""
NEAR = 0.85
SYLLABLES = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "on")]
HAN = [chr(point) for point in range(0x4E00, 0x4E00 + 4000)]


@dataclass(frozen=True)
class Language:
    """A vocabulary, most frequent words first, how words make a text, and the words that a text's n-grams are of."""

    words: list[str]
    fewest: int
    most: int
    write: Callable[[Sequence[str]], str]
    split: Callable[[str], Sequence[str]]


def english(seed: int = 7) -> Language:
    """Words of one to three syllables between blanks."""
    chooser = random.Random(seed)
    words = ["".join(chooser.choices(SYLLABLES, k=chooser.choice((1, 2, 2, 3)))) for _ in range(30_000)]
    return Language(words, 120, 200, " ".join, str.split)


def chinese(seed: int = 7) -> Language:
    """Words of one or two Han characters with no blanks; a comma after every eighth, a full stop after the 24th."""
    chooser = random.Random(seed)
    weights = 1 / np.arange(2, len(HAN) + 2) ** 0.9
    words = ["".join(chooser.choices(HAN, weights.tolist(), k=chooser.choice((1, 2, 2)))) for _ in range(10_000)]

    def write(text: Sequence[str]) -> str:
        return "".join(
            word + ("。" if at % 24 == 0 else "，" if at % 8 == 0 else "") for at, word in enumerate(text, 1)
        )

    return Language(words, 132, 210, write, lambda text: text.replace("，", "").replace("。", ""))


def documents(count: int, language: Language, seed: int = 7) -> Iterator[tuple[str, int | None]]:
    """Texts, each with the number of the former one that it is a copy of."""
    rng, chooser, words = np.random.default_rng(seed), random.Random(seed), language.words
    law = np.cumsum(1 / np.arange(2, len(words) + 2) ** 0.9)
    originals: list[tuple[int, list[str]]] = []
    for number in range(count):
        if originals and chooser.random() < PLANTED:
            former, words_of_it = chooser.choice(originals)
            text = list(words_of_it)
            for _ in range(chooser.randint(1, 3)):
                text[chooser.randrange(len(text))] = chooser.choice(words)
            yield language.write(text), former
        else:
            picked = np.searchsorted(law, rng.random(int(rng.integers(language.fewest, language.most))) * law[-1])
            text = [words[place] for place in picked.tolist()]
            originals.append((number, text))
            yield language.write(text), None


@dataclass(frozen=True)
class Planted:
    """A jsonl file of documents (id, text), its pairs of at least `NEAR` exact similarity, and how to judge others."""

    path: Path
    text_bytes: int
    pairs: dict[str, str]
    similarity: Callable[[str, str], float]

    @classmethod
    def write(cls, path: Path, count: int, language: Language) -> Planted:
        """Write the file."""
        texts: dict[str, str] = {}
        formers: dict[str, str] = {}
        text_bytes = 0
        with path.open("w", encoding="utf-8") as handle:
            for number, (text, former) in enumerate(documents(count, language)):
                name = f"{number:08d}"
                handle.write(json.dumps({"id": name, "text": text}, ensure_ascii=False) + "\n")
                text_bytes += len(text.encode())
                if number < JUDGED:
                    texts[name] = text
                    if former is not None:
                        formers[name] = f"{former:08d}"

        def similarity(left: str, right: str) -> float:
            a, b = (_grams(language.split(texts[name])) for name in (left, right))
            return len(a & b) / len(a | b)

        pairs = {copy: former for copy, former in formers.items() if similarity(copy, former) >= NEAR}
        return cls(path, text_bytes, pairs, similarity)

    def judge(self, linked: dict[str, str], threshold: float) -> tuple[float, float]:
        """Recall and precision of what was found: for each row that goes the one that it is linked with.

        A planted copy is found where both ends are in one cluster. A link that is not planted is false unless its
        exact similarity is at least `threshold`: a link over a third text is judged as a pair too, and may be less.
        """
        judged = {copy: former for copy, former in linked.items() if int(copy) < JUDGED and int(former) < JUDGED}
        found = sum(linked.get(copy, copy) == linked.get(former, former) for copy, former in self.pairs.items())
        right = sum(
            self.pairs.get(copy) == former or self.similarity(copy, former) >= threshold
            for copy, former in judged.items()
        )
        return found / max(1, len(self.pairs)), right / max(1, len(judged))


def f1(recall: float, precision: float) -> float:
    """The harmonic mean of both."""
    return 2 * recall * precision / max(1e-9, recall + precision)


def _grams(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + 5]) for at in range(len(words) - 4)}
