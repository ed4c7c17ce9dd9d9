"""The loss: packed as unpacked, in any split, and asked only where there is something to learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tickets
import torch
from conftest import House

from refit.packed import read
from refit.spec import Train
from refit.store import store_for
from trainer.batches import Batch, Loader, to_batch
from trainer.objective import Objective, adapt, build, load


@pytest.fixture(scope="module")
def base(house: House) -> Path:
    return store_for(house.base).local(house.base)


def objective(base: Path, attention: str = "eager", *, bfloat16: bool = False) -> Objective:
    return Objective(load(base, dtype=torch.float32, attention=attention).eval(), bfloat16=bfloat16)


def alone(document: tuple[list[int], list[int]]) -> Batch:
    ids, learn = (np.array([part]) for part in document)
    return to_batch(ids, np.ones_like(ids), learn)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_have_the_loss_they_have_alone(base: Path, attention: str) -> None:
    documents = tickets.documents(base, 40)
    model = objective(base, attention)
    with torch.no_grad():
        singly = sum(float(model(alone(document))) for document in documents)
        packed = float(model(to_batch(*tickets.pack(documents, tickets.LENGTH))))
    assert packed == pytest.approx(singly, rel=1e-6)


def test_any_split_of_a_batch_has_the_same_loss_and_gradient(base: Path) -> None:
    arrays = tickets.pack(tickets.documents(base, 40), tickets.LENGTH)
    results = []
    for size in (1, 2, len(arrays[0])):
        model = objective(base)
        total = 0.0
        for start in range(0, len(arrays[0]), size):
            loss = model(to_batch(*(array[start : start + size] for array in arrays)))
            loss.backward()
            total += float(loss.detach())
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((total, gradient))
    for total, gradient in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-6)
        assert torch.allclose(gradient, results[0][1], rtol=1e-4, atol=1e-4)


def test_the_head_is_asked_at_targets_only_and_answers_the_same(base: Path) -> None:
    batch = to_batch(*tickets.pack(tickets.documents(base, 20), tickets.LENGTH))
    model = objective(base)
    with torch.no_grad():
        few = model.logits(batch)
        everywhere = model.model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits
    assert few.shape == (int(batch.select.sum()), everywhere.shape[-1])
    assert torch.allclose(few, everywhere[batch.select], atol=1e-5)
    assert few.shape[0] < everywhere.shape[0] * everywhere.shape[1] / 2


def test_only_answers_are_learnt_with_the_token_that_ends_them(base: Path) -> None:
    batch = to_batch(*tickets.pack(tickets.documents(base, 8), tickets.LENGTH))
    stop = 2  # <|im_end|>
    assert int((batch.labels == stop).sum()) == 8, "EOS must be learnt once a document, also where it is the pad"
    assert len(batch.labels) == sum(sum(map(bool, learn)) for _, learn in tickets.documents(base, 8))


def test_a_batch_without_targets_has_no_loss_and_breaks_nothing(base: Path) -> None:
    tokens, segments, mask = tickets.pack(tickets.documents(base, 4), tickets.LENGTH)
    model = objective(base)
    loss = model(to_batch(tokens, segments, np.zeros_like(mask)))
    loss.backward()
    assert float(loss) == 0.0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_bfloat16_arithmetic_keeps_what_is_trained_in_float32(base: Path, method: str) -> None:
    train = Train(base="cache://models/x", method=method, dtype="bfloat16")
    model = build(base, train, dtype="bfloat16", length=tickets.LENGTH)
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    batch = to_batch(*tickets.pack(tickets.documents(base, 20), tickets.LENGTH))
    loss = model(batch)
    loss.backward()
    assert {p.dtype for p in trained} == {torch.float32}
    assert {p.dtype for p in frozen} == ({torch.bfloat16} if method == "lora" else set())
    assert loss.dtype == torch.float32
    exact = objective(base)(batch)
    assert float(loss) == pytest.approx(float(exact), rel=2e-2)


def test_lora_starts_as_the_base_and_touches_every_layer_but_the_head(base: Path) -> None:
    train = Train(base="cache://models/x", method="lora")
    torch.manual_seed(1)
    model = Objective(adapt(load(base, dtype=torch.float32, attention="eager"), train).eval(), bfloat16=False)
    batch = to_batch(*tickets.pack(tickets.documents(base, 8), tickets.LENGTH))
    with torch.no_grad():
        assert torch.allclose(model.logits(batch), objective(base).logits(batch))
    adapted = {name.split(".lora_A")[0].split(".")[-1] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_one_rank_and_two_see_the_same_samples_in_the_same_step(house: House) -> None:
    split = read(store_for(house.data).local(house.data), "train")
    train = Train(base="cache://models/x", micro_batch=3, accumulation=4)
    alone_ = Loader(split, train, rank=0, ranks=1)
    pair = [Loader(split, train, rank=rank, ranks=2) for rank in (0, 1)]
    for number in (0, 9, 33):  # over the ends of epochs too
        whole, parts = alone_.step(number), [loader.step(number) for loader in pair]
        assert all((part.packs == whole.packs).all() and part.targets == whole.targets for part in parts)
        batches = [batch for part in parts for batch in part.batches]
        dealt = [row for batch in batches for row in batch.tokens.tolist()]
        assert sorted(dealt) == sorted(split.tokens[whole.packs].tolist())
        assert sum(len(batch.labels) for batch in batches) == whole.targets


def test_steps_that_are_made_together_are_those_made_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    split = read(store_for(house.data).local(house.data), "train")
    train = Train(base="cache://models/x", micro_batch=3, accumulation=4)
    together, alone_ = (Loader(split, train, rank=1, ranks=2) for _ in range(2))
    assert together.ahead > 3
    monkeypatch.setattr(alone_, "AHEAD", 1)
    for number in (0, 1, 2, 20, 21, 5, 3 * together.ahead - 1, 3 * together.ahead):  # as after a resume, and back
        one, other = together.step(number), alone_.step(number)
        assert (one.packs == other.packs).all()
        assert (one.rank_tokens, one.rank_targets, one.weight) == (other.rank_tokens, other.rank_targets, other.weight)
        assert (one.tokens, one.targets) == (sum(one.rank_tokens), sum(one.rank_targets))
        for mine, theirs in zip(one.batches, other.batches, strict=True):
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_checkpoint_holds_nothing_that_the_base_model_holds_and_a_tied_head_once(base: Path) -> None:
    def learnt(method: str) -> list[str]:
        train = Train(base="cache://models/x", method=method)  # type: ignore[arg-type]
        objective = build(base, train, dtype="float32", length=tickets.LENGTH)
        return [name for name, parameter in objective.named_parameters() if parameter.requires_grad]

    assert learnt("lora")
    assert all("lora_" in name for name in learnt("lora"))
    assert [name for name in learnt("full") if "embed" in name or "lm_head" in name] == [
        "model.model.embed_tokens.weight"
    ]
