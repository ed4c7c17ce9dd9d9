"""Every setting of a business line: type, default, bounds, unit, and the sentence a person reads in the form.

This is their only home. The trigger form, the check of a YAML file, `--set` and the documentation are derived from it
(`refit.form`, `refit.pipeline`). A field made with `form(…)` is one of the dozen that people change; the rest is
reached by the form's `overrides` object or by `--set`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,47}$")]
Uri = Annotated[str, Field(pattern=r"^(file:///|s3://|cache://)\S+$")]
SourceUri = Annotated[str, Field(pattern=r"^((file:///|s3://|cache://)\S+|sql://[a-z][a-z0-9_]{0,47})$")]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Spec(BaseModel):
    """A group of settings: closed (an unknown name is an error), frozen, and free of NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


def form(default: Any = ..., *, title: str, help: str, unit: str | None = None) -> Any:
    """A field that the trigger form shows."""
    shown: dict[str, Any] = {"form": True, **({"unit": unit} if unit else {})}
    return Field(default, title=title, description=help, json_schema_extra=shown)


# ------------------------------------------------------------------------------------------------------------ data


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
    columns: dict[str, str] = {}
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
    args: dict[str, bool | int | float | str] = {}


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


# -------------------------------------------------------------------------------------------------------- training


class Lora(Spec):
    """Low-rank adapters (Hu et al. 2021) on every linear layer but the head."""

    rank: Count = 16
    alpha: Positive = 32.0
    dropout: Share = 0.0


class Checkpoint(Spec):
    """When training saves, and how much it keeps. Saving overlaps training.

    Fast checkpoints hold weights only, to try them out or export them; nothing is resumed from them.
    """

    every_steps: Count | None = None
    every_minutes: Positive = form(
        30.0, title="Checkpoint every", unit="minutes", help="At most this much work is lost when a machine dies."
    )
    keep_last: Count = 3
    fast_every_steps: Count | None = None
    fast_every_minutes: Positive | None = None
    keep_fast: Count = 2
    # Saves that fail one after the other (a full disk, say) before training ends for it.
    max_failures: Count = 3
    # A second copy of each full checkpoint goes below this address, one folder a training; a resume looks there for
    # what is newer or whole. It is written by the same thread, and no save begins meanwhile.
    copy_to: Uri | None = None
    # From SIGTERM to SIGKILL; a pod gets as much.
    grace_seconds: Positive = 120.0


class Validation(Spec):
    """The loss on the validation split while training goes on. The checkpoint of the lowest one is kept.

    With `patience` training ends after so many looks without a lower loss. `publish: best` publishes the weights of the
    lowest loss instead of the last ones.
    """

    every_steps: Count | None = None
    patience: Count | None = None
    publish: Literal["last", "best"] = "last"

    @model_validator(mode="after")
    def _somebody_looks(self) -> Self:
        if self.every_steps is None and (self.patience is not None or self.publish == "best"):
            raise ValueError(
                "train.validation has patience or publish: best, and no every_steps: nobody looks; set every_steps"
            )
        return self


class Overfit(Spec):
    """A handful learnt by heart before the training: what cannot learn one micro batch will not learn the rest.

    It takes at most `steps` steps and `minutes` minutes, and at most `share` of the micro batches of the training that
    it is for; 0 steps leave it out. A loss above `loss` after all `steps` is refused. Where the time or the share was
    over before, nothing is refused: so short a training is cheaper to run than to doubt.
    """

    steps: Annotated[int, Field(ge=0)] = 300
    loss: Positive = 0.2
    minutes: Positive = 10.0
    share: Annotated[float, Field(gt=0, le=1)] = 0.1


class Early(Spec):
    """A look at a checkpoint from outside while the training goes on; off without `at_step`.

    The first full checkpoint at or after that step and the base model answer the same documents of the validation
    split, some `items` of them. Where the checkpoint's mean loss is higher by more than `margin` (nats a token)
    for certain, by the paired interval at `confidence`, the training is stopped and the run refused.
    """

    at_step: Count | None = None
    items: Annotated[int, Field(ge=20)] = 300
    margin: Annotated[float, Field(ge=0)] = 0.0
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95


class Skip(Spec):
    """Steps that may be passed over because their loss or gradient is not finite. Each leaves its scene, and no trace.

    With a `budget` of 0 the first one ends the training as diverged. So does one more than `budget` in all, or one more
    than `in_a_row` without a good step between them.
    """

    budget: Annotated[int, Field(ge=0, le=100_000)] = 0
    in_a_row: Count = 3


Objective = Literal["sft", "dpo", "orpo", "pretrain"]
OF_PAIRS: tuple[Objective, ...] = ("dpo", "orpo")
"""What is trained on preference pairs; everything else sees of a pair its chosen answer."""


class Preference(Spec):
    """How much a pair's two answers are pushed apart.

    `beta` is DPO's (Rafailov et al. 2023: how dear it is to leave the reference model) or ORPO's weight of the odds
    ratio (Hong et al. 2024, lambda there). With `label_smoothing`, DPO takes so many pairs to be the wrong way round
    (Mitchell 2023).
    """

    beta: Annotated[float, Field(gt=0, le=100)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0


class Train(Spec):
    """How the model learns, and from what.

    `objective` says what a record is to training. sft: a conversation whose answers are learnt (of a preference pair
    the chosen one). dpo, orpo: a pair of answers, of which one is to become likelier than the other. pretrain: a plain
    text, of which every token is learnt.

    One optimizer step sees `micro_batch` x `accumulation` packed sequences, whatever the number of ranks: the ranks
    share the micro batches out, so the recipe (and the output's name) does not change with the machines.
    """

    # These move work around; they do not change what comes out.
    not_in_fingerprint: ClassVar[frozenset[str]] = frozenset(
        {
            "ranks",
            "nodes",
            "gpus_per_node",
            "queue",
            "engine",
            "tensor_parallel",
            "offload",
            "checkpoint",
            "overfit",
            "early",
            "smoke_steps",
            "smoke_minutes",
            "heartbeat_seconds",
            "hang_seconds",
            "max_restarts",
            "peak_flops",
        }
    )
    # These came later: at their defaults they are left out of the fingerprint, so that what was trained before them,
    # and what is under way, keeps its name.
    came_later: ClassVar[frozenset[str]] = frozenset({"objective", "preference", "skip"})

    base: Uri
    objective: Objective = "sft"
    preference: Preference | None = None
    method: Literal["full", "lora", "qlora"] = form(
        "lora",
        title="Method",
        help="LoRA trains small adapters, QLoRA on a base in 4 bits (on cards); full trains every weight.",
    )
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)] = form(100, title="Steps", help="Optimizer steps.")
    learning_rate: Annotated[float, Field(gt=0, le=1)] = form(
        2e-4, title="Learning rate", help="The peak, after warm-up."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta1: Share = 0.9
    beta2: Share = 0.95
    clip: Positive = 1.0
    micro_batch: Count = form(
        4, title="Micro batch", unit="sequences", help="Packed sequences that go through the model at once."
    )
    accumulation: Count = 1
    ranks: Count = 1
    nodes: Count = 1
    gpus_per_node: Annotated[int, Field(ge=0, le=16)] = 0
    queue: str = "default"
    # "plain" is one process with torch alone, for small jobs: the same steps, to the bit, and no DeepSpeed to start.
    # "auto" is plain where there is one rank on a processor and nothing to share out.
    engine: Literal["auto", "deepspeed", "plain"] = "auto"
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    # What leaves the cards for the host's memory and comes when it is needed (ZeRO-Offload): the optimizer at ZeRO 1 to
    # 3, or the weights too at 3. Slower, and for what does not fit otherwise.
    offload: Literal["none", "optimizer", "all"] = "none"
    # So many ranks hold each matrix together and see the same packs; with ZeRO 1 or 2 among the groups of them.
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    lora: Lora = Lora()
    # What matrices are multiplied in; trained weights and the optimizer are always float32. "auto" is bfloat16 where
    # the processor computes in it, which is twice as fast there and many times slower elsewhere.
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    seed: int = 1
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    early: Early = Early()
    overfit: Overfit = Overfit()
    skip: Skip = Skip()
    smoke_steps: Count = 3
    smoke_minutes: Positive = 10.0
    heartbeat_seconds: Positive = 2.0
    # A rank that is silent for so long is taken for hung; a step that is known to take longer counts tenfold.
    hang_seconds: Positive = 120.0
    max_restarts: Annotated[int, Field(ge=0)] = 3
    # FLOP/s that a rank's device could do at best. With it each step's record has the share that is used (MFU).
    peak_flops: Positive | None = None

    @model_validator(mode="after")
    def _ranks_share_the_batch(self) -> Self:
        if self.ranks % self.tensor_parallel:
            raise ValueError(
                f"train.ranks is {self.ranks} and train.tensor_parallel is {self.tensor_parallel}; ranks must be a "
                "multiple of it"
            )
        if self.tensor_parallel > 1 and self.accumulation % (self.ranks // self.tensor_parallel) == 0:
            return self
        if self.accumulation % self.ranks:
            raise ValueError(
                f"train.accumulation is {self.accumulation} and train.ranks is {self.ranks}; "
                "accumulation counts micro batches over all ranks and must be a multiple of ranks"
            )
        return self

    @model_validator(mode="after")
    def _matrices_are_cut_where_they_learn(self) -> Self:
        if self.tensor_parallel > 1 and (self.method != "full" or self.zero_stage not in (1, 2)):
            raise ValueError(
                f"train.tensor_parallel is {self.tensor_parallel} with train.method {self.method} and train.zero_stage "
                f"{self.zero_stage}; it goes with method full and zero_stage 1 or 2. For LoRA use zero_stage 3"
            )
        return self

    @model_validator(mode="after")
    def _what_is_shared_out_may_be_offloaded(self) -> Self:
        least = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        if self.zero_stage < least:
            raise ValueError(
                f"train.offload is {self.offload} and train.zero_stage is {self.zero_stage}; offloading is ZeRO's, and "
                f"this needs zero_stage {least} at least"
            )
        return self

    @model_validator(mode="after")
    def _four_bits_are_not_shared_out(self) -> Self:
        if self.method == "qlora" and self.zero_stage == 3:
            raise ValueError(
                "train.method is qlora and train.zero_stage is 3; weights in 4 bits are not shared out. Set "
                "train.zero_stage to 2 at most"
            )
        return self

    @model_validator(mode="after")
    def _a_plain_engine_is_alone(self) -> Self:
        if self.engine == "plain" and (self.ranks > 1 or self.zero_stage > 0):
            raise ValueError(
                f"train.engine is plain, train.ranks is {self.ranks} and train.zero_stage is {self.zero_stage}; plain "
                "is one process that shares nothing out. Set train.engine to deepspeed, or ranks to 1 and zero_stage "
                "to 0"
            )
        return self

    @model_validator(mode="after")
    def _a_preference_is_of_pairs(self) -> Self:
        if self.preference is None:
            return self
        if self.objective not in OF_PAIRS:
            raise ValueError(
                f"train.preference is set and train.objective is {self.objective}; leave it out, or set "
                "train.objective to dpo or orpo"
            )
        if self.objective == "orpo" and self.preference.label_smoothing:
            raise ValueError(
                f"train.preference.label_smoothing is {self.preference.label_smoothing:g} and train.objective is orpo, "
                "which has none; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _pairs_are_looked_at_as_pairs(self) -> Self:
        if self.of_pairs and self.early.at_step is not None:
            raise ValueError(
                f"train.early.at_step is {self.early.at_step} and train.objective is {self.objective}; the early look "
                "is at answers. Leave it out, and set train.validation, which looks at pairs"
            )
        if self.of_pairs and self.tensor_parallel > 1:
            raise ValueError(
                f"train.tensor_parallel is {self.tensor_parallel} and train.objective is {self.objective}; pairs are "
                "trained with whole matrices. Set train.tensor_parallel to 1 and train.zero_stage to 3"
            )
        return self

    @property
    def of_pairs(self) -> bool:
        """Whether what is learnt from is preference pairs."""
        return self.objective in OF_PAIRS

    @property
    def pushing(self) -> Preference:
        """`preference`, with its defaults where it is left out."""
        return self.preference or Preference()


# ------------------------------------------------------------------------------------------------ evaluation, gate


class Sampling(Spec):
    """Every parameter is sent with every request: what the engine would default to comes from the model's own files."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Share = 0.0
    max_tokens: Count = 32
    repetition_penalty: Positive = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 1


class Gate(Spec):
    """What a candidate must show. Three verdicts: pass, fail, hold; no data is never a pass."""

    min_items: Count = 100
    min_gain: float = form(
        0.0, title="Gain needed", help="The lower end of the interval of candidate minus champion must be above this."
    )
    max_general_loss: Share = 0.1
    min_valid: Share = 0.5
    force: bool = form(
        False,
        title="Drill: ignore the gate",
        help="Lets a candidate through whatever the gate says; it is written down.",
    )


class Evaluate(Spec):
    """The exam: held-out business items and a small general set, both models, in the form they are served in."""

    not_in_fingerprint: ClassVar[frozenset[str]] = frozenset({"gate", "concurrency"})

    max_items: Count = form(300, title="Items", help="Held-out items asked of both models, chosen by a stable hash.")
    labels: tuple[str, ...] = ()
    label_key: str | None = None
    general: bool = True
    sampling: Sampling = Sampling()
    concurrency: Count = 8
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    gate: Gate = Gate()


# ------------------------------------------------------------------------------------------------ promotion, rollout


class FirstChampion(Spec):
    """What there is to beat before the first run: the base model as it is, or one trained for a few steps."""

    kind: Literal["base", "trained"] = "base"
    max_steps: Count = 30


class Promote(Spec):
    """Registration in MLflow, and who says yes."""

    approval: bool = form(
        False, title="Ask a person", help="Wait for an approval in the UI before any user sees the candidate."
    )
    approval_hours: Positive = 24.0
    first_champion: FirstChampion = FirstChampion()


class Serve(Spec):
    """The serving profile: part of the release, since it is part of what users get."""

    engine: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    max_model_len: Count = 512
    max_num_seqs: Count = 16
    kv_cache_gib: Count = 1
    prefix_caching: bool = True
    eager: bool = True


class Rollout(Spec):
    """How a candidate meets users: shadow first, then these shares, each with a verdict.

    The margins are absolute (0.05 is five points). A step passes when the candidate is proven not worse than the
    champion by more than the margin; it goes back when harm is proven, or at the deadline.
    """

    steps: tuple[Annotated[int, Field(ge=1, le=100)], ...] = form(
        (5, 20, 50, 100), title="Shares", unit="%", help="Share of users at each step, rising, ending in 100."
    )
    shadow_pairs: Annotated[int, Field(ge=0)] = 30
    min_events: Count = form(40, title="Events a side", help="Feedback events each side needs before a verdict.")
    min_seconds: Annotated[float, Field(ge=0)] = 15.0
    deadline_minutes: Positive = form(
        30.0, title="Deadline of a step", unit="minutes", help="No verdict by then: back to the champion."
    )
    margin: Annotated[float, Field(gt=0, le=1)] = 0.05
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    max_error_rate: Share = 0.05
    max_latency_ratio: Positive = 3.0
    stale_seconds: Positive = 60.0
    keep_warm_minutes: Annotated[float, Field(ge=0)] = 10.0

    @field_validator("steps")
    @classmethod
    def _steps_rise_to_all(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if not steps or list(steps) != sorted(set(steps)) or steps[-1] != 100:
            raise ValueError(f"steps are {list(steps)}; they must rise and end in 100, as in [5, 20, 50, 100]")
        if len(steps) == 1:
            raise ValueError("steps are [100]; a share below 100 comes first, or nobody is left to compare with")
        return steps


# ------------------------------------------------------------------------------------------------------- the line


class Pipeline(Spec):
    """A business line: one file in dags/pipelines/."""

    name: Name
    title: str
    description: str = ""
    team: Name
    owner: str
    schedule: str | None = None
    on_new_data: bool = True
    timeout_hours: Positive = 24.0
    data: Data
    train: Train
    evaluate: Evaluate = Evaluate()
    promote: Promote = Promote()
    serve: Serve = Serve()
    rollout: Rollout = Rollout()

    @model_validator(mode="after")
    def _sources_suit_the_objective(self) -> Self:
        objective = self.train.objective
        if objective == "sft":
            return self
        kind, what = ("text", "plain texts") if objective == "pretrain" else ("preference", "preference pairs")
        wrong = [f"{one.name} ({one.format})" for one in self.data.sources if one.format not in (kind, "auto")]
        if wrong:
            raise ValueError(
                f"train.objective is {objective}, which learns from {what}, and these sources hold something else: "
                f"{', '.join(wrong)}; give a source of format: {kind}, or set train.objective to sft"
            )
        return self
