"""Which checkpoint a resume goes on from, and which it never does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from refit.errors import BadInput
from refit.manifest import Manifest
from refit.store import store_for
from trainer import checkpoints, metrics

FINGERPRINT = "f" * 32


@pytest.fixture
def output(tmp_path: Path) -> str:
    """A training with checkpoints at 10, 20 and 30."""
    uri = (tmp_path / "out").as_uri()
    for step in (10, 20, 30):
        save(uri, step)
    return uri


def save(output: str, step: int, fingerprint: str = FINGERPRINT) -> None:
    uri = checkpoints.address(output, step)
    with store_for(uri).publish(uri) as draft:
        (draft.path / "state").mkdir()
        (draft.path / "state" / "weights.pt").write_bytes(bytes([step]) * 1000)
        (draft.path / "rng-rank-0.json").write_text("{}")
        draft.commit(Manifest(kind="checkpoint", fingerprint=fingerprint, facts={"step": step, "ranks": 1}))


def path(output: str, step: int) -> Path:
    return store_for(output).local(checkpoints.address(output, step))


def newest(output: str) -> int | None:
    found = checkpoints.newest(output, FINGERPRINT)
    return found.step if found else None


def test_the_newest_complete_one_is_taken_by_number_not_by_name(output: str) -> None:
    save(output, 100)
    assert newest(output) == 100


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[500] ^= 1
    file.write_bytes(data)


def rewrite(folder: Path, old: str, new: str) -> None:
    text = (folder / "manifest.json").read_text()
    assert old in text
    (folder / "manifest.json").write_text(text.replace(old, new))


@pytest.mark.parametrize("damage", [
    pytest.param(lambda folder: flip(folder / "state" / "weights.pt"), id="a flipped bit"),
    pytest.param(lambda folder: (folder / "state" / "weights.pt").write_bytes(b"\x1e" * 999), id="truncated"),
    pytest.param(lambda folder: (folder / "state" / "weights.pt").write_bytes(bytes(1000)), id="zeroed"),
    pytest.param(lambda folder: (folder / "rng-rank-0.json").unlink(), id="a file is missing"),
    pytest.param(lambda folder: (folder / "manifest.json").unlink(), id="no manifest"),
    pytest.param(lambda folder: (folder / "manifest.json").write_bytes(b'{"vers'), id="a torn manifest"),
    pytest.param(lambda folder: rewrite(folder, '"ranks": 1', '"ranks": 3'), id="a flipped bit in the manifest"),
    pytest.param(lambda folder: rewrite(folder, "f" * 32, "g" + "f" * 31), id="a flipped bit in the fingerprint"),
])  # fmt: skip
def test_a_damaged_one_is_passed_over_loudly(damage, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage(path(output, 30))
    assert newest(output) == 20
    if (path(output, 30) / "manifest.json").is_file():
        assert "checkpoint_damaged" in capsys.readouterr().err


def test_with_the_two_newest_zeroed_the_third_is_taken(output: str) -> None:
    for step in (30, 20):
        (path(output, step) / "state" / "weights.pt").write_bytes(bytes(1000))
    assert newest(output) == 10


def test_a_whole_one_under_the_name_of_another_step_is_passed_over_loudly(
    output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(path(output, 20), path(output, 20).with_name("step-40"))
    assert newest(output) == 30
    assert "holds step 20" in capsys.readouterr().err


def test_a_half_written_draft_is_never_seen_and_is_cleared(output: str) -> None:
    draft = path(output, 30).parent / ".draft-step-40-123-abcd"
    draft.mkdir()
    (draft / "weights.pt").write_bytes(b"half")
    assert newest(output) == 30
    checkpoints.clear_drafts(output)
    assert not draft.exists()


def test_what_a_kill_left_of_a_removal_is_cleared(output: str) -> None:
    (path(output, 10) / "manifest.json").unlink()
    left = path(output, 10)
    checkpoints.clear_drafts(output)
    assert not left.exists()
    assert [found.step for found in checkpoints.committed(output)] == [30, 20]


def test_checkpoints_of_another_training_are_refused(output: str) -> None:
    with pytest.raises(BadInput, match="an output folder of its own"):
        checkpoints.newest(output, "e" * 32)


def test_retention_keeps_the_newest(output: str) -> None:
    checkpoints.retain(output, 2)
    assert [found.step for found in checkpoints.committed(output)] == [30, 20]
    checkpoints.retain(output, 0)
    assert [found.step for found in checkpoints.committed(output)] == [30], "never the last one"


def test_verify_names_the_file_and_the_reason(output: str) -> None:
    assert checkpoints.verify(checkpoints.address(output, 20)).step == 20
    flip(path(output, 20) / "state" / "weights.pt")
    with pytest.raises(BadInput, match=r"step-20: state/weights\.pt differs from its hash"):
        checkpoints.verify(checkpoints.address(output, 20))
    with pytest.raises(BadInput, match=r"no manifest\.json there"):
        checkpoints.verify(checkpoints.address(output, 50))


def test_metrics_forget_what_will_be_made_again(tmp_path: Path) -> None:
    for step in range(1, 8):
        metrics.append(tmp_path, {"step": step})
    with (tmp_path / "metrics.jsonl").open("ab") as handle:
        handle.write(b'{"step": 8, "lo')  # a kill in the middle of a line
    metrics.rewind(tmp_path, 5)
    metrics.append(tmp_path, {"step": 6})
    assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2, 3, 4, 5, 6]
