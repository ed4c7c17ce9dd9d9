"""How a finished folder of a training becomes a published one, and the card that is laid beside a model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from refit.job import Job
from refit.manifest import Manifest, describe
from refit.store import join, store_for
from trainer import card
from trainer.inputs import Inputs, folder_of

MODEL, ADAPTER = "model", "adapter"
"""Folders of an export. They are named here, where no torch is imported: a launcher asks for them."""


def publish(folder: Path, kind: str, inputs: Inputs, facts: dict[str, Any], *, uri: str | None = None,
            below: str = "") -> tuple[str, str]:  # fmt: skip
    """Commit a folder, at `uri` or below an address by its content; returns its address and digest.

    The files move. Where the same folder was published before, that one stands; the digest is always ours.
    """
    manifest = Manifest(
        kind=kind, fingerprint=inputs.fingerprint, facts=facts, files=describe(folder),
        inputs=inputs.digests,
    )  # fmt: skip
    digest = manifest.content_digest()
    uri = uri or join(below, digest[:32])
    with store_for(uri).publish(uri) as draft:
        for path in folder.iterdir():
            shutil.move(path, draft.path / path.name)
        draft.commit(manifest)
    return uri, digest


def lay_card(uri: str, job: Job, inputs: Inputs, facts: dict[str, Any], evaluation: card.Evaluation = None) -> None:
    """Write README.md into a published model's folder, unless one is there.

    After the commit, and so in no manifest: a card tells of a model (where its data lay, how it did), and is not the
    model. Were it one of the hashed files, equal models would have different names.
    """
    dataset = folder_of(job.inputs["dataset"])
    made_from = store_for(dataset).manifest(dataset)
    text = card.render(
        job, facts, base_digest=inputs.base_digest, dataset_digest=inputs.dataset_digest,
        dataset_fingerprint=made_from.fingerprint if made_from else "unknown",
        warm_start_digest=inputs.warm_start, licence=card.licence_of(inputs.base), evaluation=evaluation,
    )  # fmt: skip
    store_for(uri).create(join(uri, card.CARD), text.encode())
