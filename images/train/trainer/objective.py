"""The model as training sees it: packed tokens in, the summed loss of their targets out."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from refit import log
from refit.errors import BadInput
from refit.spec import Train
from trainer import apart, quantized, randomness
from trainer.batches import Batch

EAGER_LENGTH = 512
"""Up to this pack length plain matrix products beat torch's fused attention on a CPU, which is slow with a mask. On a
card they never do."""


class Objective(nn.Module):
    """A causal model and its loss.

    Documents of a pack do not see each other: positions start at 0 in each, and transformers builds the mask from
    that, as long as no cache is used. A model for which that does not hold is given a document a row (`apart`), in runs
    of at most twice the batch's places, unless it is to be called `at_once`. The head is only asked at the targets:
    with a vocabulary of 49,152 and one token in six to learn, that saves a fifth of all arithmetic.
    """

    def __init__(self, model: nn.Module, *, bfloat16: bool, at_once: bool = False) -> None:
        super().__init__()
        self.model = model
        self._bfloat16, self._at_once = bfloat16, at_once
        self._select: Tensor | None = None
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        # Weakly: a model that holds its objective would not go when that is forgotten.
        targets = weakref.WeakMethod(self._only_targets)
        head.register_forward_pre_hook(lambda head, inputs: found(head, inputs) if (found := targets()) else None)
        self._packs = self._sees_apart(len(head.weight), head.weight.device)

    def forward(self, batch: Batch, answer: bool = False) -> Tensor:
        """Negative log likelihood by weight, summed over the batch's targets, in float32; with `answer`, their logits.

        The weights are the training data's. Who judges a model by its loss takes `logits`: there each target is one.
        """
        logits = self.logits(batch)
        if answer:
            return logits
        if batch.weights is None:  # the sum in one kernel: another order of adding up would be other last bits
            return functional.cross_entropy(logits, batch.labels, reduction="sum")
        return (functional.cross_entropy(logits, batch.labels, reduction="none") * batch.weights).sum()

    def told(self) -> dict[str, float]:
        """What there is to tell of a step beside its loss: sums by weight, which the step's weight divides."""
        return {}

    def logits(self, batch: Batch) -> Tensor:
        """Float32 logits at the batch's targets, shape (targets, vocabulary)."""
        if self._packs or not batch.select.any():
            return self._ask(batch.tokens, batch.positions, batch.select)
        places = None if self._at_once else 2 * batch.tokens.numel()
        return torch.cat([self._ask(*run) for run in apart.rows(batch, places)])

    def _ask(self, tokens: Tensor, positions: Tensor, select: Tensor | None) -> Tensor:
        self._select = select
        try:
            # Autocast belongs inside: DeepSpeed switches off what is switched on around its engine.
            with self._arithmetic(tokens.device.type):
                out = self.model(input_ids=tokens, position_ids=positions, use_cache=False)
        finally:
            self._select = None
        return out.logits.float()  # type: ignore[no-any-return]

    def _sees_apart(self, vocabulary: int, device: torch.device) -> bool:
        training = self.model.training
        self.model.eval()
        try:
            ask = partial(self._ask, select=None)
            if sees := apart.sees_apart(ask, vocabulary, device, coarse=self._is_coarse()):
                return sees
        finally:
            self.model.train(training)
        log.event("a_document_a_row", model=type(self.model).__name__, why="it reads across the documents of a pack")
        return False

    def _is_coarse(self) -> bool:
        """Whether it rounds as bfloat16 does: weights in 4 bits are multiplied in it, whatever else is."""
        return self._bfloat16 or any(parameter.dtype != torch.float32 for parameter in self.model.parameters())

    def _only_targets(self, _head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if self._select is None else (inputs[0][self._select],)

    def _arithmetic(self, kind: str) -> AbstractContextManager[Any]:
        return torch.autocast(kind, torch.bfloat16) if self._bfloat16 else nullcontext()


def build(base: Path, train: Train, *, dtype: str, length: int) -> Objective:
    """The objective of a recipe on a base model, the same on every rank."""
    randomness.begin(train.seed)
    attention = attention_for(length, card=train.gpus_per_node > 0)
    if train.method == "qlora":
        quantized.check(train)
        model = quantized.load(base, attention=attention)
    else:
        model = load(base, dtype=_resident(train, dtype), attention=attention)
    if train.method != "full":
        model = adapt(model, train)
    if train.checkpoint_activations:
        forget_activations(model)
    model.train()
    # Ranks that share each weight out ask for it together: as often as each other, whatever their documents.
    at_once = train.zero_stage == 3
    if train.of_pairs:
        from trainer.preference import PreferenceObjective  # which is made of this module

        return PreferenceObjective(model, train, bfloat16=dtype == "bfloat16", at_once=at_once)
    return Objective(model, bfloat16=dtype == "bfloat16", at_once=at_once)


def load(base: Path, *, dtype: torch.dtype, attention: str) -> nn.Module:
    """A causal model from a committed folder; safetensors only, and nothing of the folder is executed."""

    def read(attention: str) -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            base, dtype=dtype, attn_implementation=attention, local_files_only=True, use_safetensors=True
        )
        return model

    try:
        return read(attention)
    except ValueError as error:  # some architectures have been written with plain products alone
        if attention == "eager" or "attention implementation" not in str(error):
            raise
        return read("eager")


def adapt(model: nn.Module, train: Train) -> nn.Module:
    """The model with fresh LoRA adapters (float32) on every linear layer but the head.

    Raises:
        BadInput: peft lays none on such a model (Mamba's, say).
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    lora = train.lora
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout,  # type: ignore[arg-type]
        target_modules="all-linear", task_type="CAUSAL_LM",
    )  # fmt: skip
    try:
        adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        raise BadInput(
            f"train.method is {train.method}: no adapters can be laid on {type(model).__name__}: {error} Set "
            "train.method to full."
        ) from error
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            # Autocast does it; peft would copy every input there and back.
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]
    return adapted


def forget_activations(model: nn.Module) -> None:
    """Have each layer keep its input only, and be computed again on the way back.

    Raises:
        BadInput: this kind of model cannot.
    """
    try:
        # Not the reentrant way, which wants an input with a gradient; adapters on a frozen base have none.
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    except ValueError as error:
        raise BadInput(
            f"train.checkpoint_activations is true, and {type(model).__name__} cannot compute its layers again: "
            f"{error} Set it to false."
        ) from error


def attention_for(length: int, *, card: bool = False) -> str:
    """The implementation of attention for a pack length."""
    return "eager" if length <= EAGER_LENGTH and not card else "sdpa"


def _resident(train: Train, dtype: str) -> torch.dtype:
    # Weights that are trained are kept in float32: a small step would be rounded away in bfloat16. Frozen ones need
    # not be; ZeRO 3 partitions weights of one type only.
    frozen = train.method == "lora" and train.zero_stage < 3
    return torch.bfloat16 if dtype == "bfloat16" and frozen else torch.float32
