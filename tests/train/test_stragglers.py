"""A slow rank is named, and nobody else is."""

from __future__ import annotations

import cluster
import numpy as np
import pytest

from trainer.stragglers import BASELINE_STEPS, SETTLE_STEPS, STEPS, Slow, Stragglers, others

LEARNT = SETTLE_STEPS + BASELINE_STEPS


def named(made: cluster.Trace) -> list[Slow]:
    watch = Stragglers(cluster.NODES)
    told = []
    for step, (seconds, tokens) in enumerate(zip(made.seconds, made.tokens, strict=True)):
        told += watch.see(step, seconds, tokens, marked=bool(made.marked[step]))
    return [verdict for verdict in told if not verdict.over]


def learnt(ranks: int, seconds: float = 1.0) -> Stragglers:
    watch = Stragglers(ranks)
    for step in range(LEARNT):
        assert watch.see(step, np.full(ranks, seconds)) == []
    return watch


def test_the_slow_node_of_64_is_named() -> None:
    """500 runs of 400 steps (67 minutes), a node twice to six times as slow: named first in >= 99 % of them."""
    random = np.random.default_rng(2026)
    right, runs = 0, 500
    for _ in range(runs):
        made = cluster.trace(400, random, slow=True)
        first = next(iter(named(made)), None)
        right += first is not None and first.rank == made.node and first.step >= made.since
    print(f"{right} of {runs} slow nodes named")
    assert right / runs >= 0.99


def test_a_cluster_without_a_slow_node_raises_no_alarm() -> None:
    """40 days of 8,640 steps, with all confounders: at most 0.1 false alarms a day."""
    random = np.random.default_rng(2027)
    days = 40
    false = sum(len(named(cluster.trace(cluster.STEPS_A_DAY, random, slow=False))) for _ in range(days))
    print(f"{false} false alarms in {days} days")
    assert false / days <= 0.1


def test_a_slow_rank_is_named_after_five_steps_and_again_when_it_keeps_up() -> None:
    watch, slow = learnt(4), np.array([1, 1, 2.4, 1])
    told = [watch.see(step, slow) for step in range(STEPS)]
    assert told == [[]] * (STEPS - 1) + [[Slow(2, STEPS - 1, pytest.approx(2.4))]]
    assert watch.see(5, slow) == [], "told once"
    told = [watch.see(step, np.ones(4)) for step in range(STEPS)]
    assert told == [[]] * (STEPS - 1) + [[Slow(2, STEPS - 1, 1.0, over=True)]]


def test_of_two_each_is_compared_with_the_other() -> None:
    watch = learnt(2)
    told = [watch.see(step, [1.0, 3.0]) for step in range(STEPS)]
    assert told[-1] == [Slow(1, STEPS - 1, 3.0)]


def test_one_that_is_slow_from_the_start_is_named() -> None:
    watch = Stragglers(8)
    seconds = np.where(np.arange(8) == 5, 3.0, 1.0)
    told = [watch.see(step, seconds) for step in range(LEARNT + STEPS)]
    assert told[-1] == [Slow(5, LEARNT + STEPS - 1, 3.0)]


def test_what_slows_all_slow_names_nobody() -> None:
    watch = learnt(4)
    assert not any(watch.see(step, [3.0, 3.3, 3.1, 2.9]) for step in range(50))


def test_pauses_and_marked_steps_are_not_judged() -> None:
    watch, slow = learnt(4), [1, 1, 1, 5.0]
    for step in range(40):
        assert watch.see(step, np.ones(4) if step % STEPS == 0 else slow) == [], "four in a row are a pause"
    watch = learnt(4)
    for step in range(STEPS - 1):
        assert watch.see(step, slow) == []
        assert watch.see(step, np.ones(4), marked=True) == [], "a save between does not end the row"
    assert [verdict.rank for verdict in watch.see(STEPS, slow)] == [3]


def test_a_larger_share_takes_longer_and_is_not_slow() -> None:
    tokens = np.array([1000, 1000, 3000, 1000])
    watch = learnt(4, 1.0)
    assert any(watch.see(step, tokens / 1000) for step in range(STEPS)), "without tokens it looks slow"
    watch = Stragglers(4)
    for step in range(LEARNT + 50):
        share = np.roll(tokens, step // 10)
        assert watch.see(step, share / 1000, share) == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64])
def test_the_median_of_the_others_equals_its_plain_twin(count: int) -> None:
    values = np.random.default_rng(count).integers(1, 9, count).astype(float)
    for rank, theirs in enumerate(others(values)):
        rest = np.sort(np.delete(values, rank))
        assert theirs == (rest[len(rest) // 2] if count > 1 else 1.0)
