"""How long the launcher waits for a rank, and what a rank keeps of its random numbers."""

from __future__ import annotations

import json
import os
import random
import selectors
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from refit.spec import Train
from trainer import alive, machine, randomness
from trainer.cli_work import store_of
from trainer.randomness import Numbers
from trainer.ranks import Rank, Ranks
from trainer.silence import NAMED_SECONDS, STARTUP_SECONDS, Patience, Silence, Silent
from trainer.task import Wire


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


def members(tmp_path: Path, count: int) -> tuple[Ranks, list[int]]:
    """Ranks as the launcher listens to them, without processes; and the ends that they speak on."""
    task = SimpleNamespace(train=Train(base="cache://models/x", hang_seconds=5))
    ranks, ends = Ranks(task), []  # type: ignore[arg-type]
    for number in range(count):
        listen, speak = os.pipe()
        process = SimpleNamespace(pid=os.getpid(), poll=lambda: 0)
        ranks.members.append(Rank(number, process, listen, tmp_path / "log"))  # type: ignore[arg-type]
        ranks._selector.register(listen, selectors.EVENT_READ, ranks.members[-1])
        ends.append(speak)
    return ranks, ends


def test_rank_0_is_blamed_too_though_it_says_more_than_the_others(tmp_path: Path) -> None:
    ranks, ends = members(tmp_path, 2)
    wires = [Wire(end) for end in ends]
    for _ in range(5):
        wires[0].send("batch")
        for wire in wires:
            wire.beat()
            wire.send("step")
    wires[1].beat()  # the next step's; rank 0 hangs in it
    ranks.messages(0.1)
    ranks.listened += 9
    assert ranks.silent(8).number == 0  # type: ignore[union-attr]


def test_who_waits_while_another_works_is_not_hung_where_no_steps_are_taken(tmp_path: Path) -> None:
    ranks, ends = members(tmp_path, 2)
    Wire(ends[0]).beat()
    ranks.messages(0.1)
    ranks.members[1].heard -= STARTUP_SECONDS + 1
    assert ranks.hung() is None
    ranks.members[0].heard -= STARTUP_SECONDS + 1
    assert ranks.hung() is not None


def test_a_rank_beats_while_it_does_something_and_only_then() -> None:
    listen, speak = os.pipe()
    os.set_blocking(listen, False)

    def beats() -> int:
        try:
            return os.read(listen, 1 << 16).count(b"\n")
        except BlockingIOError:
            return 0

    with alive.while_working(Wire(speak), every=0.1):
        until = time.monotonic() + 1
        while time.monotonic() < until:
            sum(range(1000))
        assert beats() >= 2
        time.sleep(0.25)
        beats()
        time.sleep(0.5)
        assert beats() == 0, "it hangs"
