"""Checkpoints as folders: found, checked, kept and thrown away. What is in them is `snapshot`'s business.

`<output>/checkpoints/step-N/` holds the pieces of weights and optimizer, the state of every rank's random numbers, and
a manifest that was written last. A folder without it does not exist; one whose files differ from their hashes is passed
over, loudly.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refit import log
from refit.errors import BadInput, StoreUnavailable
from refit.manifest import MANIFEST, Manifest, damage
from refit.store import FileStore, join, store_for

KIND = "checkpoint"
_NAME = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: `step` optimizer steps are behind it."""

    uri: str
    step: int
    manifest: Manifest


def folder(output: str) -> str:
    """Where a training's checkpoints lie."""
    return join(output, "checkpoints")


def address(output: str, step: int) -> str:
    """Where the checkpoint of a step lies."""
    return join(folder(output), f"step-{step}")


def committed(output: str) -> Iterator[Checkpoint]:
    """Every checkpoint with a manifest, newest first; its files are not looked at."""
    store = store_for(output)
    names = [match for name in store.children(folder(output)) if (match := _NAME.match(name))]
    for name in sorted(names, key=lambda match: -int(match[1])):
        uri = join(folder(output), name[0])
        try:
            manifest = store.manifest(uri)
        except StoreUnavailable as error:
            log.event("checkpoint_damaged", checkpoint=uri, why=str(error))
            continue
        if manifest is not None and manifest.facts.get("step") != int(name[1]):
            log.event("checkpoint_damaged", checkpoint=uri, why=f"holds step {manifest.facts.get('step')}")
        elif manifest is not None:
            yield Checkpoint(uri, int(name[1]), manifest)


def newest(output: str, fingerprint: str) -> Checkpoint | None:
    """The newest checkpoint whose files are what their manifest says; None where there is none.

    Raises:
        BadInput: the folder holds checkpoints of another training.
    """
    for checkpoint in committed(output):
        if checkpoint.manifest.fingerprint != fingerprint:
            raise BadInput(
                f"{checkpoint.uri}: of training {checkpoint.manifest.fingerprint}, this one is {fingerprint}. Data, "
                "base model or recipe differ: give it an output folder of its own."
            )
        wrong = faults(checkpoint.uri, checkpoint.manifest)
        if not wrong:
            return checkpoint
        log.event("checkpoint_damaged", checkpoint=checkpoint.uri, why="; ".join(wrong[:3]), then="the one before it")
    return None


def best(uri: str) -> dict[str, Any] | None:
    """What a checkpoint says of the lowest loss on the validation split up to it; None where nobody had looked."""
    found: dict[str, Any] | None = store_for(uri).require(uri, KIND).facts.get("best")
    return found


def faults(uri: str, manifest: Manifest) -> list[str]:
    """What is wrong with a checkpoint, in words; empty when it is whole."""
    try:
        place = store_for(uri).local(uri)
    except (StoreUnavailable, FileNotFoundError) as error:
        return [str(error)]
    return damage(place, manifest)


def verify(uri: str) -> Checkpoint:
    """The checkpoint at an address, with every file hashed.

    Raises:
        BadInput: it is not a complete checkpoint; the message names the file and the reason.
    """
    uri = uri.rstrip("/").removesuffix("/manifest.json")
    try:
        manifest = store_for(uri).require(uri, KIND)
    except StoreUnavailable as error:
        raise BadInput(str(error)) from error
    wrong = faults(uri, manifest)
    if wrong:
        raise BadInput("\n".join(f"{uri}: {fault}" for fault in wrong))
    return Checkpoint(uri, int(manifest.facts["step"]), manifest)


def retain(output: str, keep: int, best: int | None = None) -> None:
    """Throw away all but the newest `keep` and that of the step `best`. One that was just written is always kept."""
    store = store_for(output)
    for old in list(committed(output))[max(1, keep) :]:
        if old.step != best:
            store.remove(old.uri)


def clear_drafts(output: str) -> None:
    """Remove what a kill left half-written, or half-removed; only the one writer of a folder may."""
    store = store_for(output)
    if isinstance(store, FileStore):
        place: Path = store.path(folder(output))
        for draft in place.glob(".draft-*") if place.is_dir() else ():
            shutil.rmtree(draft, ignore_errors=True)
        for rest in place.glob("step-*") if place.is_dir() else ():
            if not (rest / MANIFEST).exists():  # a removal begins with it
                shutil.rmtree(rest, ignore_errors=True)
