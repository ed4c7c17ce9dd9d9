"""What a checkpoint's manifest says of where in its data it is."""

from __future__ import annotations

import numpy as np
import pytest

from refit.spec import Train
from trainer.order import packs_of_step
from trainer.position import Data, after

PER_STEP, PACKS = 6, 16
TRAIN = Train(base="cache://models/base", micro_batch=2, accumulation=3)
HOLDS = np.random.default_rng(1).integers(1, 9, PACKS)
DATA = Data(fingerprint="f" * 32, content="c" * 64, packs=PACKS, samples=int(HOLDS.sum()))


@pytest.mark.parametrize("step", [1, 2, 3, 7, 8, 16, 10**9])
def test_a_position_is_where_the_order_of_the_packs_goes_on(step: int) -> None:
    told = after(step, TRAIN, DATA)
    assert told["packs_seen"] == step * PER_STEP == told["epoch"] * PACKS + told["place_in_epoch"]
    assert 0 <= told["place_in_epoch"] < PACKS
    assert after(step, TRAIN, DATA) == told
    assert (told["fingerprint"], told["content"], told["packs"]) == (DATA.fingerprint, DATA.content, PACKS)


def test_an_epoch_s_end_lies_within_a_step_and_a_later_one_at_its_end() -> None:
    places = [(told["epoch"], told["place_in_epoch"]) for told in (after(n, TRAIN, DATA) for n in range(1, 9))]
    assert places == [(0, 6), (0, 12), (1, 2), (1, 8), (1, 14), (2, 4), (2, 10), (3, 0)]


def test_documents_are_counted_exactly_by_the_epoch_and_by_the_mean_of_a_pack_within_one() -> None:
    seen = 0
    for step in range(1, 17):
        seen += int(HOLDS[packs_of_step(step - 1, per_step=PER_STEP, packs=PACKS, seed=TRAIN.seed)].sum())
        told = after(step, TRAIN, DATA)
        if told["place_in_epoch"] == 0:
            assert told["samples_seen"] == seen
        assert abs(told["samples_seen"] - seen) < DATA.samples, "at most an epoch's documents apart"
    assert after(16, TRAIN, DATA)["samples_seen"] == 6 * DATA.samples
