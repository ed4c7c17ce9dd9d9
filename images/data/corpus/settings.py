"""What each phase may read of the spec, and no more: a setting that is not here cannot decide a phase's bytes.

The fingerprint of a phase covers its settings, so moving a weight runs `mix` and `pack` again and nothing before them.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from refit.spec import Dedup, Expectations, Pipeline, Rule, ScoreLimits, Split, TokenLimits

MATCH_PARTS = 4
"""The bands are dealt out to so many parts. A text that is near to another one is so in most of the bands: more parts
would go through the same texts more often."""
Learn = Literal["answers", "pairs", "texts"]
"""What is learnt of a record: a conversation's answers, a pair of answers, every token of a plain text."""


class Settings(BaseModel):
    """The part of a spec that one phase reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceSettings(Settings):
    """A source without its address (its content counts, not its place) and without its weight (that is `mix`'s)."""

    name: str
    format: str
    columns: dict[str, str]
    role: str
    domain: str | None


class IngestSettings(Settings):
    """How deliveries become canonical records."""

    sources: tuple[SourceSettings, ...]
    system: str
    label_key: str | None
    max_records: int | None

    def of_source(self, name: str) -> Self:
        """What decides the records of one source: another source beside it moves nothing."""
        return self.model_copy(update={"sources": tuple(source for source in self.sources if source.name == name)})


class CleanSettings(Settings):
    """Which rules, in which order, with which arguments, and what follows from a score."""

    rules: tuple[Rule, ...]
    score: ScoreLimits


class SignSettings(Settings):
    """What a signature is made of: what decides `dedup` further, as its threshold, makes none anew."""

    ngram: int
    bands: int
    rows: int
    seed: int


class MatchSettings(Settings):
    """What counts as near, and which part of the bands is looked at."""

    dedup: Dedup
    part: int = 0

    def of_part(self, name: str) -> Self:
        """What decides the pairs of one part."""
        return self.model_copy(update={"part": int(name)})


class DedupSettings(Settings):
    """What counts as the same text."""

    dedup: Dedup


class SplitSettings(Settings):
    """Who is held out, and what counts as too near to it."""

    split: Split
    dedup: Dedup
    rehearsal: tuple[str, ...]
    ngram: int
    threshold: float
    min_words: int


class MixSettings(Settings):
    """How much of each source training sees, in which order, and whether a drill spoils the answers."""

    weights: dict[str, float]
    temperature: float | None
    seed: int
    drill: str
    rehearsal: tuple[str, ...]


class TokenizeSettings(Settings):
    """What of a record is learnt, and how long it may be; the tokenizer and its template are an input."""

    learn: Learn
    tokens: TokenLimits


class PackSettings(Settings):
    """What of a record is learnt, how long a pack is, and what the door out asks."""

    learn: Learn
    pack_length: int
    seed: int
    heldout: float
    label_key: str | None
    expect: Expectations
    rehearsal: tuple[str, ...]


class DoorSettings(Settings):
    """What a door asks."""

    after: str
    sources: tuple[str, ...]
    label_key: str | None
    heldout: float
    expect: Expectations
    rehearsal: tuple[str, ...]


def ingest(spec: Pipeline) -> IngestSettings:
    """The settings of `ingest`."""
    return IngestSettings(
        sources=tuple(
            SourceSettings(
                name=source.name, format=source.format, columns=source.columns, role=source.role, domain=source.domain
            )
            for source in spec.data.sources
        ),
        system=spec.data.system,
        label_key=spec.data.label_key,
        max_records=spec.data.max_records,
    )


def clean(spec: Pipeline) -> CleanSettings:
    """The settings of `clean`."""
    return CleanSettings(rules=spec.data.rules, score=spec.data.score.limits)


def sign(spec: Pipeline) -> SignSettings:
    """The settings of `sign`."""
    found = spec.data.dedup
    return SignSettings(ngram=found.ngram, bands=found.bands, rows=found.rows, seed=found.seed)


def match(spec: Pipeline) -> MatchSettings:
    """The settings of `match`."""
    return MatchSettings(dedup=spec.data.dedup)


def dedup(spec: Pipeline) -> DedupSettings:
    """The settings of `dedup`."""
    return DedupSettings(dedup=spec.data.dedup)


def split(spec: Pipeline) -> SplitSettings:
    """The settings of `split`."""
    found = spec.data.decontaminate
    return SplitSettings(
        split=spec.data.split, dedup=spec.data.dedup, rehearsal=_rehearsal(spec), ngram=found.ngram,
        threshold=found.threshold, min_words=found.min_words,
    )  # fmt: skip


def mix(spec: Pipeline) -> MixSettings:
    """The settings of `mix`."""
    weights = {source.name: source.weight for source in spec.data.sources}
    return MixSettings(
        weights=weights, temperature=spec.data.temperature, seed=spec.data.seed, drill=spec.data.drill,
        rehearsal=_rehearsal(spec),
    )  # fmt: skip


def tokenize(spec: Pipeline) -> TokenizeSettings:
    """The settings of `tokenize`."""
    return TokenizeSettings(learn=learn_of(spec), tokens=spec.data.tokens)


def pack(spec: Pipeline) -> PackSettings:
    """The settings of `pack`."""
    data = spec.data
    return PackSettings(
        learn=learn_of(spec), pack_length=data.pack_length, seed=data.seed, heldout=data.split.heldout,
        label_key=data.label_key, expect=data.expect, rehearsal=_rehearsal(spec),
    )  # fmt: skip


def door(spec: Pipeline, after: str) -> DoorSettings:
    """The settings of the door after a phase."""
    data = spec.data
    return DoorSettings(
        after=after, sources=tuple(source.name for source in data.sources), label_key=data.label_key,
        heldout=data.split.heldout, expect=data.expect, rehearsal=_rehearsal(spec),
    )  # fmt: skip


def learn_of(spec: Pipeline) -> Learn:
    """What the objective learns of a record; dpo and orpo read the same data."""
    objective = spec.train.objective
    return "pairs" if spec.train.of_pairs else "texts" if objective == "pretrain" else "answers"


def _rehearsal(spec: Pipeline) -> tuple[str, ...]:
    return tuple(source.name for source in spec.data.sources if source.role == "rehearsal")
