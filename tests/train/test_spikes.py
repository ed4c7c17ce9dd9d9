"""Loss spikes are seen soon, and what is none is left alone."""

from __future__ import annotations

import math
from statistics import median

import curves
import numpy as np
import pytest

from trainer.spikes import PATIENCE_STEPS, Over, Spike, Spikes, _Window


def watch(losses: list[float], norms: list[float] | None = None) -> list[Spike | Over]:
    spikes = Spikes()
    told = [spikes.see(step, loss, (norms or [1.0] * len(losses))[step]) for step, loss in enumerate(losses)]
    return [verdict for verdict in told if verdict is not None]


def noisy(level: float, steps: int, scale: float = 0.02, seed: int = 1) -> list[float]:
    return (level * (1 + scale * np.random.default_rng(seed).standard_normal(steps))).tolist()


def test_planted_spikes_are_found_and_calm_steps_raise_no_alarm() -> None:
    """1,000 curves of three lengths, half of them with a spike: recall >= 0.99, at most 1 false alarm in 10^5 steps."""
    random = np.random.default_rng(2026)
    found = planted = false = calm = 0
    for count, steps in ((334, 300), (333, 700), (333, 1500)):
        made = curves.curves(count, steps, random)
        for row in range(count):
            told = watch(made.loss[row].tolist(), made.grad_norm[row].tolist())
            began = [verdict.step for verdict in told if isinstance(verdict, Spike)]
            start, due = made.start[row], made.due[row]
            planted += start >= 0
            found += start >= 0 and any(start <= step <= due + 20 for step in began)
            quiet = made.planted[row] < 0.5
            calm += int(quiet.sum())
            false += sum(bool(quiet[step]) for step in began)
    print(f"{found} of {planted} spikes found; {false} false alarms in {calm} calm steps")
    assert planted > 400
    assert found / planted >= 0.99
    assert false / calm <= 1e-5


def test_a_spike_is_told_once_with_its_size_and_its_end() -> None:
    losses = noisy(2.0, 200)
    for step in range(120, 200):
        losses[step] += 3.0 * math.exp(-(step - 120) / 10)
    began, over = watch(losses)
    assert isinstance(began, Spike)
    assert isinstance(over, Over)
    assert (began.began, began.step) == (120, 122), "three steps far up"
    assert began.usual == pytest.approx(2.0, rel=0.03)
    assert began.scales > 20
    assert over.recovered
    assert over.began == 120
    assert over.peak == max(losses[120:])


def test_a_loss_that_stays_up_is_the_usual_in_the_end() -> None:
    began, over, again, _ = watch(noisy(2.0, 100) + noisy(4.0, 200, seed=2) + noisy(9.0, 110, seed=3))
    assert isinstance(began, Spike)
    assert over == Over(began.began + PATIENCE_STEPS, began.began, over.peak, recovered=False)
    assert isinstance(again, Spike)
    assert again.usual == pytest.approx(4.0, rel=0.05), "it is compared with what it has become used to"


@pytest.mark.parametrize("steps", [1, 2])
def test_a_bad_batch_is_no_spike(steps: int) -> None:
    losses = noisy(2.0, 200)
    losses[120 : 120 + steps] = [50.0] * steps
    assert watch(losses) == []


def test_the_end_of_a_fall_is_no_spike_nor_are_tiny_rises() -> None:
    fall = [11 - 0.1 * step for step in range(80)] + [3.0] * 80
    assert watch((np.array(fall) + 0.01 * np.random.default_rng(1).standard_normal(160)).tolist()) == []
    assert watch([1e-5] * 100 + [5e-5] * 50) == [], "converged: five times next to nothing is next to nothing"


def test_a_gradient_bears_witness_of_a_small_rise() -> None:
    losses = noisy(2.0, 200)
    losses[120:126] = [2.0 * (1 + 0.02 * 3.2)] * 6
    quiet, loud = [1.0] * 200, [1.0] * 120 + [10.0] * 6 + [1.0] * 74
    assert watch(losses, quiet) == []
    (began, _) = watch(losses, loud)
    assert isinstance(began, Spike)
    assert began.gradient_scales > 3


def test_the_same_losses_give_the_same_verdicts() -> None:
    made = curves.curves(20, 300, np.random.default_rng(5), spiked=1.0)
    losses, norms = made.loss.tolist(), made.grad_norm.tolist()
    assert [watch(*row) for row in zip(losses, norms, strict=True)] == [
        watch(*row) for row in zip(losses, norms, strict=True)
    ]


def test_the_window_equals_its_plain_twin() -> None:
    values = np.random.default_rng(3).choice(np.random.default_rng(4).standard_t(2, 40), 500).tolist()
    window = _Window(33)
    for count, value in enumerate(values, start=1):
        window.push(value)
        kept = values[max(0, count - 33) : count]
        if len(kept) % 2:
            centre = median(kept)
            assert window.median == centre
            assert window.deviation(centre) == median(abs(value - centre) for value in kept)
