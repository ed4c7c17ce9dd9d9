"""What a training starts from, found and checked before anything expensive: a dataset and a base model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from refit import checked, packed
from refit.errors import BadInput, BadSpec, Damaged
from refit.fingerprint import file_digest, training_fingerprint
from refit.job import Job
from refit.manifest import MANIFEST, Manifest
from refit.packed import Packed
from refit.spec import Train
from refit.store import Heard, store_for, unheard
from trainer import warm
from trainer.position import Data

READ = ("train.", "validation.")
"""What a training reads of a dataset begins so."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Both inputs on this machine's disk, their content digests, and the name of the training that follows.

    `warm_start` is the content digest of the checkpoint that it begins with, if it does; `data` is what checkpoints say
    of the dataset.
    """

    dataset: Path
    dataset_digest: str
    base: Path
    base_digest: str
    fingerprint: str
    warm_start: str | None = None
    data: Data | None = None

    @property
    def digests(self) -> dict[str, str]:
        """What a manifest says that it was made from: content digests by role."""
        begun = {"warm_start": self.warm_start} if self.warm_start else {}
        return {"dataset": self.dataset_digest, "base": self.base_digest, **begun}


def locate(job: Job, heard: Heard = unheard) -> Inputs:
    """Stage both inputs and check that they fit together; `heard` is told now and then that it goes on.

    Raises:
        BadInput: one is missing, damaged or of another kind, the dataset was made with another tokenizer, or the
            checkpoint to begin with does not fit.
    """
    train = job.spec.train
    supported(train)
    dataset_uri, base_uri = folder_of(job.inputs.get("dataset", "")), job.inputs.get("base") or train.base
    dataset, dataset_manifest = _stage(dataset_uri, "dataset", heard)
    base, base_manifest = _stage(base_uri, "model", heard)
    split = train_split(dataset, train)
    if train.validation.every_steps:
        validation_split(dataset, train)
    if split.header.vocabulary != file_digest(base / "tokenizer.json"):
        raise BadInput(
            f"{dataset_uri}: made with another tokenizer than the one of {base_uri}. Prepare the data again with this "
            "base model."
        )
    _has_a_row_for_each_token(split, base_manifest, base_uri)
    warm_start = warm.fit(train, base_manifest.content_digest())
    return Inputs(
        dataset=dataset,
        dataset_digest=dataset_manifest.content_digest(),
        base=base,
        base_digest=base_manifest.content_digest(),
        fingerprint=training_fingerprint(
            train,
            dataset=dataset_manifest.content_digest(),
            base=base_manifest.content_digest(),
            warm_start=warm_start,
        ),
        warm_start=warm_start,
        data=Data(
            fingerprint=dataset_manifest.fingerprint, content=dataset_manifest.content_digest(),
            packs=split.header.packs, samples=split.header.samples,
        ),
    )  # fmt: skip


def _has_a_row_for_each_token(split: Packed, base: Manifest, uri: str) -> None:
    """Refuse a model whose tokenizer was given tokens and whose embedding was not: a rank would fall over the first."""
    tokens, rows = base.facts.get("tokens"), base.facts.get("rows")  # not there in what was imported long ago
    if not tokens or not rows or tokens <= rows:
        return
    highest = int(split.tokens.max())  # what the tokenizer has and the data does not use harms nobody
    if highest >= rows:
        raise BadInput(
            f"{uri}: the data holds token {highest} and the embedding has {rows} rows: tokens were added to the "
            "tokenizer alone. Resize the model's embeddings (transformers: resize_token_embeddings), import it again, "
            "and prepare the data with it."
        )


def name_of(train: Train, dataset: str, base: str) -> str:
    """The fingerprint alone, from both manifests: nothing is staged or hashed."""
    return training_fingerprint(
        train,
        dataset=_manifest(folder_of(dataset), "dataset").content_digest(),
        base=_manifest(base, "model").content_digest(),
        warm_start=warm.digest_of(train),
    )


def folder_of(uri: str) -> str:
    """A folder's address, given as itself or as its manifest's."""
    if not uri:
        raise BadInput("no dataset: give --data, the address of a prepared dataset or of its manifest.json.")
    return uri.rstrip("/").removesuffix("/" + MANIFEST)


def train_split(dataset: Path, train: Train) -> Packed:
    """The packs to learn from.

    Raises:
        BadInput: there are none, or they were prepared for another objective.
    """
    split = packed.read(dataset, "train", pairs=train.of_pairs)
    if split.header.packs == 0 or split.header.targets == 0:
        raise BadInput(f"{dataset}: the train split holds nothing to learn from ({split.header.packs} packs).")
    header = split.header
    if train.objective == "pretrain" and header.targets != header.tokens - header.samples:
        raise BadInput(
            f"{dataset}: {header.targets:,} of {header.tokens:,} tokens are learnt, and train.objective is pretrain, "
            "which learns them all. Prepare the data again with this objective."
        )
    return split


def validation_split(dataset: Path, train: Train) -> Packed:
    """The packs to look at.

    Raises:
        BadInput: there are none.
    """
    split = packed.read(dataset, "validation", pairs=train.of_pairs)
    if split.header.packs == 0 or split.header.targets == 0:
        raise BadInput(
            f"{dataset}: the validation split is empty, and train.validation.every_steps asks for its loss. Raise "
            "data.split.validation, or leave train.validation out."
        )
    return split


def supported(train: Train) -> None:
    """Refuse what this trainer cannot do, by name. Whether the machine has the cards, its ranks see (`device.choose`):
    who plans for cards needs none."""
    if train.nodes > 1:
        raise BadSpec(f"train.nodes is {train.nodes}: this trainer runs its ranks on one node. Set train.nodes to 1.")
    if train.gpus_per_node > 0:
        return
    if train.method == "qlora":
        from trainer import quantized  # torch, which others need not wait for

        quantized.check(train)
    if train.offload != "none":
        raise BadSpec(
            f"train.offload is {train.offload} and train.gpus_per_node is 0: a processor's memory is the host's, so "
            "there is nothing to offload. Set train.offload to none."
        )


def _stage(uri: str, kind: str, heard: Heard) -> tuple[Path, Manifest]:
    manifest = _manifest(uri, kind)
    # What is trained on is what its name says: a flipped bit here would be a wrong model with a right fingerprint.
    used = manifest
    if kind == "dataset":
        used = manifest.model_copy(update={"files": tuple(f for f in manifest.files if f.path.startswith(READ))})
    try:
        folder, wrong = store_for(uri).judged(uri, used, heard, by=checked.damage)
    except Damaged as error:
        raise BadInput(f"{error} Make the {kind} again.") from error
    if wrong:
        raise BadInput(f"{uri}: the {kind} is damaged: {'; '.join(wrong[:3])}. Make it again.")
    return folder, manifest


def _manifest(uri: str, kind: str) -> Manifest:
    return store_for(uri).require(uri, kind)
