"""How the model learns: the recipe, what is tried before, what is saved, what is watched."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from refit.spec.fields import Count, Positive, Share, Spec, Uri, form


class Lora(Spec):
    """Low-rank adapters (Hu et al. 2021) on every linear layer but the head."""

    rank: Count = 16
    alpha: Positive = 32.0
    dropout: Share = 0.0


class Checkpoint(Spec):
    """When training saves, and how much it keeps. Saving overlaps training.

    Fast checkpoints hold weights only, to try them out, export them or begin another training with them (`warm_start`);
    nothing is resumed from them.
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
    # A second copy of each full checkpoint goes below this address, one folder an output; a resume looks there for
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
            "smoke_share",
            "heartbeat_seconds",
            "hang_seconds",
            "max_restarts",
            "peak_flops",
            "warm_start",  # its content counts, not its address
        }
    )
    # Of those, what a plan and a smoke run do not depend on either, or have in their names apart.
    not_in_layout: ClassVar[frozenset[str]] = frozenset(
        {
            "queue",
            "overfit",
            "early",
            "smoke_steps",
            "smoke_minutes",
            "smoke_share",
            "heartbeat_seconds",
            "hang_seconds",
            "max_restarts",
            "warm_start",
        }
    )
    # These came later: at their defaults they are left out of the fingerprint, so that what was trained before them,
    # and what is under way, keeps its name.
    came_later: ClassVar[frozenset[str]] = frozenset({"objective", "preference", "skip", "checkpoint_activations"})

    base: Uri
    # A checkpoint of another training of this base by this method, full or of weights alone: step 0 has its weights.
    # Adam's moments are empty, so the learning rate is warmed up anew, by this recipe's own `warmup_steps`.
    warm_start: Annotated[str, Field(pattern=r"^(file:///|s3://|cache://)\S+/(fast-)?step-\d+$")] | None = None
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
    # Each rank computes on a card of its own; with 0 on processors.
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
    # Keep a layer's input only and compute the layer again on the way back: less memory for another forward pass.
    checkpoint_activations: bool = False
    lora: Lora = Lora()
    # What matrices are multiplied in; trained weights and the optimizer are always float32. "auto" is bfloat16 where
    # the processor (or the card) computes in it, which is twice as fast there and many times slower elsewhere.
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    seed: int = 1
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    early: Early = Early()
    overfit: Overfit = Overfit()
    skip: Skip = Skip()
    # With a save before the last of them, and a restore: before the first step there is no optimizer to save.
    smoke_steps: Annotated[int, Field(ge=2)] = 3
    # It may take so many minutes, or, where that is more, so much of the time that the plan says the training takes.
    smoke_minutes: Positive = 10.0
    smoke_share: Annotated[float, Field(gt=0, le=1)] = 0.1
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
        if self.accumulation % (self.ranks // self.tensor_parallel):
            each = "" if self.tensor_parallel == 1 else f" / train.tensor_parallel, {self.tensor_parallel}"
            raise ValueError(
                f"train.accumulation is {self.accumulation} and train.ranks is {self.ranks}; "
                f"accumulation counts micro batches over all ranks and must be a multiple of ranks{each}"
            )
        return self

    @model_validator(mode="after")
    def _a_warm_start_is_warmed_up(self) -> Self:
        # With empty moments Adam's first steps move every weight by the whole learning rate, whatever its gradient.
        if self.warm_start is not None and self.warmup_steps == 0:
            raise ValueError(
                f"train.warm_start is {self.warm_start} and train.warmup_steps is 0; the optimizer begins empty there, "
                "and its first steps at the full rate would undo what was learnt. Set train.warmup_steps to 1 at least"
            )
        return self

    @model_validator(mode="after")
    def _each_rank_has_a_card(self) -> Self:
        if 0 < self.gpus_per_node * self.nodes < self.ranks:
            raise ValueError(
                f"train.ranks is {self.ranks}, train.gpus_per_node is {self.gpus_per_node} and train.nodes is "
                f"{self.nodes}; each rank computes on a card of its own. Lower train.ranks, or raise "
                "train.gpus_per_node, or set it to 0 to compute on processors"
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
    def _what_is_offloaded_is_not_passed_over(self) -> Self:
        if self.offload != "none" and self.skip.budget > 0:
            raise ValueError(
                f"train.skip.budget is {self.skip.budget} and train.offload is {self.offload}; a step whose gradient "
                "is on the host already cannot be passed over. Set train.skip.budget to 0, or train.offload to none"
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
