"""A campaign of damaged checkpoints (`make soak`): never taken for whole, and the newest whole one is gone on from."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import campaign
import pytest
from conftest import House

from trainer import checkpoints

pytestmark = pytest.mark.integration

SETS = ("train.method=lora", "train.zero_stage=2")
STEPS = (4, 8, 12)
Damage = Callable[[random.Random, Path, set[int]], None]
"""Damages some of the checkpoints in a folder, and puts the steps of those that are whole no more into the set."""


def truncated(rng: random.Random, folder: Path, broken: set[int]) -> None:
    """diffusion-pipe#159: a shard of four bytes."""
    for file in chosen(rng, folder, broken):
        with file.open("r+b") as handle:
            handle.truncate(rng.randrange(file.stat().st_size))


def flipped(rng: random.Random, folder: Path, broken: set[int]) -> None:
    for file in chosen(rng, folder, broken):
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)


def flipped_in_the_manifest(rng: random.Random, folder: Path, broken: set[int]) -> None:
    """One that nobody would see: the files are what their hashes say, and the step or the recipe is another."""
    for step in newest_few(rng, broken):
        file = folder / f"step-{step}" / "manifest.json"
        data = bytearray(file.read_bytes())
        place = rng.choice([at for at, byte in enumerate(data) if byte not in b" \n"])
        data[place] ^= 1 << rng.randrange(7)
        file.write_bytes(data)


def missing(rng: random.Random, folder: Path, broken: set[int]) -> None:
    """DeepSpeed#2898 and others: a rank's shard is not there."""
    for file in chosen(rng, folder, broken):
        file.unlink()


def zeroed(rng: random.Random, folder: Path, broken: set[int]) -> None:
    """A power cut: names and sizes are on the disk, the bytes are not."""
    for file in chosen(rng, folder, broken):
        file.write_bytes(bytes(file.stat().st_size))


def longer(rng: random.Random, folder: Path, broken: set[int]) -> None:
    for file in chosen(rng, folder, broken):
        with file.open("ab") as handle:
            handle.write(rng.randbytes(rng.randint(1, 64)))


def stale(rng: random.Random, folder: Path, broken: set[int]) -> None:
    """A shard, or the manifest, of a former save among those of the newest."""
    name = rng.choice(["manifest.json", *(path.name for path in sorted((folder / "step-12").glob("state-rank-*")))])
    broken.add(12)
    shutil.copy(folder / f"step-{rng.choice(STEPS[:2])}" / name, folder / "step-12" / name)


def swapped(_rng: random.Random, folder: Path, broken: set[int]) -> None:
    """The shards of two ranks, one in the other's place."""
    broken.add(12)
    first, second = sorted((folder / "step-12").glob("state-rank-*"))
    aside = first.with_name("aside")
    first.rename(aside), second.rename(first), aside.rename(second)


def under_another_name(rng: random.Random, folder: Path, _broken: set[int]) -> None:
    """A whole checkpoint under a step that is not its own: nothing in it is wrong."""
    shutil.copytree(folder / f"step-{rng.choice(STEPS)}", folder / f"step-{rng.randint(13, 99)}")


def both_newest_zeroed(_rng: random.Random, folder: Path, broken: set[int]) -> None:
    """What a power loss left of the two newest saves; the third is gone on from."""
    for step in STEPS[1:]:
        broken.add(step)
        for file in (folder / f"step-{step}").iterdir():
            file.write_bytes(bytes(file.stat().st_size))


def half_a_save(rng: random.Random, folder: Path, _broken: set[int]) -> None:
    """A draft whose rename never came, and a folder under its final name without a manifest."""
    shutil.copytree(folder / "step-12", folder / f".draft-step-16-here-{rng.randint(1, 9999)}-{rng.randbytes(4).hex()}")
    shutil.copytree(folder / "step-12", folder / "step-16")
    (folder / "step-16" / "manifest.json").unlink()


def newest_few(rng: random.Random, broken: set[int]) -> list[int]:
    """The newest, or the two newest, or any one."""
    steps = rng.choice([[12], [12], [12, 8], [rng.choice(STEPS)]])
    broken.update(steps)
    return steps


def chosen(rng: random.Random, folder: Path, broken: set[int]) -> list[Path]:
    """A file of each of the newest few."""
    steps = newest_few(rng, broken)
    return [rng.choice(sorted((folder / f"step-{step}").iterdir())) for step in steps]


KINDS: tuple[Damage, ...] = (
    truncated, flipped, flipped_in_the_manifest, missing, zeroed, longer, stale, swapped, under_another_name,
    both_newest_zeroed, half_a_save,
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(house: House) -> Path:
    """A training's checkpoints at 4, 8 and 12."""
    house.train("soak-checkpoints", ranks=2, sets=SETS)
    return house.root / "soak-checkpoints"


def test_a_damaged_checkpoint_is_never_taken_for_whole(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprint = next(checkpoints.committed(whole.as_uri())).manifest.fingerprint
    copy = tmp_path / "copy"

    def case(number: int, rng: random.Random) -> campaign.Facts:
        damage = KINDS[number % len(KINDS)]
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole / "checkpoints", copy / "checkpoints")
        broken: set[int] = set()
        damage(rng, copy / "checkpoints", broken)
        left = max((step for step in STEPS if step not in broken), default=None)
        found = checkpoints.newest(copy.as_uri(), fingerprint)
        said = capsys.readouterr().err
        what = damage.__name__.replace("_", " ")
        assert (found.step if found else None) == left, f"{what}: {left} is whole, taken was {found}"
        if found is not None:
            place = f"checkpoints/step-{found.step}"
            for file in (whole / place).iterdir():
                assert (copy / place / file.name).read_bytes() == file.read_bytes(), f"{what}: {file.name} is another"
            assert found.manifest.facts["step"] == found.step
        passed_over = [step for step in broken if step > (left or 0)]
        if any((copy / f"checkpoints/step-{step}/manifest.json").is_file() for step in passed_over):
            assert "checkpoint_damaged" in said, f"{what}: passed over without a word"
        return {"damage": what, "gone on from": f"step {left}"}

    campaign.run("checkpoints", campaign.size(1000, 2 * len(KINDS)), case)
