"""Training by preference: the papers' losses, the same on any ranks; what is published prefers the chosen answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tickets
import torch
import yaml
from conftest import House
from tokenizers import Tokenizer
from torch import Tensor

from refit import domains, packed
from refit.errors import BadInput
from refit.fingerprint import file_digest
from refit.manifest import Manifest
from refit.packed import WHOLE
from refit.spec import Preference, Train
from refit.store import store_for
from trainer import preference, reference
from trainer.batches import Batch
from trainer.inputs import train_split, validation_split
from trainer.objective import Objective, build, load
from trainer.pairs import PairLoader, to_pairs
from trainer.preference import PreferenceObjective, log_probabilities

Document = tuple[list[int], list[int]]
KINDS = ("good", "poor")


@pytest.fixture(scope="module")
def base(house: House) -> Path:
    return store_for(house.base).local(house.base)


def documents(base: Path, count: int, seed: int, weights: tuple[int, ...] = (WHOLE,)) -> list[Document]:
    """Both sides of pairs, one after the other: of a ticket the short answer is preferred to the talkative one."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    draw = random.Random(seed)
    out = []
    for number, (text, answer) in enumerate(tickets.tickets(count, seed)):
        ask = tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids
        intent = json.loads(answer)["intent"]
        for reply in (answer, f"{intent} {draw.choice(('I think', 'maybe', 'who knows'))}"):
            ids = tokenizer.encode(f"{reply}<|im_end|>").ids
            out.append((ask + ids, [0] * len(ask) + [weights[number % len(weights)]] * len(ids)))
    return out


def pack(docs: list[Document], length: int = tickets.LENGTH) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs into packs, both sides of each in one."""
    glued = [(left[0] + right[0], left[1] + right[1]) for left, right in zip(docs[::2], docs[1::2], strict=True)]
    tokens, segments, mask = tickets.pack(glued, length)
    firsts = iter([len(ids) for ids, _ in docs[::2]])
    for row in range(len(segments)):
        for number in range(segments[row].max(), 0, -1):
            segments[row][segments[row] == number] = 2 * number
        for number in range(2, segments[row].max() + 1, 2):
            start = int(np.argmax(segments[row] == number))
            segments[row, start : start + next(firsts)] = number - 1
    return tokens, segments, mask


def commit(uri: str, base: Path, weights: tuple[int, ...] = (WHOLE,), times: int = 1) -> str:
    """A dataset of pairs, as the data stage leaves it; the same ones so many times."""
    with store_for(uri).publish(uri) as draft:
        for split, number, seed in (("train", 120, 1), ("validation", 24, 2)):
            arrays = pack(documents(base, number, seed, weights))
            tokens, segments, mask = (np.tile(array, (times, 1)) for array in arrays)
            packed.write(
                draft.path, split, tokens=tokens, segments=segments, mask=mask, samples=2 * number * times, pairs=True,
                vocabulary=file_digest(base / "tokenizer.json"), vocabulary_size=int(tokens.max()) + 1,
            )  # fmt: skip
            packs = np.repeat(np.arange(len(segments)), segments.max(axis=1))
            domains.write(
                draft.path, split, [KINDS[row // 2 % 2] for row in range(2 * number * times)], packs, len(segments)
            )
        draft.commit(Manifest(kind="dataset", fingerprint="pairs"))
    return uri


@pytest.fixture(scope="module")
def pairs(house: House, base: Path) -> House:
    """The house with a dataset of pairs instead of tickets."""
    return House(house.root, of_format(house, "preference"), house.base, commit(house.uri("preference/data"), base))


def of_format(house: House, format: str) -> Path:
    """The house's spec, its source being of a format, of which nothing is held out."""
    spec = yaml.safe_load(house.spec.read_text())
    spec["data"]["sources"][0]["format"] = format
    spec["data"]["split"] = {"heldout": 0}
    path = house.root / f"tickets-{format}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def objective(base: Path, name: str = "dpo", **more: Any) -> PreferenceObjective:
    train = Train.model_validate({"base": "cache://m/x", "method": "full", "objective": name, **more})
    return PreferenceObjective(load(base, dtype=torch.float32, attention="eager").eval(), train, bfloat16=False)


def plainly(model: Any, document: Document) -> tuple[Tensor, int]:
    """The log probability of a document's answer, alone and unpacked, and how many tokens it has."""
    ids, learnt = torch.tensor([document[0]]), torch.tensor(document[1][1:]) > 0
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
    said = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return said[learnt].sum(), int(learnt.sum())


def plain_loss(model: Any, frozen: Any, docs: list[Document], name: str, settings: Preference) -> Tensor:
    """The sum of the pairs' losses, as the papers write them."""
    losses = []
    for left, right in zip(docs[::2], docs[1::2], strict=True):
        (won, of_won), (lost, of_lost) = plainly(model, left), plainly(model, right)
        if name == "dpo":
            with torch.no_grad():
                before = plainly(frozen, left)[0] - plainly(frozen, right)[0]
            sure = torch.sigmoid(settings.beta * (won - lost - before))
            smoothing = settings.label_smoothing
            loss = -(1 - smoothing) * torch.log(sure) - smoothing * torch.log(1 - sure)
        else:
            likely, unlikely = torch.exp(won / of_won), torch.exp(lost / of_lost)
            ratio = (likely / (1 - likely)) / (unlikely / (1 - unlikely))
            loss = -won / of_won - settings.beta * torch.log(torch.sigmoid(torch.log(ratio)))
        losses.append(loss * (max(left[1]) / WHOLE))
    return torch.stack(losses).sum()


def shaken(base: Path) -> Any:
    """The base model a little off: a policy that has learnt something."""
    model = load(base, dtype=torch.float32, attention="eager").eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    ("name", "settings"), [("dpo", {}), ("dpo", {"beta": 0.5, "label_smoothing": 0.1}), ("orpo", {"beta": 0.3})]
)
def test_packed_pairs_have_the_loss_and_gradient_that_they_have_alone(
    base: Path, name: str, settings: dict[str, float]
) -> None:
    docs = documents(base, 12, 5, weights=(WHOLE, 51))
    frozen, model = load(base, dtype=torch.float32, attention="eager").eval(), shaken(base)
    train = Train.model_validate({"base": "cache://m/x", "objective": name, "preference": settings or None})
    mine = PreferenceObjective(model, train, bfloat16=False)
    batch = to_pairs(*pack(docs))
    with torch.no_grad():
        batch = batch._replace(reference=log_probabilities(Objective(frozen, bfloat16=False), batch))

    loss = mine(batch)
    loss.backward()
    packed_gradient = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plain = plain_loss(without_hooks(model), frozen, docs, name, train.pushing)
    plain.backward()
    plain_gradient = [p.grad for p in model.parameters() if p.grad is not None]
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    whole = torch.cat([g.flatten() for g in plain_gradient])
    difference = torch.cat([g.flatten() for g in packed_gradient]) - whole
    assert float(difference.norm() / whole.norm()) < 1e-5


def without_hooks(model: Any) -> Any:
    """A model whose head answers everywhere again."""
    model.get_output_embeddings()._forward_pre_hooks.clear()
    return model


def test_certain_answers_have_a_finite_loss_and_gradient() -> None:
    """Odds of what is certain are infinite: a model that has learnt an answer by heart must not end the training."""
    for one in (0.0, -1e-12, -1e-4, -0.5, -40.0, -1e4):
        policy = torch.tensor([[one, -3.0], [-3.0, one]], dtype=torch.float64, requires_grad=True)
        losses, _ = preference.orpo(policy, torch.ones(2, 2), Preference())
        losses.sum().backward()
        assert losses.isfinite().all()
        assert policy.grad is not None
        assert policy.grad.isfinite().all()
    losses, rewards = preference.dpo(policy.detach() * 1e4, policy.detach(), Preference())
    assert losses.isfinite().all()
    assert rewards.isfinite().all()


def test_what_is_batched_together_changes_no_pairs_loss(base: Path) -> None:
    arrays, model = pack(documents(base, 24, 7)), objective(base, "orpo")
    whole = model(to_pairs(*arrays))
    together = model.judged()
    apart = [model(to_pairs(*(array[row : row + 1] for array in arrays))) for row in range(len(arrays[0]))]
    assert float(sum(apart)) == pytest.approx(float(whole), rel=1e-6)
    each = torch.cat([measures for measures, _ in model._seen])
    assert torch.allclose(each, together, rtol=1e-5, atol=1e-6)


def test_the_reference_of_an_adapter_is_the_base_exactly_and_the_first_loss_is_log_2(base: Path) -> None:
    train = Train.model_validate({"base": "cache://m/x", "objective": "dpo", "lora": {"dropout": 0.5}})
    model = build(base, train, dtype="float32", length=tickets.LENGTH)
    batch = to_pairs(*pack(documents(base, 8, 5)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
        expected = log_probabilities(
            Objective(load(base, dtype=torch.float32, attention="eager"), bfloat16=False), batch
        )
        assert isinstance(model, PreferenceObjective)
        assert torch.equal(model._without_adapter(batch), expected)
        assert not torch.allclose(log_probabilities(model, batch), expected), "the adapter is on again"
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())
    assert model.training


def test_a_steps_weight_is_that_of_its_pairs(house: House, base: Path) -> None:
    uneven = commit(house.uri("preference/uneven"), base, weights=(WHOLE, 51, 102))
    train = Train(base="cache://models/x", objective="orpo", micro_batch=3, accumulation=4)
    split = train_split(store_for(uneven).local(uneven), train)
    step = PairLoader(split, train, rank=0, ranks=1).step(3)
    batches = step.batches
    assert step.weight == pytest.approx(sum(float(batch.pairs.sum()) for batch in batches if batch.pairs is not None))
    halves = [PairLoader(split, train, rank=rank, ranks=2) for rank in (0, 1)]
    assert {loader.step(3).weight for loader in halves} == {step.weight}
    weights = {round(float(weight), 3) for batch in batches for weight in weights_of(batch)}
    assert weights == {1.0, 0.2, 0.4}


def weights_of(batch: Batch) -> Iterator[float]:
    assert batch.pairs is not None
    yield from batch.pairs.tolist()


def test_documents_are_not_trained_on_as_pairs_nor_pairs_as_documents(house: House, pairs: House) -> None:
    sft, dpo = Train(base="cache://models/x"), Train(base="cache://models/x", objective="dpo")
    with pytest.raises(BadInput, match=r"holds preference pairs.*Prepare the data again for the train\.objective"):
        train_split(store_for(pairs.data).local(pairs.data), sft)
    with pytest.raises(BadInput, match="holds documents, preference pairs are wanted"):
        validation_split(store_for(house.data).local(house.data), dpo)
    with pytest.raises(BadInput, match=r"train\.objective is pretrain, which learns them all"):
        train_split(store_for(house.data).local(house.data), Train(base="cache://models/x", objective="pretrain"))


def test_a_reference_that_was_damaged_is_not_read(tmp_path: Path) -> None:
    made = reference.Reference(np.array([2, 5]), np.array([0, 1, 3]), np.arange(6.0).reshape(3, 2))
    reference.write(tmp_path, "x", made)
    found = reference.read(tmp_path, "x")
    assert found is not None
    assert found.of(np.array([5, 2])).tolist() == [[2.0, 3.0], [4.0, 5.0], [0.0, 1.0]]
    path = tmp_path / "reference-x.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    assert reference.read(tmp_path, "x") is None


DPO = (
    "train.objective=dpo", "train.max_steps=16", "train.preference.beta=0.3", "train.learning_rate=6.0e-4",
    "train.schedule=constant",
)  # fmt: skip
WATCHED = "train.validation.every_steps=8"


def prefers(folder: Path, house: House) -> float:
    """How often a published model finds the chosen answer of a held-out pair likelier, token for token."""
    split = packed.read(store_for(house.data).local(house.data), "validation", pairs=True)
    model = Objective(load(folder, dtype=torch.float32, attention="eager").eval(), bfloat16=False)
    batch = to_pairs(split.tokens[:], split.segments[:], split.mask[:])
    with torch.no_grad():
        means = log_probabilities(model, batch) / preference.lengths(batch)
    return float((means[:, 0] > means[:, 1]).double().mean())


@pytest.fixture(scope="module")
def learnt(pairs: House) -> dict[str, Any]:
    """A full training with DPO on one rank."""
    return pairs.train("preference/dpo", sets=(*DPO, WATCHED))


def test_dpo_raises_margin_and_accuracy_and_the_published_model_prefers_what_was_chosen(
    pairs: House, learnt: dict[str, Any], base: Path
) -> None:
    records = pairs.metrics("preference/dpo")
    first, last = records[0], records[-1]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert last["reward_margin"] > 1
    assert last["preference_accuracy"] == 1.0
    assert last["reward_chosen"] - last["reward_rejected"] == pytest.approx(last["reward_margin"])
    looks = [record for record in records if "validation_loss" in record]
    assert [record["step"] for record in looks] == [8, 16]
    assert looks[-1]["validation_loss"] < looks[0]["validation_loss"] < np.log(2)
    assert looks[-1]["validation_preference_accuracy"] > 0.9
    assert set(looks[-1]["validation_losses"]) == set(KINDS)
    model = store_for(learnt["model"]).local(learnt["model"])
    assert prefers(model, pairs) > max(0.9, prefers(base, pairs))


def test_dpo_is_the_same_in_any_split_of_a_step_over_batches_ranks_and_zero(
    pairs: House, learnt: dict[str, Any]
) -> None:
    sets = ("train.accumulation=4", "train.micro_batch=1", "train.zero_stage=1", "train.max_steps=6")
    pairs.train("preference/two", ranks=2, sets=(*DPO, *sets))
    alone = pairs.metrics("preference/dpo")
    for one, two in zip(alone, pairs.metrics("preference/two"), strict=False):
        for what in ("loss", "grad_norm", "reward_margin", "preference_accuracy"):
            assert two[what] == pytest.approx(one[what], rel=1e-4, abs=1e-6), (what, one["step"])
        assert two["targets"] == one["targets"]
    assert pairs.metrics("preference/two")[0]["loss"] == pytest.approx(alone[0]["loss"], abs=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_adapter_learns_to_prefer_at_any_zero_stage(pairs: House, stage: int) -> None:
    name = f"preference/lora-{stage}"
    sets = (*DPO, WATCHED, "train.method=lora", f"train.zero_stage={stage}", "train.learning_rate=6.0e-3")
    answer = pairs.train(name, ranks=2 if stage else 1, sets=sets)
    records = pairs.metrics(name)
    assert records[0]["loss"] == pytest.approx(np.log(2), abs=1e-6), "an adapter starts as the base"
    assert records[-1]["reward_margin"] > 1
    assert prefers(store_for(answer["model"]).local(answer["model"]), pairs) > 0.9
    assert not list((pairs.root / name).glob("reference-*")), "the adapter is switched off instead"


def test_orpo_learns_to_prefer_without_a_reference(pairs: House, base: Path) -> None:
    sets = ("train.objective=orpo", "train.max_steps=16", "train.preference.beta=0.5", WATCHED)
    answer = pairs.train("preference/orpo", sets=sets)
    records = pairs.metrics("preference/orpo")
    assert records[-1]["loss"] < records[0]["loss"] / 2
    assert records[-1]["reward_margin"] > records[0]["reward_margin"]
    assert records[-1]["validation_preference_accuracy"] == 1.0
    assert prefers(store_for(answer["model"]).local(answer["model"]), pairs) > max(0.9, prefers(base, pairs))
    assert not list((pairs.root / "preference/orpo").glob("reference-*"))


def test_a_resume_is_exact_and_asks_the_base_model_no_second_time(pairs: House, learnt: dict[str, Any]) -> None:
    whole, output = pairs.losses("preference/dpo"), pairs.root / "preference" / "dpo"
    kept = {path.name: path.stat().st_mtime_ns for path in output.glob("reference-*")}
    assert len(kept) == 4, "of train and of validation, each with its hash"
    for step in (12, 16):  # as a kill after step 8 would have left it
        store_for(pairs.data).remove(pairs.uri(f"preference/dpo/checkpoints/step-{step}"))
    (output / "manifest.json").unlink()
    answer = pairs.train("preference/dpo", sets=(*DPO, WATCHED))
    assert json.loads((output / "manifest.json").read_text())["facts"]["resumed_from"] == 8
    assert pairs.losses("preference/dpo") == whole
    assert answer["model"] == learnt["model"]
    assert {path.name: path.stat().st_mtime_ns for path in output.glob("reference-*")} == kept


def test_a_smoke_run_asks_the_base_model_of_its_own_packs_only(pairs: House) -> None:
    code, _, said = pairs.run("smoke", "--output", pairs.uri("preference/smoke"), sets=DPO)
    assert code == 0, said


def test_pretraining_learns_every_token_of_texts(house: House, base: Path) -> None:
    uri = house.uri("preference/texts")
    texts = [(ids, [0] + [WHOLE] * (len(ids) - 1)) for ids, _ in tickets.documents(base, 200)]
    with store_for(uri).publish(uri) as draft:
        tokens, segments, mask = tickets.pack(texts, tickets.LENGTH)
        packed.write(
            draft.path, "train", tokens=tokens, segments=segments, mask=mask, samples=len(texts),
            vocabulary=file_digest(base / "tokenizer.json"), vocabulary_size=int(tokens.max()) + 1,
        )  # fmt: skip
        draft.commit(Manifest(kind="dataset", fingerprint="texts"))
    plain = House(house.root, of_format(house, "text"), house.base, uri)
    plain.train("preference/pretrain", sets=("train.objective=pretrain", "train.max_steps=6"))
    records = plain.metrics("preference/pretrain")
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[0]["targets"] > 0.9 * records[0]["tokens"]
