"""Checkpoints as folders: found, checked, kept and thrown away. What is in them is `snapshot`'s business.

`<output>/checkpoints/step-N/` holds the pieces of weights and optimizer, the state of every rank's random numbers, and
a manifest that was written last. A folder without it does not exist; one whose files differ from their hashes is passed
over, loudly. A store that does not answer says nothing about what it holds: that is raised.
`<output>/checkpoints/fast-step-N/` holds the weights alone, and is never resumed from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refit import log
from refit.errors import BadInput, Damaged, StoreUnavailable
from refit.fingerprint import digest
from refit.manifest import Manifest
from refit.store import Check, Heard, join, store_for, unheard

KIND, FAST = "checkpoint", "weights"
"""The kinds of manifest: of a full checkpoint, and of a fast one."""

PIECE = 16 << 20
"""Bytes that a copy is made of at a time."""

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


def copies_of(copies: str, fingerprint: str, output: str) -> str:
    """Where the copies of an output's checkpoints lie. Two outputs of one training keep, sweep and throw away only
    their own."""
    return join(copies, f"{fingerprint}-{digest(output.rstrip('/'))[:12]}")


def _places(copies: str, fingerprint: str, output: str) -> tuple[str, ...]:
    """Where copies are looked for: the second place is the one of before outputs had their own, only read by now."""
    return copies_of(copies, fingerprint, output), join(copies, fingerprint)


def committed(output: str, kind: str = KIND) -> Iterator[Checkpoint]:
    """Every checkpoint of a kind with a manifest, newest first; its files are not looked at."""
    store = store_for(output)
    names = [match for name in store.children(folder(output)) if (match := _NAME[kind].match(name))]
    for name in sorted(names, key=lambda match: -int(match[1])):
        uri = join(folder(output), name[0])
        try:
            manifest = store.manifest(uri)
        except Damaged as error:
            log.event("checkpoint_damaged", checkpoint=uri, why=str(error))
            continue
        if manifest is not None and manifest.facts.get("step") != int(name[1]):
            log.event("checkpoint_damaged", checkpoint=uri, why=f"holds step {manifest.facts.get('step')}")
        elif manifest is not None:
            yield Checkpoint(uri, int(name[1]), manifest)


def newest(output: str, fingerprint: str, *, after: int = -1, heard: Heard = unheard) -> Checkpoint | None:
    """The newest checkpoint of a step later than `after` whose files are what their manifest says, if there is one.

    Raises:
        BadInput: the folder holds checkpoints of another training.
        StoreUnavailable: its store does not answer; nothing is known about what it holds.
    """
    for checkpoint in committed(output):
        if checkpoint.step <= after:
            return None
        refuse_another(checkpoint, fingerprint)
        wrong = faults(checkpoint.uri, checkpoint.manifest, heard)
        if not wrong:
            return checkpoint
        log.event("checkpoint_damaged", checkpoint=checkpoint.uri, why="; ".join(wrong[:3]), then="the one before it")
    return None


def refuse_another(checkpoint: Checkpoint, fingerprint: str) -> None:
    """Let nobody go on from a checkpoint of another training.

    Raises:
        BadInput: it is one.
    """
    if checkpoint.manifest.fingerprint != fingerprint:
        raise BadInput(
            f"{checkpoint.uri}: of training {checkpoint.manifest.fingerprint}, this one is {fingerprint}. Data, "
            "base model or recipe differ: give it an output folder of its own."
        )


def found(output: str, copies: str | None, fingerprint: str, heard: Heard = unheard) -> Checkpoint | None:
    """The checkpoint to go on from: the newest whole one of the output, or of its copies where they have a newer one.

    Only copies that are newer are fetched. Where their store does not answer, what is here does. `heard` is told that
    hashing goes on.

    Raises:
        BadInput: the folder holds checkpoints of another training.
        StoreUnavailable: the output's store does not answer, or that of the copies while there is nothing here.
    """
    here = best = newest(output, fingerprint, heard=heard)
    if copies is None:
        return here
    for place in _places(copies, fingerprint, output):
        try:
            there = newest(place, fingerprint, after=best.step if best else -1, heard=heard)
        except (OSError, StoreUnavailable) as error:
            if best is None:
                raise
            log.event("copies_passed_over", copies=place, checkpoint=best.uri, why=str(error))
            continue
        if there is not None:
            if best is not None:
                let_go(best)
            best = there
    if best is not None and best is not here:
        log.event("checkpoint_from_copy", checkpoint=best.uri)
    return best


def of_step(output: str, copies: str | None, fingerprint: str, step: int, heard: Heard = unheard) -> Checkpoint:
    """The whole checkpoint of just this step, from the output or else from its copies.

    Raises:
        BadInput: neither has it; the message says what is wrong with each.
    """
    wrong = []
    for place in (output, *(_places(copies, fingerprint, output) if copies else ())):
        try:
            return verify(address(place, step), heard)
        except BadInput as error:
            wrong.append(str(error))
    raise BadInput(
        f"the checkpoint of step {step} is not there any more, or not whole, and nothing else takes its place. Raise "
        "train.checkpoint.keep_last, or set train.checkpoint.copy_to, to keep more of them.\n" + "\n".join(wrong)
    )


def copy(checkpoint: Checkpoint, to: str, source: Path, *, heard: Heard = unheard, check: Check = unheard) -> None:
    """Put a copy of a checkpoint, with its own manifest's hashes, below another training's address.

    Args:
        source: where its files lie on this machine.
        heard: told with every piece, as long as it goes on.
        check: asked now and then; what it raises ends the copying, and nothing is left of it.

    Raises:
        StoreUnavailable: what is there now does not match its hashes; the copy does not exist then.
    """
    uri = address(to, checkpoint.step)
    store = store_for(uri)
    store.remove(uri)
    with store.publish(uri) as draft:
        for file in checkpoint.manifest.files:
            _copy_file(source / file.path, draft.path / file.path, heard, check)
        done = draft.commit(checkpoint.manifest, check, heard)
    if done.files != checkpoint.manifest.files:
        store.remove(uri)
        raise StoreUnavailable(f"{uri}: differs from {checkpoint.uri}, and was taken away again.")


def _copy_file(source: Path, to: Path, heard: Heard, check: Check) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, to.open("wb") as written:
        while data := read.read(PIECE):
            check()
            written.write(data)
            heard()


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


def unlooked(uri: str) -> bool:
    """Whether a stop cut short the look at the validation split that was due at a checkpoint."""
    return bool(store_for(uri).require(uri, KIND).facts.get("unlooked", False))


def faults(uri: str, manifest: Manifest, heard: Heard = unheard) -> list[str]:
    """What is wrong with a checkpoint, in words; empty when it is whole, and then its copy here is held, if it has one.

    `heard` is told that hashing goes on.
    """
    if manifest.kind != (kind := kind_of(uri)):
        return [f"it is a {manifest.kind}, not a {kind}"]
    try:
        _, wrong = store_for(uri).judged(uri, manifest, heard)
    except (Damaged, FileNotFoundError) as error:
        return [str(error)]
    return wrong


def let_go(checkpoint: Checkpoint) -> None:
    """Say that this process needs no copy of a checkpoint on this machine any more."""
    store_for(checkpoint.uri).let_go(checkpoint.manifest)


def _is_whole(one: Checkpoint) -> bool:
    """Whether its files match their hashes, for who only wants to know."""
    try:
        return not faults(one.uri, one.manifest)
    finally:
        let_go(one)


def verify(uri: str, heard: Heard = unheard) -> Checkpoint:
    """The checkpoint at an address, with every file hashed; `heard` is told that it goes on.

    Raises:
        BadInput: it is not a complete checkpoint; the message names the file and the reason.
        StoreUnavailable: its store does not answer.
    """
    uri = uri.rstrip("/").removesuffix("/manifest.json")
    try:
        manifest = store_for(uri).require(uri, kind_of(uri))
    except Damaged as error:
        raise BadInput(str(error)) from error
    wrong = faults(uri, manifest, heard)
    if wrong:
        raise BadInput("\n".join(f"{uri}: {fault}" for fault in wrong))
    return Checkpoint(uri, int(manifest.facts["step"]), manifest)


def retain(output: str, keep: int, best: Collection[int] = (), *, written: int | None = None) -> None:
    """Throw away all but the newest `keep`, those of the steps `best`, and the newest whose files match their hashes.

    Args:
        written: the step that was just saved, and hashed: it is not read again. What is newer was passed over when the
            training was resumed. It takes nobody's place, and goes if its files are proved damaged: a store that did
            not answer then may answer now.
    """
    store = store_for(output)
    there = list(committed(output))
    ahead = [one for one in there if written is not None and one.step > written]
    past = there[len(ahead) :]
    gone = past[max(1, keep) :]
    if not ahead and not gone:
        return
    good = next((one.step for one in past if one.step == written or _is_whole(one)), None)
    if good is None:
        log.event("retention_put_off", output=output, why="no checkpoint matches its hashes; none is thrown away")
        return
    for old in [*(one for one in ahead if _is_damaged(one)), *gone]:
        if old.step != good and old.step not in best:
            store.remove(old.uri)


_whole: set[tuple[str, str]] = set()
"""Address and seal of what this process has found whole: it is read once, not with every save."""


def _is_damaged(one: Checkpoint) -> bool:
    name = (one.uri, one.manifest.seal)
    if name in _whole:
        return False
    wrong = store_for(one.uri).damage(one.uri, one.manifest)
    if not wrong:
        _whole.add(name)
    return bool(wrong)


def retain_fast(output: str, keep: int) -> None:
    """Throw away all but the newest `keep` fast checkpoints."""
    for old in list(committed(output, FAST))[max(1, keep) :]:
        store_for(old.uri).remove(old.uri)


def spare(output: str, best: Collection[int]) -> list[Checkpoint]:
    """What may go when there is no room, in that order: fast ones, then full ones that are older than the newest whose
    files match their hashes, oldest first; not those of the steps `best`."""
    full = list(committed(output))
    good = next((at for at, one in enumerate(full) if _is_whole(one)), len(full))
    older = [one for one in full[good + 1 :] if one.step not in best]
    return [*reversed(list(committed(output, FAST))), *reversed(older)]


def clear_drafts(output: str) -> None:
    """Remove what a kill left half-written, or half-removed, or half-uploaded; only the one writer of a folder may."""
    store_for(output).sweep(folder(output), lambda name: any(kind.match(name) for kind in _NAME.values()))


def clear_copies(copies: str | None, fingerprint: str, output: str) -> None:
    """The same of the copies of an output's checkpoints, as far as their store answers."""
    if copies is None:
        return
    try:
        clear_drafts(copies_of(copies, fingerprint, output))
    except (OSError, StoreUnavailable) as error:
        log.event("copies_not_cleared", copies=copies, why=str(error))
