"""The order of samples: seeded, stateless, every sample once an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from refit.spec import Train
from trainer.order import packs_at, packs_of_step
from trainer.schedule import learning_rate


@pytest.mark.parametrize("packs", [1, 2, 3, 7, 64, 101, 1000])
def test_each_epoch_sees_every_pack_exactly_once(packs: int) -> None:
    seen = packs_at(np.arange(3 * packs), packs=packs, seed=5).reshape(3, packs)
    assert all(sorted(epoch) == list(range(packs)) for epoch in seen)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = packs_at(np.arange(200), packs=100, seed=1).reshape(2, 100)
    other = packs_at(np.arange(100), packs=100, seed=2)
    assert (first != second).sum() > 80
    assert (first != other).sum() > 80
    assert abs(np.corrcoef(first, np.arange(100))[0, 1]) < 0.3


def test_a_step_is_the_same_whatever_came_before() -> None:
    straight = np.concatenate([packs_of_step(n, per_step=8, packs=30, seed=1) for n in range(10)])
    assert (packs_of_step(7, per_step=8, packs=30, seed=1) == straight[56:64]).all()
    assert (packs_at(np.arange(80), packs=30, seed=1) == straight).all(), "steps follow each other without a gap"


def test_the_order_is_what_it_always_was() -> None:
    """A resume by newer code goes on in it."""
    assert packs_at(np.arange(98, 106), packs=101, seed=1).tolist() == [10, 71, 61, 20, 100, 28, 97, 9]
    assert packs_at(np.array([0, 7, 10**15]), packs=10**9, seed=2**63).tolist() == [281899206, 432509923, 542994788]


def test_a_place_far_out_is_found_without_walking_there() -> None:
    far = packs_of_step(10**9, per_step=4, packs=10**6, seed=1)
    assert far.shape == (4,)
    assert ((far >= 0) & (far < 10**6)).all()


def test_the_learning_rate_warms_up_and_comes_down() -> None:
    train = Train(base="cache://models/x", max_steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(train, step) for step in range(100)]
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.5, abs=0.02)
    assert rates[99] < 0.001
    assert rates[10:] == sorted(rates[10:], reverse=True)
    flat = train.model_copy(update={"schedule": "constant", "warmup_steps": 0})
    assert {learning_rate(flat, step) for step in range(100)} == {1.0}
