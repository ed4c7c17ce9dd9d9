"""The trainer as people call it: train, ask again, give it something wrong."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import tickets
import torch
from conftest import House, call
from safetensors.torch import load_file, save_file

from refit.job import Job
from refit.pipeline import load as load_spec
from refit.store import store_for
from trainer import checkpoints, cli, writer
from trainer.bases import import_folder
from trainer.batches import to_batch
from trainer.objective import Objective, load
from trainer.schedule import learning_rate

pytestmark = pytest.mark.integration


def test_it_learns_and_publishes_a_model_named_by_its_content(house: House, trained: dict) -> None:
    losses = [record["loss"] for record in house.metrics("alone")]
    assert [record["step"] for record in house.metrics("alone")] == list(range(1, 13))
    assert losses[-1] < losses[0] / 4
    recipe = load_spec(house.spec).train
    assert [record["lr"] for record in house.metrics("alone")] == [learning_rate(recipe, step) for step in range(12)]
    assert trained["steps"] == 12
    assert trained["loss"] == losses[-1]
    assert trained["resumed_from"] is None
    manifest = store_for(trained["model"]).require(trained["model"], "model")
    assert manifest.content_digest() == trained["model_digest"]
    assert trained["model"].endswith(trained["model_digest"][:32])
    names = {file.path for file in manifest.files}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                     "chat_template.jinja", "generation_config.json"}  # fmt: skip


def test_the_published_model_writes_the_answers_it_was_taught(house: House, trained: dict) -> None:
    answer = house.train("taught", sets=("train.max_steps=60", "train.checkpoint.every_steps=60"))
    folder = store_for(answer["model"]).local(answer["model"])
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right = 0
    for text, expected in tickets.tickets(20, seed=9):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
        said = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        right += said == expected
    assert right >= 18, "and it stops by itself: <|im_end|> was learnt"


def test_called_after_success_it_answers_from_the_manifest(house: House, trained: dict) -> None:
    before = (house.root / "alone" / "manifest.json").stat().st_mtime_ns
    assert house.train("alone") == trained
    assert (house.root / "alone" / "manifest.json").stat().st_mtime_ns == before
    assert len(house.metrics("alone")) == 12


def test_the_output_of_another_training_is_refused(house: House, trained: dict) -> None:
    code, answer, _ = house.run("run", "--output", house.uri("alone"), sets=("train.learning_rate=0.001",))
    assert code == 10
    assert "an output folder of its own" in answer["message"]


@pytest.mark.parametrize(("held", "exit_code"), [(False, 10), (True, 30)], ids=["of another", "held"])
def test_a_run_that_is_refused_leaves_job_json_as_it_was(
    house: House, trained: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held: bool, exit_code: int
) -> None:
    """`trainer export` and `trainer replay` took what lay there by another recipe from then on."""
    output = tmp_path / "unfinished"
    shutil.copytree(house.root / "alone", output)
    (output / "manifest.json").unlink()
    if held:  # by one that has saved nothing yet
        shutil.rmtree(output / "checkpoints")
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    argv = house.argv("run", "--output", output.as_uri(), sets=("train.learning_rate=0.001",))[3:]
    monkeypatch.setattr(writer, "WAIT_SECONDS", 0.0)
    with writer.sole(output, output.as_uri()) if held else nullcontext():
        assert cli.main(argv) == exit_code
    after = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert after[output / "job.json"] == before[output / "job.json"]
    assert held or after == before


def test_training_is_the_same_again(house: House, trained: dict) -> None:
    again = house.train("again")
    assert again["model_digest"] == trained["model_digest"]
    assert house.losses("again") == house.losses("alone")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_and_any_zero_stage_learn_the_same(house: House, trained: dict, stage: int) -> None:
    name = f"zero-{stage}"
    answer = house.train(name, ranks=2, sets=(f"train.zero_stage={stage}",))
    for mine, theirs in zip(house.metrics(name), house.metrics("alone"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert (mine["tokens"], mine["targets"], mine["lr"]) == (theirs["tokens"], theirs["targets"], theirs["lr"])
    first, theirs = house.metrics(name)[0], house.metrics("alone")[0]
    assert first["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert first["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert answer["steps"] == 12


def test_every_checkpoint_of_a_run_says_where_in_the_data_it_is(house: House, trained: dict) -> None:
    told = {found.step: found.manifest.facts["data"] for found in checkpoints.committed(house.uri("alone"))}
    assert told, "a run keeps checkpoints"
    per_step = {step: data["packs_seen"] / step for step, data in told.items()}
    assert len(set(per_step.values())) == 1, per_step
    for data in told.values():
        assert (data["epoch"], data["place_in_epoch"]) == divmod(data["packs_seen"], data["packs"])


def test_a_checkpoint_of_one_rank_is_gone_on_from_by_two(house: House, trained: dict) -> None:
    output = house.root / "wider"
    shutil.copytree(house.root / "alone", output)
    for gone in ("manifest.json", "checkpoints/step-12", "checkpoints/step-8"):
        path = output / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    answer = house.train("wider", ranks=2)
    assert answer["resumed_from"] == 4
    assert [record["loss"] for record in house.metrics("wider")] == pytest.approx(
        [record["loss"] for record in house.metrics("alone")], rel=1e-3
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_lora_publishes_adapter_and_merged_model_that_answer_alike(house: House, stage: int) -> None:
    answer = house.train(f"lora-{stage}", sets=("train.method=lora", f"train.zero_stage={stage}"))
    base, adapter, merged = (store_for(uri).local(uri) for uri in (house.base, answer["adapter"], answer["model"]))
    weights = load_file(adapter / "adapter_model.safetensors")
    assert weights, "ZeRO 3 must not save an empty adapter"
    assert any(float(value.abs().max()) > 0 for name, value in weights.items() if "lora_B" in name)
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == house.base
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(load(base, dtype=torch.float32, attention="eager"), adapter).eval()
    batch = to_batch(*tickets.pack(tickets.documents(base, 8), tickets.LENGTH))
    with torch.no_grad():
        apart = Objective(loaded, bfloat16=False).logits(batch)
        whole = Objective(load(merged, dtype=torch.float32, attention="eager").eval(), bfloat16=False).logits(batch)
    assert torch.allclose(apart, whole, atol=1e-4)
    manifest = store_for(house.uri(f"lora-{stage}")).require(house.uri(f"lora-{stage}"), "train")
    assert manifest.facts["export_difference"] < 1e-5, "the exported logits are the training model's"


@pytest.fixture(scope="module")
def poisoned(house: House, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base model that gives NaN wherever it reads the digit 7."""
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(store_for(house.base).local(house.base), folder)
    (folder / "manifest.json").unlink()
    weights = load_file(folder / "model.safetensors")
    from tokenizers import Tokenizer

    token = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("7")
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    uri = (folder.parent / "committed").as_uri()
    import_folder(folder, uri)
    return uri


def test_a_nan_on_one_rank_stops_all_before_the_step(house: House, poisoned: str) -> None:
    code, answer, _ = house.run(
        "run", "--output", house.uri("nan"), "--ranks", "2", sets=(f"train.base={poisoned}", "train.micro_batch=1")
    )
    assert code == 12
    assert "not finite" in answer["message"]
    scene = json.loads((house.root / "nan" / "scene.json").read_text())
    assert len(scene["packs"]) == 2
    steps = [record["step"] for record in house.metrics("nan")] if (house.root / "nan/metrics.jsonl").exists() else []
    assert scene["step"] == len(steps) + 1
    assert not list((house.root / "nan").glob("checkpoints/step-*")), "nothing poisoned was saved"


def test_a_smoke_run_restores_measures_and_is_answered_from_the_store(house: House) -> None:
    code, answer, said = house.run("smoke", "--store", house.uri("store"))
    assert code == 0, said
    assert answer["tokens_per_second"] > 0
    assert len(answer["losses"]) == 3
    folder = store_for(answer["manifest"]).path(answer["manifest"]).parent
    assert folder.parent == house.root / "store" / "training" / "tickets"
    assert not list((folder / "checkpoints").iterdir())
    again = house.run("smoke", "--store", house.uri("store"))
    assert again[1] == answer
    assert "answered" in again[2]
    code, plan, said = house.run("plan", "--store", house.uri("store"))
    assert code == 0, said
    assert plan["measured"]
    assert plan["seconds"] == pytest.approx(12 * answer["seconds_per_step"])


def test_a_plan_counts_parameters_as_the_model_has_them(house: House) -> None:
    code, plan, said = house.run("plan", "--output", house.uri("plan"), sets=("train.method=lora",))
    assert code == 0, said
    model = load(store_for(house.base).local(house.base), dtype=torch.float32, attention="eager")
    base = sum(parameter.numel() for parameter in model.parameters())
    assert plan["parameters"] - plan["trainable"] == base
    assert plan["trainable"] == 3 * 16 * (4 * 256 + 3 * 512), "16 (in + out) for seven matrices in three layers"
    assert plan["fits"]
    assert plan["why"]
    assert json.loads((house.root / "plan" / "plan.json").read_text())["parameters"] == plan["parameters"]
    assert "parameters" in said
    program = house.argv("plan")[:5]
    code, blind, _ = call([*program, "--set", "train.method=lora"])
    assert code == 0, "a plan needs no data yet"
    assert (blind["parameters"], blind["epochs"]) == (plan["parameters"], None)


def test_a_job_document_runs_the_same_code(house: House, trained: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(house.spec)
    work = Job.build(
        "train", spec, store=house.root.as_uri(), output=house.uri("by-job"),
        inputs={"dataset": house.data, "base": house.base},
    )  # fmt: skip
    monkeypatch.setenv("REFIT_JOB", work.save())
    code, answer, said = call(house.argv("run")[:3])
    assert code == 0, said
    assert answer["model_digest"] == trained["model_digest"]


def test_status_and_verify_tell_where_a_training_stands(house: House, trained: dict) -> None:
    program = house.argv("run")[:3]
    code, status, _ = call([*program, "status", house.uri("alone")])
    assert (code, status["state"], status["complete"], status["checkpoints"]) == (0, "succeeded", True, [12, 8, 4])
    code, verified, _ = call([*program, "verify", house.uri("alone/checkpoints/step-8")])
    assert (code, verified["complete"], verified["step"]) == (0, True, 8)
    torn = house.root / "torn"
    shutil.copytree(house.root / "alone" / "checkpoints" / "step-8", torn)
    (torn / "rng-rank-0.json").unlink()
    code, verified, _ = call([*program, "verify", str(torn)])
    assert code == 10
    assert "rng-rank-0.json is missing" in verified["message"]


@pytest.mark.parametrize(("data", "sets", "message"), [
    pytest.param("nothing", (), "no manifest.json there", id="no dataset"),
    pytest.param("dataset", ("train.base=cache://models/none",), "no manifest.json there", id="no base model"),
    pytest.param("dataset", ("train.nodes=2",), "train.nodes", id="more nodes than it can"),
    pytest.param("dataset", ("train.gpus_per_node=1", "train.ranks=2", "train.accumulation=2"),
                 "each rank computes on a card of its own", id="more ranks than cards"),
    pytest.param("dataset", ("train.lerning_rate=1",), "Did you mean learning_rate?", id="a typo"),
    pytest.param("dataset", ("train.ranks=2", "train.accumulation=1"), "multiple of ranks", id="ranks without work"),
    pytest.param("other", (), "another tokenizer", id="a dataset of another tokenizer"),
])  # fmt: skip
def test_bad_input_is_said_at_once_and_never_retried(
    house: House, data: str, sets: tuple[str, ...], message: str
) -> None:
    if data == "other" and not (house.root / "other").exists():
        fake: Path = house.root / "fake"
        fake.mkdir()
        text = (store_for(house.base).local(house.base) / "tokenizer.json").read_text()
        (fake / "tokenizer.json").write_text(text + "\n")
        tickets.dataset(house.uri("other"), fake, count=10)
    other = House(house.root, house.spec, house.base, house.uri(data))
    code, answer, _ = other.run("run", "--output", house.uri("bad"), sets=sets)
    assert code == 10
    assert message in answer["message"]


def test_a_gradient_is_clipped_where_the_recipe_says_at_any_zero_stage(house: House) -> None:
    """DeepSpeed's own clipping is 1 where its config says nothing: at stage 0 a train.clip above that was ignored."""
    sets = ("train.clip=6", "train.max_steps=3")
    house.train("clip-0", sets=(*sets, "train.zero_stage=0"))
    house.train("clip-1", sets=(*sets, "train.zero_stage=1"))
    norms = [record["grad_norm"] for record in house.metrics("clip-0")]
    assert max(norms[:2]) > 6, "or nothing is clipped, and nothing is shown"
    assert [record["loss"] for record in house.metrics("clip-0")] == pytest.approx(
        [record["loss"] for record in house.metrics("clip-1")], rel=1e-6
    )
