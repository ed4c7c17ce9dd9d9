"""A step that was given up is kept, and can be taken again."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from conftest import House, call
from safetensors.torch import load_file, save_file
from torch import nn

from refit.fingerprint import digest
from refit.store import store_for
from trainer import scene
from trainer.bases import import_folder
from trainer.probe import Probe


def replay(house: House, output: str) -> tuple[int, dict[str, Any]]:
    argv = house.argv("replay")
    code, answer, _ = call([*argv[: argv.index("replay") + 1], house.uri(output)])
    return code, answer


def test_norms_are_put_together_layer_by_layer() -> None:
    norms = [("m.layers.0.a.weight", 3.0), ("m.layers.0.b.weight", 4.0), ("m.layers.1.a.weight", float("nan"))]
    assert scene.by_layer([*norms, ("m.embed.weight", 2.0)]) == {"m.layers.0": "5", "m.layers.1": "nan", "m.embed": "2"}


def test_the_innermost_module_is_named_first() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
    probe = Probe()
    with torch.no_grad(), probe.listening(model):
        model(torch.ones(1, 2))
        assert probe.first is None
        model[1][0].weight[0, 0] = float("nan")
        model(torch.ones(1, 2))
    assert probe.first == "1.0"
    probe.first = None
    model(torch.ones(1, 2))
    assert probe.first is None, "it listens no longer"


@pytest.mark.integration
@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_that_failed_fails_again_and_where_it_began_is_named(house: House, stage: int) -> None:
    folder = house.root / f"broken-{stage}"
    shutil.copytree(store_for(house.base).local(house.base), folder / "model")
    (folder / "model/manifest.json").unlink()
    weights = load_file(folder / "model/model.safetensors")
    name = next(name for name in weights if "layers.1." in name and "down_proj" in name)
    weights[name][0, 0] = float("inf")
    save_file(weights, folder / "model/model.safetensors", metadata={"format": "pt"})
    import_folder(folder / "model", (folder / "base").as_uri())
    sets = (f"train.base={(folder / 'base').as_uri()}", f"train.zero_stage={stage}")
    code, answer, _ = house.run("run", "--output", house.uri(f"failed-{stage}"), "--ranks", "2", sets=sets)
    assert (code, "trainer replay" in answer["message"]) == (12, True)
    kept = json.loads((house.root / f"failed-{stage}/scene.json").read_text())
    arrays = np.load(house.root / f"failed-{stage}/scene.npz")
    assert arrays["packs"].tolist() == kept["packs"]
    assert arrays["tokens"].shape == (len(kept["packs"]), 128)
    assert any("layers.1" in layer for layer in kept["gradient_norms"])
    assert kept["random"] == [digest(one) for one in json.loads(arrays["random"].tobytes())]
    assert len(kept["random"]) == 2
    code, answer = replay(house, f"failed-{stage}")
    assert code == 0, answer
    assert (answer["step"], answer["replayed"], answer["exact"]) == (1, True, True)
    assert [first.rpartition("layers.1.")[2] for first in answer["first"]] == ["mlp.down_proj", "mlp.down_proj"]
    if stage == 0:
        kept["random"][1] = kept["random"][1][::-1]
        (house.root / f"failed-{stage}/scene.json").write_text(json.dumps(kept))
        assert replay(house, f"failed-{stage}")[1]["exact"] is False, "a rank had other random numbers"


@pytest.mark.integration
def test_a_step_that_does_not_fail_again_says_so(house: House, trained: dict) -> None:
    """As after a fault of the machine; the steps between the checkpoint and it give the same losses to the bit."""
    output = house.root / "innocent"
    shutil.copytree(house.root / "alone", output)
    (output / "scene.json").write_text(json.dumps({"step": 11, "why": "the loss is not finite", "checkpoint": 8}))
    before = (output / "metrics.jsonl").read_bytes()
    code, answer = replay(house, "innocent")
    assert code == 0, answer
    assert (answer["replayed"], answer["exact"], answer["first"]) == (False, True, [None])
    assert (output / "metrics.jsonl").read_bytes() == before
    assert replay(house, "innocent") == (code, answer), "each asking is a trial of its own"


@pytest.mark.integration
def test_a_training_that_gave_nothing_up_has_nothing_to_take_again(house: House, trained: dict) -> None:
    code, answer = replay(house, "alone")
    assert code == 10
    assert "no step was given up" in answer["message"]
