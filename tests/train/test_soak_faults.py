"""Campaigns of faults of one rank (`make soak`): a NaN on rank 1 at a step that is known, and a held process."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import campaign
import numpy as np
import pytest
import tickets
import torch
from conftest import House, call
from safetensors.torch import load_file, save_file
from test_kills import RECIPE, Running

from refit import packed
from refit.fingerprint import file_digest
from refit.manifest import Manifest
from refit.store import store_for
from trainer import checkpoints
from trainer.bases import import_folder
from trainer.order import packs_of_step

pytestmark = pytest.mark.integration

NAN_SETS = (
    "train.method=lora", "train.micro_batch=1", "train.accumulation=2", "train.max_steps=20",
    "train.checkpoint.every_steps=2",
)  # fmt: skip
HELD_STEPS = 60 if campaign.COUNT is not None else 24
HELD_SETS = (*RECIPE, "train.hang_seconds=12", f"train.max_steps={HELD_STEPS}")


def packs(house: House) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tickets.pack(tickets.documents(store_for(house.base).local(house.base), 400), tickets.LENGTH)


def rare(tokens: np.ndarray) -> int:
    """A token that no ticket has; the poisoned model reads NaN where it is."""
    return min(set(range(3, 1000)) - set(np.unique(tokens).tolist()))


@pytest.fixture(scope="module")
def poisoned(house: House) -> str:
    """The base model with a head of its own, and NaN for the rare token where it is read; where it is written, none."""
    folder = house.root / "soak-poisoned"
    shutil.copytree(store_for(house.base).local(house.base), folder)
    (folder / "manifest.json").unlink()
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][rare(packs(house)[0])] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    uri = house.uri("soak-poisoned-base")
    import_folder(folder, uri)
    return uri


def with_the_rare_token(house: House, name: str, step: int) -> House:
    """The house with a dataset whose rare token is first read by rank 1, in that step (from 0)."""
    base = store_for(house.base).local(house.base)
    tokens, segments, mask = packs(house)
    tokens[packs_of_step(step, per_step=2, packs=len(tokens), seed=1)[1], 3] = rare(tokens)
    uri = house.uri(name)
    with store_for(uri).publish(uri) as draft:
        for split in ("train", "validation"):
            packed.write(
                draft.path, split, tokens=tokens, segments=segments, mask=mask, samples=400,
                vocabulary=file_digest(base / "tokenizer.json"), vocabulary_size=int(tokens.max()) + 1,
            )  # fmt: skip
        draft.commit(Manifest(kind="dataset", fingerprint=name))
    return House(house.root, house.spec, house.base, uri)


def test_a_nan_on_rank_1_is_caught_before_the_step_and_taken_again(house: House, poisoned: str) -> None:
    """Axolotl's watchdog never tripped on NaN; others saved it, and threw the good checkpoints away for it."""

    def case(number: int, rng: random.Random) -> campaign.Facts:
        step, stage = rng.randint(0, 18), rng.choice((0, 1, 2))
        name = f"soak-nan-{number}"
        one = with_the_rare_token(house, f"{name}-data", step)
        sets = (*NAN_SETS, f"train.base={poisoned}", f"train.zero_stage={stage}")
        code, answer, said = one.run("run", "--output", house.uri(name), "--ranks", "2", sets=sets)
        assert (code, answer["error"]) == (12, "Diverged"), said[-3000:]
        scene = json.loads((house.root / name / "scene.json").read_text())
        assert scene["step"] == step + 1
        taken = house.metrics(name) if (house.root / name / "metrics.jsonl").exists() else []
        assert [record["step"] for record in taken] == list(range(1, step + 1)), "caught before the step"
        saved = [found.step for found in checkpoints.committed(house.uri(name))]
        assert saved == [at for at in range(step, 0, -1) if at % 2 == 0][:3]
        for at in saved:
            _finite(house.root / name / f"checkpoints/step-{at}")
        program = house.argv("replay")[:4]
        code, again, said = call([*program, house.uri(name)])
        assert code == 0, said[-3000:]
        assert (again["step"], again["replayed"], again["exact"]) == (step + 1, True, True)
        assert (again["first"][0], again["first"][1] is not None) == (None, True), "rank 1, and not rank 0"
        for folder in (name, f"{name}-data"):
            shutil.rmtree(house.root / folder)
        return {"step": step + 1, "stage": f"ZeRO {stage}"}

    campaign.run("nan", campaign.size(20, 1), case)


def _finite(folder: Path) -> None:
    states = [load_file(file) for file in folder.glob("state-rank-*.safetensors")]
    assert all(bool(torch.isfinite(tensor).all()) for state in states for tensor in state.values())


def test_a_held_rank_is_named_and_replaced(house: House) -> None:
    """How long it took to name it is told, beside the steps before it: within 3 of the long ones or 10 s."""
    _, whole, _ = Running(house, "soak-held-undisturbed", sets=HELD_SETS).end()

    def case(number: int, rng: random.Random) -> campaign.Facts:
        name, rank = f"soak-held-{number}", rng.randint(0, 1)
        running = Running(house, name, sets=HELD_SETS)
        running.until_step(rng.randint(3, HELD_STEPS * 2 // 3))
        pid, held = running.rank(rank), time.time()
        os.kill(pid, signal.SIGSTOP)
        steps = [record["seconds"] for record in house.metrics(name)]
        code, answer, said = running.end()
        assert code == 0, said[-3000:]
        assert f"rank {rank} said nothing" in said
        assert "held by a signal" in said
        assert answer["model_digest"] == whole["model_digest"]
        assert house.losses(name) == house.losses("soak-held-undisturbed")
        named = next(event for event in _events(running.folder) if "silent_rank" in event)
        assert named["silent_rank"]["rank"] == rank
        assert named["silent_rank"]["where"].startswith("held by a signal")
        seconds = datetime.fromisoformat(named["at"]).timestamp() - held
        shutil.rmtree(running.folder)
        return {"rank": f"rank {rank}", "named after s": round(seconds, 2), "p99 step s": round(max(steps), 2)}

    campaign.run("held", campaign.size(10, 1), case)


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
