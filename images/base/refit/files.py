"""Whole or not at all: the few file operations that everything which must survive a kill goes through."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The numbers of the errors that say that a disk, or a quota, is full."""


def write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `data`; a reader sees the old file or the new one, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path, data, mode)
    os.replace(draft, path)
    sync_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft to write to, beside `path`, which replaces it at the end; `path` is as it was where something fails."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield draft
        with draft.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def create(path: Path, data: bytes) -> bool:
    """Write `path` only where nothing is; False where something is. Of two writers exactly one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path, data, 0o644)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    sync_folder(path.parent)
    return True


def append(path: Path, line: bytes) -> None:
    """Append one line with one write; what a kill cut short before it is closed off first."""
    with Lines(path) as lines:
        lines.append(line)


class Lines:
    """A file that one writer appends lines to, each with one write; it stays open until it is closed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._descriptor).st_size
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def append(self, line: bytes) -> None:
        """Append a line; what a kill or a full disk cut short before it is closed off first."""
        data = (b"\n" if self._torn else b"") + line.rstrip(b"\n") + b"\n"
        self._torn = os.write(self._descriptor, data) < len(data)

    def close(self) -> None:
        """Append no more."""
        os.close(self._descriptor)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def keep_newest(folder: Path, count: int) -> None:
    """Remove all but the files of a folder that were written last; drafts (a dot in front) are let be."""
    found = []
    for path in folder.iterdir():
        try:
            state = path.stat()
        except FileNotFoundError:  # another process keeps the same folder small
            continue
        if S_ISREG(state.st_mode) and not path.name.startswith("."):
            found.append((state.st_mtime_ns, path.name, path))
    for *_, path in sorted(found)[:-count]:
        path.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below `folder`, and itself."""
    for root, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(root, name), "rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(Path(root))


def sync_folder(folder: Path) -> None:
    """fsync a folder: makes a rename or a new name in it last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_folder(draft: Path, final: Path) -> bool:
    """Give a finished draft its final name; False where a folder with content already has it."""
    try:
        os.rename(draft, final)
    except OSError:
        if final.exists():
            return False
        raise
    sync_folder(final.parent)
    return True


def _draft(path: Path, data: bytes, mode: int) -> Path:
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft
