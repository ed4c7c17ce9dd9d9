"""Hashed once a boot: nothing that was touched since is taken on trust."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from refit import checked
from refit.manifest import Manifest, describe

Damage = Callable[[], list[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two files that were written long enough ago."""
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checked, "SETTLED_SECONDS", -1.0)
    made = tmp_path / "folder"
    made.mkdir()
    for name in ("a", "b"):
        (made / name).write_bytes(name.encode() * 100)
    return made


@pytest.fixture
def damage(folder: Path) -> Damage:
    manifest = Manifest(kind="dataset", fingerprint="f", files=describe(folder))
    return lambda: checked.damage(folder, manifest)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every folder that is really read."""
    read: list[Path] = []
    really = checked.hashed

    def counted(folder: Path, manifest: Manifest, **more: Callable[[], None]) -> list[str]:
        read.append(folder)
        return really(folder, manifest, **more)

    monkeypatch.setattr(checked, "hashed", counted)
    return read


def test_what_was_found_whole_is_read_once(damage: Damage, hashed: list[Path]) -> None:
    assert [damage() for _ in range(3)] == [[]] * 3
    assert len(hashed) == 1


def test_a_flipped_bit_is_seen_though_size_and_time_are_as_before(
    folder: Path, damage: Damage, hashed: list[Path]
) -> None:
    """A changed file can be given any time but that of its change."""
    assert damage() == []
    before = (folder / "a").stat()
    (folder / "a").write_bytes(b"a" * 99 + b"b")
    os.utime(folder / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert damage() == damage() == ["a differs from its hash"]
    assert len(hashed) == 3, "damage is never noted"


@pytest.mark.parametrize("change", ["replaced", "moved", "missing", "torn note", "no note", "other hash", "rebooted"])
def test_any_difference_has_everything_read_again(
    folder: Path, damage: Damage, hashed: list[Path], change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert damage() == []
    (note,) = (tmp_path / "cache" / "checked").iterdir()
    if change == "replaced":
        other = tmp_path / "other"
        other.write_bytes(b"a" * 100)
        os.replace(other, folder / "a")
    elif change == "moved":
        folder.rename(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").rename(folder)
        (folder / "a").rename(folder / "c")
        (folder / "b").rename(folder / "a")
        (folder / "c").rename(folder / "b")
    elif change == "missing":
        (folder / "b").unlink()
    elif change == "torn note":
        note.write_bytes(note.read_bytes()[:20])
    elif change == "no note":
        note.unlink()
    elif change == "other hash":
        other = Manifest(kind="dataset", fingerprint="f", files=[f.model_copy(update={"sha256": "0"})
                                                                 for f in describe(folder)])  # fmt: skip
        assert len(checked.damage(folder, other)) == 2
    else:
        boot = tmp_path / "boot_id"
        boot.write_text("another\n")
        monkeypatch.setattr(checked, "_BOOT", boot)
    wrong = damage()
    expected = {"moved": ["a differs from its hash", "b differs from its hash"], "missing": ["b is missing"]}
    assert wrong == expected.get(change, [])
    assert len(hashed) == 2


def test_a_file_that_was_just_written_is_not_noted(
    damage: Damage, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "SETTLED_SECONDS", 3600.0)
    assert damage() == damage() == []
    assert len(hashed) == 2


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(
    damage: Damage, hashed: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert damage() == damage() == []
    assert len(hashed) == 2
