"""The data of a line: where it comes from, what is bad, what counts as the same, who is held out, how it is mixed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from refit.spec.fields import Count, Name, Positive, Share, SourceUri, Spec, Uri, form


class Source(Spec):
    """Where records come from. `columns` maps our names to theirs.

    Our names are prompt, completion, text, chosen, rejected, user, session and time.

    `uri` names a file, a folder, or by a pattern in its last part several files (`file:///in/part-*.jsonl.gz`).

    With a `query` the records are its rows and `uri` is `sql://NAME`; the database's URL is in the environment variable
    REFIT_CONNECTION_NAME and nowhere else. One statement, read only; what it returns counts, not its text or order.

    A `rehearsal` source keeps in place what a model already can: its records are trained on as they come, without the
    system prompt, have no label, and are in no exam.
    """

    name: Name
    uri: SourceUri
    query: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    format: Literal["auto", "alpaca", "sharegpt", "messages", "preference", "prompt", "text"] = "auto"
    columns: dict[str, str] = Field(default_factory=dict)
    role: Literal["task", "rehearsal"] = "task"
    weight: Annotated[float, Field(ge=0)] = 1.0
    domain: str | None = None

    @model_validator(mode="after")
    def _a_query_is_asked_of_a_database(self) -> Self:
        if self.uri.startswith("sql://") and not (self.query or "").strip():
            raise ValueError(
                f"uri is {self.uri!r}, a database, and there is no query; say which rows with query: SELECT …"
            )
        if self.query is not None and not self.uri.startswith("sql://"):
            raise ValueError(f"there is a query and uri is {self.uri!r}; a query's uri is sql://NAME, a connection")
        return self


class Rule(Spec):
    """A cleaning rule by name, with arguments that differ from its own defaults."""

    name: Name
    args: dict[str, bool | int | float | str] = Field(default_factory=dict)


class ScoreLimits(Spec):
    """What follows from a record's score.

    Quality is 0 to 1 (1: like the good samples), perplexity is a word's (low: like the good samples). With `weight:
    quality` a record weighs in the loss what its quality is, and at least the floor. Records of fewer than `min_words`
    words are too short to be judged: they stay, at full weight.
    """

    min_words: Count = 20
    drop_below_quality: Share = 0.0
    drop_above_perplexity: Positive | None = None
    weight: Literal["none", "quality"] = "none"
    weight_floor: Annotated[float, Field(gt=0, le=1)] = 0.1


class Score(ScoreLimits):
    """A fitted model's score of each record: which model (`corpus fit` makes one), and what follows from its score."""

    model: Uri | None = None

    @property
    def limits(self) -> ScoreLimits:
        """Without the model's address: its content counts, not its place."""
        return ScoreLimits.model_validate(self.model_dump(exclude={"model"}))

    @model_validator(mode="after")
    def _a_model_answers(self) -> Self:
        asked = self.drop_below_quality > 0 or self.drop_above_perplexity is not None or self.weight != "none"
        if asked and self.model is None:
            raise ValueError(
                "data.score asks for a score and data.score.model names no model; make one with `corpus fit`, "
                "or leave drop_below_quality, drop_above_perplexity and weight out"
            )
        return self


class TokenLimits(Spec):
    """How long a record may be in tokens of the model that is trained, its template counted; others are set aside."""

    min: Count = 1
    max: Count | None = None

    @model_validator(mode="after")
    def _something_is_left(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"min is {self.min} and max is {self.max}; no record is so long")
        return self


class Dedup(Spec):
    """Exact, then MinHash near duplicates verified by exact Jaccard over n-grams."""

    threshold: Annotated[float, Field(gt=0, le=1)] = form(
        0.8, title="Near-duplicate threshold", help="Two texts this similar (Jaccard over n-grams) count as one."
    )
    ngram: Annotated[int, Field(ge=1, le=13)] = 5
    bands: Count = 14
    rows: Count = 8
    seed: int = 1


class Split(Spec):
    """Which records are trained on, watched, and held out: by a stable hash of the session, so data can grow."""

    heldout: Share = 0.1
    validation: Share = 0.02
    salt: str = "refit"

    @model_validator(mode="after")
    def _leaves_something_to_train_on(self) -> Self:
        if self.heldout + self.validation >= 1:
            raise ValueError(
                f"heldout + validation is {self.heldout + self.validation:g}; leave something to train on (below 1)"
            )
        return self


class Decontaminate(Spec):
    """Evaluation sets (files, folders, patterns) of which no training record may hold a question: by shared n-grams."""

    against: tuple[Uri, ...] = ()
    ngram: Annotated[int, Field(ge=1, le=100)] = 8
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    min_words: Count = 5


class Expectations(Spec):
    """What Great Expectations asks of the records at the doors between phases, and at the door out."""

    min_records: Count = 100
    labels: tuple[str, ...] = ()
    max_label_share: Share = 0.95
    max_duplicate_share: Share = 0.9
    min_tokens: Count = 1


class Data(Spec):
    """What the model eats."""

    sources: tuple[Source, ...] = Field(min_length=1)
    system: str = ""
    label_key: str | None = None
    rules: tuple[Rule, ...] = (
        Rule(name="unicode_form"),
        Rule(name="control_characters"),
        Rule(name="length"),
        Rule(name="url_ratio"),
        Rule(name="repeats"),
    )
    score: Score = Score()
    tokens: TokenLimits = TokenLimits()
    max_records: Count | None = form(
        None, title="Records at most", help="Read no more than this of each source; empty for all."
    )
    max_bad_ratio: Share = form(
        0.05, title="Bad records tolerated", help="Above this share of quarantined records the run stops and says why."
    )
    dedup: Dedup = Dedup()
    split: Split = Split()
    decontaminate: Decontaminate = Decontaminate()
    expect: Expectations = Expectations()
    # None: sources have the shares of their weights. With a temperature their sizes count too: each has the share of
    # weight x records^(1/temperature), so that 1 mixes in proportion to size (Conneau et al. 2019).
    temperature: Annotated[float, Field(ge=1, le=1000)] | None = None
    pack_length: Annotated[int, Field(ge=16, le=1 << 20)] = 256
    seed: int = 1
    # So many tasks share the shards out between them; the result is the same. Read when the DAG is, not at the trigger.
    machines: Annotated[int, Field(ge=1, le=1000)] = 1
    drill: Literal["none", "shuffle_labels"] = "none"

    @field_validator("rules", mode="before")
    @classmethod
    def _names_stand_for_rules(cls, value: Any) -> Any:
        return (
            [{"name": item} if isinstance(item, str) else item for item in value]
            if isinstance(value, list | tuple)
            else value
        )

    @model_validator(mode="after")
    def _sources_can_be_mixed(self) -> Self:
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"sources named twice: {', '.join(twice)}; give each its own name")
        if sum(source.weight for source in self.sources) <= 0:
            raise ValueError("the weights of data.sources sum to 0; give at least one source a positive weight")
        if sum(source.weight for source in self.sources if source.role == "task") <= 0:
            raise ValueError("every source with a weight is a rehearsal; give a source of the task a positive weight")
        return self
