"""A campaign of resumes within epochs and over their ends (`make soak`): every sample is learnt from exactly once.

Which packs a step took is read from its record: their lengths are a Sidon set, so that the tokens of two of them name
both.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from itertools import combinations_with_replacement

import campaign
import numpy as np
import pytest
from conftest import House
from test_soak import killed_at

from refit import packed
from refit.fingerprint import file_digest
from refit.manifest import Manifest
from refit.packed import WHOLE
from refit.store import store_for

pytestmark = pytest.mark.integration

LENGTH, PACKS, EPOCHS = 512, 19, 2
STEPS = PACKS * EPOCHS // 2
"""Two packs a step, one a rank: the first epoch ends in the middle of a step."""

SETS = (
    "train.method=lora", "train.micro_batch=1", "train.accumulation=2", f"train.max_steps={STEPS}",
    "train.checkpoint.every_steps=1", "train.max_restarts=100", "train.heartbeat_seconds=0.2",
)  # fmt: skip
LOOKING = ("train.validation.every_steps=2",)


def sidon(count: int, start: int = 8) -> list[int]:
    """Numbers of which no two pairs have the same sum (Mian and Chowla), from `start` on."""
    found: list[int] = []
    sums: set[int] = set()
    number = start
    while len(found) < count:
        new = {number + other for other in [*found, number]}
        if not new & sums:
            found.append(number)
            sums |= new
        number += 1
    return found


LENGTHS = sidon(PACKS)
PAIRS = {sum(pair): pair for pair in combinations_with_replacement(LENGTHS, 2)}


@pytest.fixture(scope="module")
def lengths(house: House) -> House:
    """The house with a dataset of one document a pack, each of a length of its own."""
    uri = house.uri("soak-order-data")
    base = store_for(house.base).local(house.base)
    place = np.arange(LENGTH)[None, :] < np.array(LENGTHS)[:, None]
    tokens = np.where(place, np.random.default_rng(1).integers(3, 300, place.shape), 0)
    with store_for(uri).publish(uri) as draft:
        for split in ("train", "validation"):
            packed.write(
                draft.path, split, tokens=tokens, segments=place.astype(int), mask=place * WHOLE, vocabulary_size=300,
                vocabulary=file_digest(base / "tokenizer.json"), samples=PACKS,
            )  # fmt: skip
        draft.commit(Manifest(kind="dataset", fingerprint="lengths"))
    return House(house.root, house.spec, house.base, uri)


def test_the_tokens_of_two_packs_name_them() -> None:
    assert max(LENGTHS) <= LENGTH
    assert len(PAIRS) == PACKS * (PACKS + 1) // 2


def test_a_resume_at_an_epochs_very_end_and_one_in_the_second_go_on_there(lengths: House) -> None:
    """The second epoch is not skipped, nor taken for the first (transformers#25136, open_lm#154)."""
    name, more = "epochs-end", ("train.accumulation=1", "train.max_steps=24", "train.checkpoint.keep_last=24")
    lengths.train(name, sets=(*SETS, *more))
    straight = lengths.losses(name)
    taken = [record["tokens"] for record in lengths.metrics(name)]
    assert sorted(taken[:PACKS]) == LENGTHS, "the first epoch ends with a step"
    for step in (PACKS, PACKS + 2):
        lengths.back_to(name, step)
        assert lengths.train(name, sets=(*SETS, *more))["resumed_from"] == step
        assert lengths.losses(name) == straight
        assert [record["tokens"] for record in lengths.metrics(name)] == taken


def test_every_sample_is_learnt_from_exactly_once_an_epoch_whatever_is_killed(lengths: House) -> None:
    """transformers#25136 and #39560, open_lm#154, pytorch/data#1520: epochs skipped, repeated, or their tails."""
    kills = 3 * EPOCHS if campaign.COUNT is not None else 2

    def case(number: int, rng: random.Random) -> campaign.Facts:
        looking = number % 2 == 1
        name = f"soak-order-{number}"
        goals = [1 + at * (STEPS - 2) // kills + rng.randint(0, 1) for at in range(kills)]
        facts, (code, _, said) = killed_at(lengths, name, SETS + LOOKING * looking, goals, rng)
        assert code == 0, said[-3000:]
        steps = [PAIRS[record["tokens"]] for record in lengths.metrics(name)]
        assert len(steps) == STEPS
        taken = [pack for pair in steps for pack in pair]
        assert Counter(taken) == dict.fromkeys(LENGTHS, EPOCHS), "each once an epoch"
        whole = PACKS // 2 * 2  # of the step in which an epoch ends nobody knows which came first
        assert len(set(taken[:whole])) == len(set(taken[-whole:])) == whole
        shutil.rmtree(lengths.root / name)
        return {**facts, "evaluation": "on" if looking else "off"}

    campaign.run("order", campaign.size(20, 1), case)
