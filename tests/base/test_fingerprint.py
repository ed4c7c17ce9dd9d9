"""Names follow from content: what decides the bytes changes the name, what does not does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from refit import fingerprint
from refit.pipeline import load

TINY = Path(__file__).resolve().parents[2] / "dags" / "pipelines" / "tiny.yaml"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shaped"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "phase.py").write_text('"""Doc."""\nfrom shaped.helper import f\n\n\ndef g():\n    return f()\n')
    (folder / "helper.py").write_text("def f():\n    return 1\n")
    (folder / "other.py").write_text("def h():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def code(module: str = "shaped.phase") -> str:
    fingerprint.code_digest.cache_clear()
    for name in [name for name in sys.modules if name.startswith("shaped")]:
        del sys.modules[name]
    return fingerprint.code_digest(module)


def test_comments_layout_and_docstrings_do_not_move_a_name(package: Path) -> None:
    before = code()
    (package / "phase.py").write_text('"""Other words."""\n# why\nfrom shaped.helper import f\ndef g(): return f()\n')
    assert code() == before


def test_code_moves_a_name_also_through_an_import(package: Path) -> None:
    before = code()
    (package / "other.py").write_text("def h():\n    return 2\n")
    assert code() == before
    (package / "helper.py").write_text("def f():\n    return 2\n")
    assert code() != before


def test_machines_and_checkpoints_do_not_move_a_training_folder() -> None:
    def name(*sets: str) -> str:
        return fingerprint.training_fingerprint(load(TINY, sets).train, dataset="d", base="b")

    assert name("train.checkpoint.every_steps=7") == name()
    assert name("train.accumulation=2") == name("train.accumulation=2", "train.ranks=2")
    assert name("train.seed=7") != name()
    assert fingerprint.training_fingerprint(load(TINY).train, dataset="other", base="b") != name()


def test_a_setting_that_came_later_moves_a_training_folder_only_where_it_is_used() -> None:
    """A training that has been under way for days goes on under its name when the trainer learns something new."""
    train = load(TINY).train
    before = train.model_dump(mode="json", exclude=set(train.not_in_fingerprint | train.came_later))
    recipe = fingerprint.RECIPE_VERSION["train"]
    name = fingerprint.training_fingerprint(train, dataset="d", base="b")
    assert name == fingerprint.fingerprint("train", recipe, before, {"dataset": "d", "base": "b"})
    for objective in ("dpo", "orpo", "pretrain"):
        other = train.model_copy(update={"objective": objective})
        assert fingerprint.training_fingerprint(other, dataset="d", base="b") != name


def test_a_recipe_s_digest_is_of_what_decides_the_outcome_and_of_no_input() -> None:
    def recipe(*sets: str) -> str:
        return fingerprint.recipe_digest(load(TINY, sets).train)

    assert recipe("train.checkpoint.every_steps=7") == recipe()
    assert recipe("train.seed=7") != recipe()


def test_nan_has_no_name() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        fingerprint.digest({"x": float("nan")})


def test_order_of_keys_does_not_count() -> None:
    assert fingerprint.digest({"a": 1, "b": (1, 2)}) == fingerprint.digest({"b": [1, 2], "a": 1})


def test_naming_code_does_not_import_it(package: Path) -> None:
    """A name is asked for on every run, also where the library behind the code takes seconds to load."""
    (package / "phase.py").write_text("from shaped.helper import f\n")
    (package / "helper.py").write_text("raise RuntimeError('imported')\nf = 1\n")
    assert code() == code()
