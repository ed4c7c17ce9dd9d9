"""Where in its data a training stands after a step, for people and tools: a resume needs none of it.

Which pack comes when is a function of the step (`order`), and so is this.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from refit.spec import Train


class Data(BaseModel):
    """What a position is one in: a dataset's own fingerprint, the digest of its content, and what one epoch holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str
    content: str
    packs: int
    samples: int


def after(step: int, train: Train, data: Data) -> dict[str, Any]:
    """Where a training stands with `step` optimizer steps behind it, those among them that were skipped too.

    `packs_seen` counts from the beginning, `place_in_epoch` the packs of `epoch` (from 0). `samples_seen` are
    documents. It is exact where `place_in_epoch` is 0; within an epoch, whose packs hold more documents or fewer, it
    takes each pack to hold as many as the mean of them, rounded down.
    """
    seen = step * train.micro_batch * train.accumulation
    epoch, place = divmod(seen, data.packs)
    return {
        "fingerprint": data.fingerprint, "content": data.content, "packs_seen": seen, "packs": data.packs,
        "epoch": epoch, "place_in_epoch": place, "samples_seen": seen * data.samples // data.packs,
        "samples": data.samples,
    }  # fmt: skip
