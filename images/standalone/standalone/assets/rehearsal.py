"""General prompts: what a base model is asked before training, so that training can rehearse its own answers.

A model that only ever sees one task answers everything as if it were that task. A few of its own former answers in the
mix keep the rest of it in place (self-synthesised rehearsal, Huang et al. 2024). The prompts are of many kinds and none
is of the exam's general set; the answers are the model's, so nothing is taught here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

TOPICS = (
    "rain", "bread", "the moon", "a bicycle", "honey", "a library", "volcanoes", "chess", "the heart", "a garden",
    "salt", "trains", "sleep", "a compass", "music", "the sea", "winter", "a bridge", "coffee", "birds",
    "paper", "a lighthouse", "money", "friendship", "tea", "computers", "a forest", "maps", "rice", "dreams",
)  # fmt: skip
KINDS = (
    "Explain {topic} to a child in one sentence.",
    "Why do people like {topic}?",
    "Write one short sentence about {topic}.",
    "List three words that have to do with {topic}.",
    "Is {topic} something you can touch? Answer yes or no.",
    "Ask me one question about {topic}.",
    "Describe {topic} in five words.",
    "What is a good title for a story about {topic}?",
    "Say something true about {topic}.",
    "Tell me briefly where one finds {topic}.",
)
SENTENCES = (
    "The train was late again.", "My sister bakes a cake.", "We walked home in the dark.", "He forgot his umbrella.",
    "The shop opens at nine.", "Two dogs slept by the door.", "I lost my keys yesterday.", "She sings every morning.",
    "The soup is too salty.", "They moved to a small town.",
)  # fmt: skip
CHANGES = (
    "Write this sentence again in other words: {text}",
    "Put this sentence into the future: {text}",
    "How many words does this sentence have? {text}",
    "What is the subject of this sentence? {text}",
    "Translate into Spanish: {text}",
)
SUMS = "A box holds {a} eggs and {b} are taken out. How many are left?"
WORDS = ("river", "silver", "window", "garden", "planet", "butter", "castle", "pencil", "summer", "mirror")
PUZZLES = ("Spell the word {word}.", "Name something that rhymes with {word}.", "Use the word {word} in a sentence.")


def prompts() -> list[str]:
    """The prompts, in an order that mixes the kinds."""
    kinds: list[Iterator[str]] = [
        (kind.format(topic=topic) for topic, kind in _diagonal(TOPICS, KINDS)),
        (change.format(text=text) for text, change in _diagonal(SENTENCES, CHANGES)),
        (puzzle.format(word=word) for word, puzzle in _diagonal(WORDS, PUZZLES)),
        (SUMS.format(a=a, b=b) for a, b in zip(range(12, 42), itertools.cycle((2, 5, 7)), strict=False)),
    ]
    return [prompt for turn in itertools.zip_longest(*kinds) for prompt in turn if prompt is not None]


def _diagonal(left: tuple[str, ...], right: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every pair, so that neither side repeats itself from one to the next."""
    for shift in range(len(right)):
        for index, item in enumerate(left):
            yield item, right[(index + shift) % len(right)]
