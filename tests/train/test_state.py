"""A checkpoint is gone on from by any number of ranks, to the bit by as many as wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import House
from safetensors.torch import load_file

from refit.errors import BadInput
from trainer.fragments import KINDS, Fragment
from trainer.state import Reader, State


def piece(name: str, start: int, values: list[float]) -> Fragment:
    return Fragment(name, start, {kind: torch.tensor(values) + number for number, kind in enumerate(KINDS)})


def test_pieces_of_some_ranks_are_read_as_those_of_others(tmp_path: Path) -> None:
    State.of([piece("a", 0, [0, 1, 2]), piece("b", 0, [9])], 7).write(tmp_path, 0)
    State.of([piece("a", 3, [3, 4]), piece("b", 1, [8])], 7).write(tmp_path, 1)
    with Reader(tmp_path) as reader:
        assert reader.steps == 7
        assert reader.read("a", "weight", 1, 3).tolist() == [1, 2, 3]
        assert reader.read("a", "exp_avg", 0, 5).tolist() == [1, 2, 3, 4, 5]
        assert reader.whole("b", 2).tolist() == [9, 8]
        with pytest.raises(BadInput, match=r"1 of 2 elements of b \(weight\) are there"):
            reader.read("b", "weight", 1, 2)
        with pytest.raises(BadInput, match="0 of 1 elements of c"):
            reader.whole("c", 1)


def test_a_copy_does_not_follow_what_is_trained_on(tmp_path: Path) -> None:
    one = piece("a", 0, [1, 2])
    state = State.of([one], 1)
    one.tensors["weight"].zero_()
    state.write(tmp_path, 0)
    with Reader(tmp_path) as reader:
        assert reader.whole("a", 2).tolist() == [1, 2]


def test_a_folder_without_a_state_and_a_cut_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no checkpoint of this trainer"), Reader(tmp_path):
        pass
    (tmp_path / "state-rank-0.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(BadInput, match="cannot be read"), Reader(tmp_path):
        pass


@pytest.mark.integration
# Of both methods, and of each way in which the stages keep their state, one or two here. Four ranks, which two cores
# are slow with, where state is shared out in a way of its own: an adapter's is cut as a whole model's. Two ranks, to
# the bit, where no other test does it: of an adapter at stage 2 test_kills.py does, of stage 0 test_guards.py.
@pytest.mark.parametrize(
    ("stage", "method", "others"),
    [(0, "full", (1,)), (1, "full", (2, 4, 1)), (3, "full", (2, 4, 1)), (2, "lora", (1,)), (3, "lora", (2, 1))],
)
def test_ranks_may_change_and_come_back(house: House, stage: int, method: str, others: tuple[int, ...]) -> None:
    sets = (
        f"train.zero_stage={stage}", f"train.method={method}", "train.accumulation=4", "train.micro_batch=1",
        "train.max_steps=8",
    )  # fmt: skip
    output = f"changing-{stage}-{method}"
    whole = house.train(output, ranks=2, sets=sets)
    undisturbed = house.losses(output)
    for ranks in others:
        house.back_to(output, 4)
        answer = house.train(output, ranks=ranks, sets=sets)
        assert answer["resumed_from"] == 4
        if ranks == 2:
            assert house.losses(output) == undisturbed
            assert answer["model_digest"] == whole["model_digest"], "the same ranks, to the bit"
        for (step, loss, norm), (wanted, *rest) in zip(house.losses(output), undisturbed, strict=True):
            assert step == wanted
            assert (loss, norm) == pytest.approx(rest, rel=1e-6 if step <= 6 else 1e-3)
    files = [load_file(path) for path in sorted((house.root / output).glob("checkpoints/step-8/state-rank-*"))]
    assert len(files) == 1
    # Nothing that the base model's folder holds anyway, not even a head that is tied to the embedding.
    assert method == "full" or all("lora_" in name for name in files[0])
    assert any("layers.0" in name for name in files[0])
