"""Checkpoints as folders: found, checked, kept and thrown away. What is in them is `snapshot`'s business.

`<output>/checkpoints/step-N/` holds the pieces of weights and optimizer, the state of every rank's random numbers, and
a manifest that was written last. A folder without it does not exist; one whose files differ from their hashes is passed
over, loudly. `<output>/checkpoints/fast-step-N/` holds the weights alone, and is never resumed from.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refit import log
from refit.errors import BadInput, StoreUnavailable
from refit.manifest import MANIFEST, Manifest, damage
from refit.store import FileStore, join, store_for

KIND, FAST = "checkpoint", "weights"
"""The kinds of manifest: of a full checkpoint, and of a fast one."""

_NAME = {KIND: re.compile(r"^step-(\d+)$"), FAST: re.compile(r"^fast-step-(\d+)$")}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: `step` optimizer steps are behind it."""

    uri: str
    step: int
    manifest: Manifest


def folder(output: str) -> str:
    """Where a training's checkpoints lie."""
    return join(output, "checkpoints")


def address(output: str, step: int, kind: str = KIND) -> str:
    """Where the checkpoint of a step lies."""
    return join(folder(output), f"fast-step-{step}" if kind == FAST else f"step-{step}")


def committed(output: str, kind: str = KIND) -> Iterator[Checkpoint]:
    """Every checkpoint of a kind with a manifest, newest first; its files are not looked at."""
    store = store_for(output)
    names = [match for name in store.children(folder(output)) if (match := _NAME[kind].match(name))]
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


def found(output: str, copies: str | None, fingerprint: str) -> Checkpoint | None:
    """The checkpoint to go on from: the newest whole one of the output, or of its copies where they have a newer one.

    Raises:
        BadInput: the folder holds checkpoints of another training.
    """
    here = newest(output, fingerprint)
    there = newest(join(copies, fingerprint), fingerprint) if copies else None
    if there is not None and (here is None or there.step > here.step):
        log.event("checkpoint_from_copy", checkpoint=there.uri)
        return there
    return here


def copy(checkpoint: Checkpoint, to: str) -> None:
    """Put a copy of a checkpoint, with its own manifest's hashes, below another training's address.

    Raises:
        StoreUnavailable: what is there now does not match its hashes; the copy does not exist then.
    """
    uri = address(to, checkpoint.step)
    store = store_for(uri)
    store.remove(uri)
    with store.publish(uri) as draft:
        shutil.copytree(store_for(checkpoint.uri).local(checkpoint.uri), draft.path, dirs_exist_ok=True)
        (draft.path / MANIFEST).unlink(missing_ok=True)
        done = draft.commit(checkpoint.manifest)
    if done.files != checkpoint.manifest.files:
        store.remove(uri)
        raise StoreUnavailable(f"{uri}: differs from {checkpoint.uri}, and was taken away again.")


def best(uri: str) -> dict[str, Any] | None:
    """What a checkpoint says of the lowest loss on the validation split up to it; None where nobody had looked."""
    told: dict[str, Any] | None = store_for(uri).require(uri, KIND).facts.get("best")
    return told


def kind_of(uri: str) -> str:
    """The kind of checkpoint that an address is of, by its name."""
    return FAST if _NAME[FAST].match(uri.rpartition("/")[2]) else KIND


def skipped(uri: str) -> list[int]:
    """The steps up to a checkpoint that were passed over because they were not finite."""
    return list(store_for(uri).require(uri, KIND).facts.get("skipped", ()))


def faults(uri: str, manifest: Manifest) -> list[str]:
    """What is wrong with a checkpoint, in words; empty when it is whole."""
    if manifest.kind != (kind := kind_of(uri)):
        return [f"it is a {manifest.kind}, not a {kind}"]
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
        manifest = store_for(uri).require(uri, kind_of(uri))
    except StoreUnavailable as error:
        raise BadInput(str(error)) from error
    wrong = faults(uri, manifest)
    if wrong:
        raise BadInput("\n".join(f"{uri}: {fault}" for fault in wrong))
    return Checkpoint(uri, int(manifest.facts["step"]), manifest)


def retain(output: str, keep: int, best: Collection[int] = (), *, written: int | None = None) -> None:
    """Throw away all but the newest `keep`, those of the steps `best`, and the newest whose files match their hashes.

    Args:
        written: the step that was just saved. What is newer is of a future that was given up, damaged as a rule, and
            goes first, lest it takes the place of what is good.
    """
    store = store_for(output)
    there = list(committed(output))
    ahead = [one for one in there if written is not None and one.step > written]
    past = there[len(ahead) :]
    gone = past[max(1, keep) :]
    if ahead or gone:
        good = next((one.step for one in past if not faults(one.uri, one.manifest)), None)
        if good is None:
            log.event("retention_put_off", output=output, why="no checkpoint matches its hashes; none is thrown away")
            return
        for old in [*ahead, *gone]:
            if old.step != good and old.step not in best:
                store.remove(old.uri)


def retain_fast(output: str, keep: int) -> None:
    """Throw away all but the newest `keep` fast checkpoints."""
    for old in list(committed(output, FAST))[max(1, keep) :]:
        store_for(old.uri).remove(old.uri)


def spare(output: str, best: Collection[int]) -> list[Checkpoint]:
    """What may go when there is no room, in that order: fast ones, then full ones that are older than the newest whose
    files match their hashes, oldest first; not those of the steps `best`."""
    full = list(committed(output))
    good = next((at for at, one in enumerate(full) if not faults(one.uri, one.manifest)), len(full))
    older = [one for one in full[good + 1 :] if one.step not in best]
    return [*reversed(list(committed(output, FAST))), *reversed(older)]


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
