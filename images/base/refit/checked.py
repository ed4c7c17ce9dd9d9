"""Hashed once: what of a committed folder was found whole on this machine, and has not been touched since.

A note in the cache remembers device, inode, size and times (modification and change, in ns) of each file that matched
its hash. Where all of them are as they were nothing is read; where anything differs, or there is no note, everything is
hashed. A note is of one boot of the machine: after a power cut the disk may hold less than was in memory when it was
hashed. A file that was written within the last seconds gets none: it could be written again at the same time.

What it does not do: see a disk whose bits change under a file that nobody writes to. Checkpoints never go through it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from refit import files, log
from refit.fingerprint import digest
from refit.manifest import Manifest
from refit.manifest import damage as hashed
from refit.store import Heard, cache_folder, unheard

SETTLED_SECONDS = 2.0
"""A file must be so old before it is hashed: the clocks of file systems are coarse."""

KEPT = 1000
"""Notes that stay, a few hundred bytes to some kilobytes each."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")

State = dict[str, list[int]]


def damage(folder: Path, manifest: Manifest, heard: Heard = unheard) -> list[str]:
    """What differs between a folder and its manifest, in words, as `manifest.damage` says it."""
    note, before = _note(folder, manifest), _state(folder, manifest)
    if note is not None and before is not None and _read(note) == before:
        return []
    began = time.time()
    wrong = hashed(folder, manifest, heard=heard)
    if not wrong and note is not None and before is not None and before == _state(folder, manifest):
        newest = max((time_ns for told in before.values() for time_ns in told[3:]), default=0)
        if began - newest / 1e9 > SETTLED_SECONDS:
            _write(note, before)
    return wrong


def _note(folder: Path, manifest: Manifest) -> Path | None:
    """Where the note of a folder with these files lies; None on a machine that does not say when it was booted."""
    try:
        boot = _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return None
    told = [(file.path, file.size, file.sha256) for file in manifest.files]
    return cache_folder() / "checked" / f"{digest({'boot': boot, 'folder': str(folder.resolve()), 'files': told})}.json"


def _state(folder: Path, manifest: Manifest) -> State | None:
    """Device, inode, size, mtime and ctime of each file; None where one is not there."""
    try:
        found = {file.path: (folder / file.path).stat() for file in manifest.files}
    except OSError:
        return None
    return {
        name: [one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns] for name, one in found.items()
    }


def _read(note: Path) -> object:
    try:
        return json.loads(note.read_bytes())
    except (OSError, ValueError):
        return None


def _write(note: Path, state: State) -> None:
    try:
        files.write(note, json.dumps(state).encode())
        files.keep_newest(note.parent, KEPT)
    except OSError as error:  # it is hashed again then
        log.event("not_noted", note=str(note), why=str(error))
