"""What is tried before a training: all in one job, the first evaluation too, and known answers are not sought again."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tickets
from conftest import House, call

from refit import packed
from refit.errors import BadSpec
from refit.fingerprint import file_digest
from refit.job import Job, read_events
from refit.manifest import Manifest
from refit.pipeline import load as load_spec
from refit.spec import Train
from refit.store import store_for
from trainer import tried

LOOKS = ("train.validation.every_steps=4",)


def test_a_smoke_run_of_one_step_is_refused_for_it_has_nothing_to_save(house: House) -> None:
    with pytest.raises(BadSpec, match=r"train\.smoke_steps.*greater than or equal to 2"):
        load_spec(house.spec, ["train.smoke_steps=1"])
    assert load_spec(house.spec, ["train.smoke_steps=2"]).train.smoke_steps == 2


def test_a_smoke_run_may_take_a_tenth_of_the_planned_time_and_never_less_than_its_minutes(house: House) -> None:
    """Three steps of a training of a week are nothing, and may take more than ten minutes."""
    train = load_spec(house.spec).train
    week, hour = 7 * 24 * 3600.0, 3600.0
    assert tried.minutes("smoke", train) == tried.minutes("smoke", train, hour) == train.smoke_minutes == 10
    assert tried.minutes("smoke", train, week) == pytest.approx(0.1 * week / 60)
    assert tried.minutes("trial", train, week) == pytest.approx(0.1 * week / 60 + 2 * train.overfit.minutes)
    assert tried.minutes("overfit", train, week) == 2 * train.overfit.minutes
    assert tried.minutes("train", train, week) is None


def test_an_answer_counts_for_the_same_training_tried_in_the_same_way_on_the_same_kind_of_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = Train.model_validate({"base": "cache://models/x", "accumulation": 2})
    name = tried.name("smoke", recipe, "f")
    same = recipe.model_copy(update={"overfit": recipe.overfit.model_copy(update={"steps": 7}), "hang_seconds": 1.0})
    assert tried.name("smoke", same, "f") == name
    others = [
        tried.name("smoke", recipe, "g"),
        tried.name("overfit", recipe, "f"),
        *(
            tried.name("smoke", recipe.model_copy(update={field: value}), "f")
            for field, value in (("ranks", 2), ("engine", "deepspeed"), ("offload", "all"), ("tensor_parallel", 2))
        ),
        tried.name("smoke", recipe.model_copy(update={"smoke_steps": 5}), "f"),
    ]
    monkeypatch.setattr(tried, "processor", lambda: "another processor")
    others.append(tried.name("smoke", recipe, "f"))
    assert len({name, *others}) == 9


@pytest.mark.integration
def test_a_trial_is_preflight_handful_and_smoke_run_and_only_preflight_is_done_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ("train.max_steps=200", "train.overfit.steps=80", "train.overfit.share=1", *LOOKS)

    def trial(name: str, *more: str) -> tuple[dict[str, Any], Path]:
        job = Job.build(
            "trial", load_spec(house.spec, [*sets, *more]), store=house.uri("tried"), output=house.uri(f"tried/{name}"),
            inputs={"dataset": house.data, "base": house.base, "plan": house.uri("tried-plan")},
        )  # fmt: skip
        monkeypatch.setenv("REFIT_JOB", job.save())
        code, answer, said = call(house.argv("run")[:3])
        assert code == 0, said
        return answer, house.root / "tried" / name

    code, _, said = house.run("plan", "--output", house.uri("tried-plan"), sets=sets)
    assert code == 0, said
    first, folder = trial("first")
    assert {check["check"] for check in first["preflight"]["checks"] if check["ok"]} >= {"disk", "memory", "store"}
    assert first["overfit"]["learnt"]
    assert first["smoke"]["validation_loss"] > 0
    assert not first["overfit"]["known"]
    assert not first["smoke"]["known"]
    reasons = [event["reason"] for event in read_events((folder / "events.jsonl").read_text())]
    for said in ("preflight: 1 rank(s) fit", "overfit: loss", "smoke: "):
        assert any(reason.startswith(said) for reason in reasons), said
    again, folder = trial("again")
    assert again["overfit"] == {**first["overfit"], "known": True}
    assert again["smoke"] == {**first["smoke"], "known": True}
    assert not (folder / "ranks").exists(), "no rank was started"
    assert again["preflight"]["ranks"] != first["preflight"]["ranks"], "free memory and disk were looked at anew"
    other, _ = trial("other", "train.smoke_steps=2")
    assert (other["overfit"]["known"], other["smoke"]["known"]) == (True, False)


def dataset_with(
    house: House, name: str, change: Callable[[np.ndarray], None] = lambda _: None, *, length: int = tickets.LENGTH,
    times: int = 1,
) -> str:  # fmt: skip
    """The tickets with another validation split, `times` as large; `change` is done to its tokens."""
    base = store_for(house.base).local(house.base)
    vocabulary, uri = file_digest(base / "tokenizer.json"), house.uri(name)
    with store_for(uri).publish(uri) as draft:
        for split, number, seed in (("train", 400, 1), ("validation", 40, 2)):
            size = length if split == "validation" else tickets.LENGTH
            found = tickets.documents(base, number, seed) * (times if split == "validation" else 1)
            tokens, segments, mask = tickets.pack(found, size)
            top = int(tokens.max()) + 1
            if split == "validation":
                change(tokens)
            packed.write(
                draft.path, split, tokens=tokens, segments=segments, mask=mask, vocabulary=vocabulary,
                vocabulary_size=top, samples=number,
            )  # fmt: skip
        draft.commit(Manifest(kind="dataset", fingerprint=name))
    return uri


@pytest.mark.integration
def test_memory_that_is_short_at_the_first_evaluation_shows_before_the_big_run(house: House) -> None:
    """facebookresearch/detectron2#153: training fits, and the first evaluation, hours later, runs out of memory."""
    data = dataset_with(house, "long-validation", length=1 << 14)
    argv = house.argv("smoke", "--store", house.uri("short"), sets=LOOKS)
    argv[argv.index("--data") + 1] = data

    def little() -> None:  # address space, not memory: what asks for more is refused, and nobody else is hurt
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))

    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, preexec_fn=little, check=False)
    assert done.returncode == 11, done.stderr[-2000:]
    message = json.loads(done.stdout.strip().splitlines()[-1])["message"]
    assert "the first look at the validation split failed" in message
    assert "memory" in message
    assert "train.micro_batch" in message


@pytest.mark.integration
def test_a_validation_split_that_breaks_shows_before_the_big_run(house: House) -> None:
    def unknown_word(tokens: np.ndarray) -> None:
        tokens[0, 0] = 60_000

    data = dataset_with(house, "strange-validation", unknown_word)
    argv = house.argv("smoke", "--store", house.uri("strange"), sets=LOOKS)
    argv[argv.index("--data") + 1] = data
    code, answer, _ = call(argv)
    assert code == 11
    assert "IndexError" in answer["message"]
    assert "at step 4" in answer["message"]


@pytest.mark.integration
def test_a_rank_that_is_killed_at_the_first_evaluation_is_a_refusal_not_a_lost_node(house: House) -> None:
    """The kernel kills for memory without a word. Taken for a lost node, it would be tried again a dozen times."""
    argv = house.argv("smoke", "--store", house.uri("killed"), sets=LOOKS)
    argv[argv.index("--data") + 1] = dataset_with(house, "large-validation", times=300)
    launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stderr is not None
    next(line for line in launcher.stderr if tried.LOOK in line)
    (rank,) = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(rank), signal.SIGKILL)
    out, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 11
    assert "signal 9" in json.loads(out.strip().splitlines()[-1])["message"]
