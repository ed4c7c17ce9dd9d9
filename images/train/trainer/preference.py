"""Preference losses: how much likelier a chosen answer is to become than a rejected one.

DPO: Rafailov et al. 2023, "Direct preference optimization", equation 7, on summed log probabilities of both answers,
minus those of a reference model; with label smoothing Mitchell 2023, "A note on DPO with noisy preferences". ORPO: Hong
et al. 2024, "ORPO: monolithic preference optimization without reference model", equations 4 to 7, on mean log
probabilities and without a reference.

A pair's loss does not depend on what it is batched with; the step's is their mean by the pairs' weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from refit.spec import Preference, Train
from trainer.batches import Batch
from trainer.objective import Objective

MEASURES = ("reward_chosen", "reward_rejected", "reward_margin", "preference_accuracy")
"""What is told of a pair beside its loss: implicit rewards, and whether the chosen answer has the higher one."""

SURE = -1e-7
"""A mean log probability above this counts as this: the odds of what is certain are infinite."""


class PreferenceObjective(Objective):
    """A causal model and its loss on preference pairs."""

    def __init__(self, model: nn.Module, train: Train, *, bfloat16: bool, at_once: bool = False) -> None:
        super().__init__(model, bfloat16=bfloat16, at_once=at_once)
        self._train = train
        self._seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, batch: Batch, answer: bool = False) -> Tensor:
        """The pairs' losses by weight, summed, in float32; with `answer`, the logits of all targets."""
        if answer:
            return self.logits(batch)
        assert batch.pairs is not None
        if self._train.objective == "orpo":
            losses, rewards = orpo(log_probabilities(self, batch), lengths(batch), self._train.pushing)
        else:  # the reference first: its logits are gone before those that the way back needs are there
            reference = batch.reference if batch.reference is not None else self._without_adapter(batch)
            losses, rewards = dpo(log_probabilities(self, batch), reference, self._train.pushing)
        self._seen.append((measured(losses.detach(), rewards.detach()), batch.pairs))
        return (losses * batch.pairs).sum().float()

    def told(self) -> dict[str, float]:
        """Of all pairs since it was last asked, the sum of each measure by weight."""
        seen, self._seen = self._seen, []
        sums = torch.zeros(len(MEASURES), dtype=torch.float64)
        for measures, weights in seen:
            sums += (weights.double() @ measures[:, 1:]).cpu()
        return dict(zip(MEASURES, sums.tolist(), strict=True))

    def judged(self) -> Tensor:
        """The pairs of the last forward pass, shape (pairs, 1 + measures): loss and measures of each; forgets them."""
        return self._seen.pop()[0]

    def _without_adapter(self, batch: Batch) -> Tensor:
        """The reference of a training of adapters is its base: the same model with them switched off."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.model.disable_adapter():  # type: ignore[operator]
                return log_probabilities(self, batch)
        finally:
            self.model.train(training)


def log_probabilities(objective: Objective, batch: Batch) -> Tensor:
    """The log probability of each pair's answers, summed over their tokens, shape (pairs, 2), in float64.

    What counts are differences of such sums: in float32 a sum of 500 is known to 3e-5 only.
    """
    assert batch.pairs is not None
    assert batch.sides is not None
    nll = functional.cross_entropy(objective.logits(batch), batch.labels, reduction="none").double()
    sums = nll.new_zeros(2 * len(batch.pairs)).index_add(0, batch.sides, nll)
    return -sums.view(-1, 2)


def lengths(batch: Batch) -> Tensor:
    """How many tokens each pair's answers have, shape (pairs, 2)."""
    assert batch.pairs is not None
    assert batch.sides is not None
    return torch.bincount(batch.sides, minlength=2 * len(batch.pairs)).view(-1, 2).clamp(min=1)


def dpo(policy: Tensor, reference: Tensor, settings: Preference) -> tuple[Tensor, Tensor]:
    """Losses, shape (pairs,), and rewards, shape (pairs, 2), from summed log probabilities of shape (pairs, 2)."""
    rewards = settings.beta * (policy - reference)
    margin = rewards[:, 0] - rewards[:, 1]
    smoothing = settings.label_smoothing
    losses = -(1 - smoothing) * functional.logsigmoid(margin)
    if smoothing:
        losses = losses - smoothing * functional.logsigmoid(-margin)
    return losses, rewards


def orpo(policy: Tensor, tokens: Tensor, settings: Preference) -> tuple[Tensor, Tensor]:
    """Losses and rewards, as `dpo`; `tokens` are the answers' lengths."""
    means = policy / tokens
    sure = means.clamp(max=SURE)
    odds = sure - _log_1_minus_exp(sure)
    losses = -means[:, 0] - settings.beta * functional.logsigmoid(odds[:, 0] - odds[:, 1])
    return losses, settings.beta * means


def measured(losses: Tensor, rewards: Tensor) -> Tensor:
    """Loss and measures of each pair, shape (pairs, 1 + measures)."""
    margin = rewards[:, 0] - rewards[:, 1]
    return torch.stack([losses, rewards[:, 0], rewards[:, 1], margin, (margin > 0).to(losses.dtype)], dim=1)


def _log_1_minus_exp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, exact near 0 and far from it.

    Source: Mächler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    near = x > -math.log(2)
    # Each branch is fed what it can bear: where() passes NaN on from the gradient of the branch that is not taken.
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )
