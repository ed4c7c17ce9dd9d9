"""The loop that anybody would write with DeepSpeed: `python bare_deepspeed.py SPEC DATASET BASE FOLDER`, a rank of it.

The same model, loss, optimizer and batches as the trainer's, and nothing around them: no heartbeat, no records, no
agreement about NaN, no checkpoint; its batches are made before it begins. Each finished step of rank 0 is a byte more
in FOLDER/steps, until it is killed.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import deepspeed
import torch
from torch import distributed

from refit.pipeline import load
from trainer.batches import Loader
from trainer.inputs import train_split
from trainer.objective import build

STEPS = 64


def main() -> None:
    """Train until killed."""
    spec, dataset, base, folder = map(Path, sys.argv[1:])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    train = load(spec).train
    loader = Loader(train_split(dataset, train), train, rank=rank, ranks=ranks)
    steps = [loader.step(number) for number in range(STEPS)]
    batches = [(step.weight, step.batches) for step in steps]
    model = build(base, train, dtype="float32", length=loader.length)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=train.learning_rate,
        betas=(train.beta1, train.beta2), weight_decay=train.weight_decay, fused=True,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.accumulation // ranks, "gradient_clipping": train.clip,
        "zero_allow_untested_optimizer": True, "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": train.zero_stage, "overlap_comm": False},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    counter = os.open(folder / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for weight, step in itertools.cycle(batches):
        for batch in step:
            engine.backward(engine(batch) * (ranks / weight), scale_wrt_gas=False)
            engine.step()
        if rank == 0:
            os.write(counter, b".")


if __name__ == "__main__":
    main()
