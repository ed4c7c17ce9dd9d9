"""How long the launcher waits for a rank, and what a rank keeps of its random numbers."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from refit.spec import Train
from trainer import machine, randomness
from trainer.cli_work import store_of
from trainer.randomness import Numbers
from trainer.silence import NAMED_SECONDS, STARTUP_SECONDS, Patience, Silence, Silent


def test_patience_is_long_before_the_first_step_and_follows_the_longest_silence_after() -> None:
    patience = Patience(Train(base="cache://models/x", hang_seconds=10))
    patience.heard("beat", 50)
    assert patience.seconds == STARTUP_SECONDS
    patience.heard("step", 40)
    assert patience.seconds == 10, "what came before the first step says nothing about steps"
    patience.heard("beat", 0.5)
    assert patience.seconds == 10
    patience.heard("step", 3)
    assert patience.seconds == 30, "a model whose steps take 3 s is not hung after 10"
    patience.heard("phase", 1)
    assert patience.seconds == STARTUP_SECONDS, "an export takes its own time"


def blame_the_second(_: float) -> int:
    return 1


def test_a_silent_rank_is_named_once_long_before_its_launch_is_ended() -> None:
    silence = Silence()
    assert silence.see(500, [0, 0], blame_the_second) is None, "before the first step nobody is silent"
    for seconds in (0.2, 0.5, 0.3):
        silence.stepped(seconds)
    assert silence.see(NAMED_SECONDS - 0.1, [0, 0], blame_the_second) is None
    named = silence.see(NAMED_SECONDS + 0.1, [0, 0], blame_the_second)
    assert named == Silent(1, NAMED_SECONDS + 0.1, pytest.approx(0.5, abs=0.01))
    assert silence.see(60, [0, 0], blame_the_second) is None, "told once"
    assert silence.see(61, [60.5, 0], blame_the_second) is None, "the other one spoke"
    over = silence.see(62, [60.5, 61.5], blame_the_second)
    assert over is not None
    assert (over.rank, over.over) == (1, True)
    assert silence.see(63, [62.5, 62.5], blame_the_second) is None
    assert silence.see(90, [62.5, 62.5], blame_the_second) is not None, "and the next silence again"


def test_who_takes_long_steps_may_be_silent_for_as_long_and_an_export_for_longer() -> None:
    silence = Silence()
    for _ in range(99):
        silence.stepped(10.0)
    assert silence.see(26, [0, 0], blame_the_second) is None
    assert silence.see(29.5, [0, 0], blame_the_second) is not None, "within three long steps"
    silence.pause()
    assert silence.see(500, [0, 0], blame_the_second) is None


def test_random_numbers_go_on_where_they_were_saved() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    torch.randn(7)
    state = json.loads(json.dumps(Numbers.now().document()))
    first = (torch.randn(5).tolist(), random.random(), np.random.rand(3).tolist())
    torch.randn(100)
    randomness.go_on(state)
    assert (torch.randn(5).tolist(), random.random(), np.random.rand(3).tolist()) == first


@pytest.mark.parametrize(("flags", "dtype", "expected"), [
    ({"avx2", "avx512f"}, "auto", "float32"),
    ({"avx512f", "avx512_bf16"}, "auto", "bfloat16"),
    ({"amx_bf16"}, "auto", "bfloat16"),
    ({"amx_bf16"}, "float32", "float32"),
    (set(), "bfloat16", "bfloat16"),
])  # fmt: skip
def test_auto_computes_in_bfloat16_only_where_the_processor_does(
    flags: set[str], dtype: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "flags", lambda: frozenset(flags))
    assert machine.arithmetic(Train(base="cache://models/x", dtype=dtype)) == expected


def test_models_are_published_in_the_store_that_the_output_lies_in() -> None:
    assert store_of("s3://refit/a/training/tiny/abc") == "s3://refit/a"
    assert store_of("file:///tmp/out") == "file:///tmp"
