"""Weights in the loss: a target counts what its mask says, over a whole step, and 255 of 255 counts as ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tickets
import torch
from conftest import House
from torch.nn import functional

from refit import packed
from refit.packed import WHOLE
from refit.spec import Train
from refit.store import store_for
from trainer.batches import Loader, to_batch
from trainer.objective import Objective, load

STEP = Train(base="cache://models/x", micro_batch=2, accumulation=2)
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def base(house: House) -> Path:
    return store_for(house.base).local(house.base)


@pytest.fixture(scope="module")
def uneven(house: House) -> House:
    """The house with a dataset in which the answers weigh differently, from a twentieth to all."""
    uri = house.uri("uneven")
    tickets.dataset(uri, store_for(house.base).local(house.base), weights=(51, 255, 128, 99, 255, 13, 200))
    return replace(house, data=uri)


def objective(base: Path) -> Objective:
    return Objective(load(base, dtype=torch.float32, attention="eager").eval(), bfloat16=False)


def by_hand(model: Objective, arrays: Arrays) -> torch.Tensor:
    """The weighted mean over all targets, in float64, token by token."""
    tokens, _, mask = arrays
    batch = to_batch(*arrays)
    logits = model.model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits.double()
    surprise = -logits.log_softmax(-1)
    parts, weight = [], 0.0
    for pack, place in zip(*np.nonzero(mask), strict=True):
        share = mask[pack, place] / 255
        parts.append(share * surprise[pack, place - 1, tokens[pack, place]])
        weight += share
    return torch.stack(parts).sum() / weight


def gradient(model: Objective) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def arrays_of(split: packed.Packed, packs: np.ndarray) -> Arrays:
    return split.tokens[packs], split.segments[packs], split.mask[packs]


def test_where_every_weight_is_whole_the_loss_is_exactly_the_plain_sum(base: Path) -> None:
    batch = to_batch(*tickets.pack(tickets.documents(base, 20), tickets.LENGTH))
    assert batch.weights is None
    model, twin = objective(base), objective(base)
    loss = model(batch)
    plain = functional.cross_entropy(twin.logits(batch), batch.labels, reduction="sum")
    loss.backward()
    plain.backward()
    assert torch.equal(loss, plain)
    assert torch.equal(gradient(model), gradient(twin))


def test_weights_of_one_are_exactly_one() -> None:
    ids = np.array([[1, 2, 3, 4]])
    batch = to_batch(ids, np.ones_like(ids), np.array([[0, WHOLE, 51, 1]], np.uint8))
    assert batch.weights is not None
    assert batch.weights.dtype == torch.float32
    assert batch.weights.tolist() == pytest.approx([1.0, 0.2, 1 / 255])
    assert float(batch.weights[0]) == 1.0


def test_two_unequal_micro_batches_have_the_weighted_mean_of_all_their_targets(base: Path, uneven: House) -> None:
    split = packed.read(store_for(uneven.data).local(uneven.data), "train")
    loader = Loader(split, STEP, rank=0, ranks=1)
    step = loader.step(0)
    own = [split.mask[packs].sum() / 255 for packs in step.packs.reshape(STEP.accumulation, -1)]
    assert own[0] != own[1]
    assert step.weight == pytest.approx(sum(own), rel=1e-12)
    assert step.targets == (split.mask[step.packs] > 0).sum() > step.weight
    model, twin = objective(base), objective(base)
    total = 0.0
    for batch in step.batches:
        loss = model(batch) / step.weight
        loss.backward()
        total += float(loss.detach())
    expected = by_hand(twin, arrays_of(split, step.packs))
    expected.backward()
    assert total == pytest.approx(float(expected.detach()), rel=1e-6)
    assert torch.allclose(gradient(model), gradient(twin), rtol=1e-4, atol=1e-6)


def test_an_answer_that_weighs_next_to_nothing_moves_next_to_nothing(base: Path) -> None:
    documents = tickets.documents(base, 8)
    (ids, learn), others = documents[0], documents[1:]
    gradients = {}
    for value in (0, 1, WHOLE):
        arrays = tickets.pack([(ids, [value if one else 0 for one in learn]), *others], tickets.LENGTH)
        model = objective(base)
        (model(to_batch(*arrays)) / (arrays[2].sum() / WHOLE)).backward()
        gradients[value] = gradient(model)
    whole = (gradients[WHOLE] - gradients[0]).norm()
    assert whole > 0
    assert (gradients[1] - gradients[0]).norm() < whole / 100


def test_a_step_without_targets_divides_by_one(tmp_path: Path) -> None:
    tokens = np.ones((4, 8), np.int64)
    packed.write(
        tmp_path, "train", tokens=tokens, segments=tokens, mask=tokens * 0, vocabulary="v", vocabulary_size=9, samples=4
    )
    step = Loader(packed.read(tmp_path, "train"), STEP, rank=0, ranks=1).step(0)
    assert (step.targets, step.weight) == (0, 1.0)


@pytest.mark.integration
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (2, 3)])
def test_training_divides_by_the_weight_of_the_step_on_any_number_of_ranks(
    base: Path, uneven: House, ranks: int, stage: int
) -> None:
    name = f"uneven-{ranks}-{stage}"
    sets = ("train.max_steps=2", "train.warmup_steps=1", f"train.zero_stage={stage}", "train.dtype=float32")
    uneven.train(name, ranks=ranks, sets=sets)
    split = packed.read(store_for(uneven.data).local(uneven.data), "train")
    step = Loader(split, STEP, rank=0, ranks=1).step(0)
    model = objective(base)
    expected = by_hand(model, arrays_of(split, step.packs))
    expected.backward()
    first = uneven.metrics(name)[0]
    assert first["loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    assert first["grad_norm"] == pytest.approx(float(gradient(model).norm()), rel=1e-4)
    assert (first["tokens"], first["targets"]) == (step.tokens, step.targets)
