"""Room for a checkpoint: is there enough on the disk, what may go to make more, and what to say where it failed."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from typing import Any

from refit import files, log
from refit.store import FileStore, store_for
from trainer import checkpoints
from trainer.reports import disk_folder

SPARE_BYTES = 1 << 20
"""What is left free beside a checkpoint: the training's own records are small, and on the same disk."""

REMEDY = "Make room, write to a larger disk, or lower train.checkpoint.keep_last."


class NoRoom(OSError):
    """The disk has not enough room; nothing was written."""


def free_bytes(output: str) -> int:
    """What a checkpoint may take on the disk that it is written to."""
    disk = os.statvfs(disk_folder(output))
    return disk.f_bavail * disk.f_frsize


def ensure(output: str, needed: int, best: Collection[int], *, refused: bool = False) -> None:
    """See that there is room for so many bytes; where there is not, older checkpoints go, if that is enough.

    Never goes the newest one whose files match their hashes, nor any that is newer, nor those of the steps `best`.

    Args:
        refused: the disk was found full by the last save, whatever it says of itself (a quota, say).

    Raises:
        NoRoom: nothing was removed, for not even all that may go would make room.
    """
    missing = needed if refused else needed + SPARE_BYTES - free_bytes(output)
    if missing <= 0:
        return
    older = checkpoints.spare(output, best) if isinstance(store_for(output), FileStore) else []
    sizes = [sum(file.size for file in one.manifest.files) for one in older]
    if sum(sizes) < missing:
        if refused:
            return  # there may be room by now: the disk will say
        raise NoRoom(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for one, size in zip(older, sizes, strict=True):
        if missing > 0:
            log.event("checkpoint_removed", checkpoint=one.uri, why="the disk is full, and a newer one needs the room")
            store_for(one.uri).remove(one.uri)
            missing -= size


def number_of(error: BaseException) -> int | None:
    """The operating system's number for why a save failed; None where it is something else."""
    if isinstance(error, OSError):
        return error.errno
    told = re.search(r"\(os error (\d+)\)", str(error))  # how the library that writes tensors says it
    return int(told[1]) if told else None


def explain(error: BaseException, output: str, needed: int) -> dict[str, Any]:
    """Why a save failed: `why` in words, bytes `needed` and `free`, and whether the disk `refused` to
    take what it said it had room for."""
    number = number_of(error)
    try:
        free: int | None = free_bytes(output)
    except OSError:
        free = None
    why = os.strerror(number) if number is not None else f"{type(error).__name__}: {error}"
    text = f"{why}; {needed:,} bytes are needed" + (f", {free:,} are free" if free is not None else "")
    refused = number in files.FULL and not isinstance(error, NoRoom)
    if number in files.FULL:
        text += f". {REMEDY}"
    return {"why": text, "needed": needed, "free": free, "refused": refused}
