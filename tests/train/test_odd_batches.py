"""A poisoned batch is told before the loss sees it; a batch like the others is not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import streams
from test_watch import Told

from refit.domains import Domains
from refit.packed import Header, Packed
from refit.spec import Train
from trainer.batches import Loader
from trainer.contents import LEAST_TOKENS, RECENT_STEPS, Contents, hashed
from trainer.odd_batches import PATIENCE_STEPS, TOLD, WARM_STEPS, OddBatches
from trainer.skew import LIMIT, WINDOW_STEPS, Skew
from trainer.watch import Watch


def told(batches: list[dict[str, Any]]) -> list[int]:
    watch = OddBatches()
    return [batch["step"] for batch in batches if watch.see(batch)]


def test_poisoned_batches_are_found() -> None:
    """500 streams of 120 steps with one poisoned batch each: recall >= 0.99, and none but it is told."""
    random = np.random.default_rng(2026)
    missed: Counter[str] = Counter()
    streamed = [streams.stream(120, random, poisoned=True) for _ in range(500)]
    for made in streamed:
        missed[made.kind] += made.poisoned not in told(made.batches)
    print(f"{missed.total()} of {len(streamed)} poisoned batches missed: {dict(missed)}")
    assert missed.total() / len(streamed) <= 0.01


def test_calm_streams_raise_no_alarm() -> None:
    """100 streams of 1,050 steps: at most one false alarm in 10^5 steps."""
    random = np.random.default_rng(2027)
    false = sum(len(told(streams.stream(1050, random, poisoned=False).batches)) for _ in range(100))
    print(f"{false} false alarms in {100 * 1050} steps")
    assert false / (100 * 1050) <= 1e-5


def batch(step: int, **more: Any) -> dict[str, Any]:
    usual = {"tokens": 5000, "targets": 1000, "documents": 100, "duplicates": 0.0, "domains": {"a": 0.5, "b": 0.5}}
    return {"step": step, **usual, **more}


def test_what_is_odd_is_said_in_words() -> None:
    watch = OddBatches()
    assert not any(watch.see(batch(step)) for step in range(WARM_STEPS))
    odd = watch.see(batch(99, duplicates=0.5, tokens=2000, domains={"a": 0.0, "b": 1.0}))
    assert [str(one) for one in odd] == [
        "2,000 tokens, usually 5,000", "50% tokens that are learnt, usually 20%",
        "50% documents that came before, usually 0%", "0% tokens of the domain a, usually 50%",
        "100% tokens of the domain b, usually 50%",
    ]  # fmt: skip


def test_odd_batches_that_stay_are_told_a_few_times_and_then_usual() -> None:
    batches = [batch(step) for step in range(100)] + [batch(step, targets=100) for step in range(100, 300)]
    assert told([*batches, batch(300)]) == [*range(100, 100 + TOLD), 300]
    assert PATIENCE_STEPS > TOLD


def loader(tokens: list[list[int]], segments: list[list[int]], **train: Any) -> Loader:
    arrays = np.array(tokens, "<u2"), np.array(segments, "<u2")
    packs, length = arrays[0].shape
    header = Header(version=2, packs=packs, length=length, dtype="<u2", vocabulary="", tokens=1, targets=1, samples=1)
    split = Packed(header, *arrays, (arrays[1] > 0).astype("u1"))
    return Loader(split, Train(base="cache://models/x", micro_batch=1, **train), rank=0, ranks=1)


def random_split(packs: int, seed: int = 1) -> tuple[list[list[int]], list[list[int]]]:
    random = np.random.default_rng(seed)
    return random.integers(0, 50, (packs, 3 * LEAST_TOKENS)).tolist(), [[1] * 10 + [2] * 10 + [0] * 4] * packs


def test_documents_are_hashed_as_their_plain_twin_says() -> None:
    random = np.random.default_rng(3)
    tokens, segments = random.integers(0, 3, (50, 24)), np.sort(random.integers(1, 6, (50, 24)), axis=1)
    segments[:, 20:] = 0
    hashes, rows, sizes = hashed(tokens, segments)
    plain = [
        (row, tuple(tokens[row][segments[row] == number]))
        for row in range(50) for number in sorted(set(segments[row]) - {0})
    ]  # fmt: skip
    assert rows.tolist() == [row for row, _ in plain]
    assert sizes.tolist() == [len(document) for _, document in plain]
    assert len(set(hashes.tolist())) == len({document for _, document in plain})
    assert len(set(zip(hashes.tolist(), (document for _, document in plain), strict=True))) == len(set(hashes.tolist()))


def test_copies_count_and_a_pack_that_comes_again_does_not() -> None:
    tokens, segments = random_split(6)
    tokens[3] = tokens[2][:]
    made = loader(tokens, segments, accumulation=6)
    contents = Contents(made, None)
    found = [contents.of(step, made.step(step))["duplicates"] for step in range(3)]
    assert found == [2 / 12, 4 / 12, 4 / 12], "each comes after the other"
    alone = loader(*random_split(6), accumulation=4)
    contents = Contents(alone, None)
    looks = [contents.of(step, alone.step(step)) for step in range(9)]
    assert [one["duplicates"] for one in looks] == [0.0] * 9, "six epochs"
    assert looks[0]["padding"] == pytest.approx(4 / 24)


def test_after_a_resume_the_same_is_said() -> None:
    tokens, segments = random_split(200)
    for pack in range(0, 200, 3):
        tokens[pack] = tokens[0][:]
    made = loader(tokens, segments, accumulation=2)
    straight, resumed = Contents(made, None), Contents(made, None)
    all_of_them = [straight.of(step, made.step(step)) for step in range(90)]
    assert [resumed.of(step, made.step(step)) for step in range(60, 90)] == all_of_them[60:]
    assert RECENT_STEPS < 60
    assert len({one["duplicates"] for one in all_of_them}) > 1


def test_domains_have_shares_of_the_tokens() -> None:
    tokens, segments = random_split(2)
    domains = Domains(("mail", "web"), np.array([0, 1, 1, 1], "<u2"), np.array([0, 2, 4], "<u8"))
    made = loader(tokens, segments, accumulation=2)
    assert Contents(made, domains).of(0, made.step(0))["domains"] == {"web": 0.75, "mail": 0.25}


def test_ranks_that_are_given_more_are_named_and_chance_is_not() -> None:
    random = np.random.default_rng(5)
    even, tilted = Skew("tokens"), Skew("tokens")
    found = []
    for step in range(1, 20_001):
        counts = random.normal(1000, 250, 64)
        assert even.see(step, counts) is None
        if step <= 1000:
            counts[7] *= 1.25 if 300 <= step < 600 else 1.0
            found.append(tilted.see(step, counts))
    began, over = (verdict for verdict in found if verdict is not None)
    assert (began.most, began.over, over.over) == (7, False, True)
    assert 300 <= began.step <= 300 + WINDOW_STEPS
    assert began.share > LIMIT


def test_packs_are_counted_for_the_rank_that_learns_from_them() -> None:
    tokens, segments = random_split(8)
    segments[5] = [1] * 24
    train = Train(base="cache://x", micro_batch=2, accumulation=4)
    made = Loader(loader(tokens, segments).split, train, rank=0, ranks=2)
    step = made.step(0)
    own = step.packs.reshape(4, 2)[::2]
    assert step.rank_tokens == [20 * 4 + 4 * (5 in own), 20 * 4 + 4 * (5 not in own)]


def test_the_launcher_names_the_packs_of_an_odd_batch_and_the_ranks_of_a_skew() -> None:
    told = Told()
    watch = Watch(told, ranks=2, zero_stage=0, history=[{**batch(step), "skipped": True} for step in range(100)])
    for step in range(100, 100 + WINDOW_STEPS + 20):
        own = {"duplicates": 0.7} if step == 150 else {}
        dealt = {"rank_tokens": [2500, 2500], "rank_targets": [400, 600], "packs": list(range(step, step + 12))}
        watch.batch({**batch(step, **own), **dealt})
    odd, skew = told
    assert odd["reason"] == (
        "odd batch at step 150: 70% documents that came before, usually 0%. "
        "Look at its packs: 150, 151, 152, 153, 154, 155, 156, 157 and 4 more"
    )
    assert odd["odd_batch"]["packs"] == list(range(150, 162))
    assert skew["reason"].startswith("data skew at step 200: over 100 steps rank 1 has 40% more targets than rank 0")
    assert (skew["data_skew"]["most"], skew["data_skew"]["least"]) == (1, 0)
