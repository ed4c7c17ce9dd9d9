"""Bad input gets a clear sentence: the file, the field, the value, what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from refit.errors import BadSpec
from refit.form import OVERRIDES, apply_form, form_fields, overrides_schema
from refit.pipeline import check_sources, load, merge, nest, parse_set, validate

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "dags" / "pipelines" / "tiny.yaml"


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["train.max_step=5"], "train.max_step is not a setting. Did you mean max_steps?"),
        (["nonsense.x=5"], "nonsense is not a setting. Known here:"),
        (["train.max_steps=x"], "train.max_steps is 'x': input should be a valid integer"),
        (["train.max_steps=0"], "train.max_steps is 0: input should be greater than or equal to 1"),
        (["train.learning_rate=.nan"], "train.learning_rate is nan: input should be a finite number"),
        (["rollout.steps=[5, 3]"], "rollout.steps: steps are [5, 3]; they must rise and end in 100"),
        (["rollout.steps=[100]"], "a share below 100 comes first, or nobody is left to compare with"),
        (["data.split.heldout=0.99"], "data.split: heldout + validation is 1.01; leave something to train on"),
        (["train.ranks=2"], "train.accumulation is 1 and train.ranks is 2"),
        (["data.sources=[]"], "data.sources: Tuple should have at least 1 item"),
        (["train.base=http://x"], "train.base is 'http://x': string should match pattern"),
        (["train.max_steps"], "expected NAME=VALUE"),
        (["train.max_steps=[1"], "not valid YAML"),
    ],
)
def test_a_fault_is_named_with_field_and_value(sets: list[str], says: str) -> None:
    with pytest.raises(BadSpec) as caught:
        load(TINY, sets)
    assert says in str(caught.value)


def test_all_faults_are_said_at_once() -> None:
    with pytest.raises(BadSpec) as caught:
        load(TINY, ["train.max_steps=0", "evaluate.max_items=0"])
    assert len(str(caught.value).splitlines()) == 2


def test_weights_that_sum_to_nothing_are_refused() -> None:
    document = yaml.safe_load(TINY.read_text())
    for source in document["data"]["sources"]:
        source["weight"] = 0
    with pytest.raises(BadSpec, match=r"tiny: data: the weights of data\.sources sum to 0"):
        validate(document, "tiny")


def test_a_negative_weight_names_its_source() -> None:
    document = yaml.safe_load(TINY.read_text())
    document["data"]["sources"][1]["weight"] = -0.5
    with pytest.raises(
        BadSpec, match=r"data\.sources\[1\]\.weight is -0\.5: input should be greater than or equal to 0"
    ):
        validate(document, "tiny")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "a: [", "\x00"])
def test_a_file_of_garbage_is_bad_spec(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(BadSpec, match=r"x\.yaml"):
        load(path)
    with pytest.raises(BadSpec, match="cannot be read"):
        load(tmp_path / "nothing.yaml")


def test_yaml_tags_run_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("name: !!python/object/apply:os.system ['touch /tmp/refit-was-here']\n")
    with pytest.raises(BadSpec, match="not valid YAML"):
        load(path)


def test_missing_and_empty_sources_are_found_before_any_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path))
    (tmp_path / "data" / "tiny").mkdir(parents=True)
    (tmp_path / "data" / "tiny" / "mail.jsonl").write_text("\n\n")
    faults = check_sources(load(TINY), "tiny")
    assert "data.sources[0].uri" in faults[0]
    assert "0 rows" in faults[0]
    assert "no such file" in faults[1]
    assert "train.base" in faults[-1]


@pytest.mark.parametrize("path", sorted((ROOT / "dags" / "pipelines").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_line_of_the_house_is_valid_and_named_like_its_file(path: Path) -> None:
    assert load(path).name == path.stem


def test_the_form_holds_the_dozen_things_people_change() -> None:
    fields = form_fields(load(TINY))
    assert {field.section for field in fields} == {"Data", "Training", "Evaluation", "Promotion", "Rollout"}
    assert 12 <= len(fields) <= 18
    steps = next(field for field in fields if field.name == "train.max_steps")
    assert steps.default == 100
    assert steps.schema["minimum"] == 1
    assert steps.schema["title"]


def test_the_overrides_schema_is_closed_at_every_level() -> None:
    def objects(node: Any) -> list[dict[str, Any]]:
        if isinstance(node, list):
            return [found for item in node for found in objects(item)]
        if not isinstance(node, dict):
            return []
        below = [found for value in node.values() for found in objects(value)]
        return [node, *below] if node.get("type") == "object" and "properties" in node else below

    found = objects(overrides_schema())
    assert len(found) > 10
    assert all(node["additionalProperties"] is False for node in found)
    assert all("required" not in node for node in found)
    assert "$ref" not in str(found)


def test_the_form_lies_over_the_file_and_overrides_over_the_form() -> None:
    document = yaml.safe_load(TINY.read_text())
    values = {"train.max_steps": 7, OVERRIDES: {"train": {"seed": 3}}}
    spec = validate(apply_form(document, values), "form")
    assert (spec.train.max_steps, spec.train.seed, spec.train.learning_rate) == (7, 3, 3e-3)


names = st.text("abc", min_size=1, max_size=2)
trees = st.recursive(st.integers(), lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=6)


@given(st.dictionaries(names, trees), st.dictionaries(names, trees))
def test_merging_the_same_twice_changes_nothing(below: dict[str, Any], above: dict[str, Any]) -> None:
    once = merge(below, above)
    assert merge(once, above) == once
    assert merge(below, {}) == below


@given(st.lists(names, min_size=1, max_size=4), st.integers())
def test_a_dotted_name_is_a_place(parts: list[str], value: int) -> None:
    tree: Any = nest({".".join(parts): value})
    assert parse_set(f"{'.'.join(parts)}={value}") == tree
    for part in parts:
        tree = tree[part]
    assert tree == value
