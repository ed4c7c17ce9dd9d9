"""The manifest: the commit of a folder. A folder without one does not exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from refit import fingerprint

MANIFEST = "manifest.json"


class File(BaseModel):
    """A file of the folder: path relative to it, size in bytes, sha256 in hex."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size: int
    sha256: str


class Manifest(BaseModel):
    """What a folder holds, what made it, and from what.

    `inputs` maps a role to the input's content digest. `outputs` maps a role to the URI of another folder that this
    job committed. `facts` is whatever the stage wants to tell (counts, scores, seeds, the realised mix). `seal` is the
    digest of all the rest: files are held against their hashes, and these by it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = 1
    kind: str
    fingerprint: str
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    code: str = ""
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    files: tuple[File, ...] = ()
    facts: dict[str, Any] = {}
    seal: str = ""

    def sealed(self) -> Self:
        """The same, with its seal."""
        return self.model_copy(update={"seal": _seal(json.loads(self.model_dump_json()))})

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """A manifest from its file. One without a seal is of a time before there were any.

        Raises:
            ValueError: it is not what was written.
        """
        manifest = cls.model_validate_json(text)
        if manifest.seal and manifest.seal != _seal(json.loads(text)):
            raise ValueError("it differs from its seal")
        return manifest

    def content_digest(self) -> str:
        """What the folder counts as when it is an input: kind and files, never a time or a URI.

        A folder without files of its own (a job's) counts by its fingerprint.
        """
        files = sorted((file.path, file.sha256) for file in self.files)
        return fingerprint.digest({"kind": self.kind, "files": files or [self.fingerprint]})


def _seal(fields: dict[str, Any]) -> str:
    return fingerprint.digest({name: value for name, value in fields.items() if name != "seal"})


def describe(folder: Path, exclude: frozenset[str] = frozenset()) -> tuple[File, ...]:
    """Every file below `folder`, hashed, except its manifest and the names (relative paths) in `exclude`."""
    found = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_file() and relative != MANIFEST and relative not in exclude:
            found.append(File(path=relative, size=path.stat().st_size, sha256=fingerprint.file_digest(path)))
    return tuple(found)


def damage(
    folder: Path, manifest: Manifest, *, hashes: bool = True, heard: Callable[[], None] = lambda: None
) -> list[str]:
    """What differs between a folder and its manifest, in words; empty when it is whole.

    `hashes=False` looks at names and sizes only: cheap, and blind to flipped bits. `heard` is called before each file
    and with every piece of it: hashing a large model takes minutes.
    """
    wrong = []
    for file in manifest.files:
        heard()
        path = folder / file.path
        if not path.is_file():
            wrong.append(f"{file.path} is missing")
        elif path.stat().st_size != file.size:
            wrong.append(f"{file.path} has {path.stat().st_size} bytes, the manifest says {file.size}")
        elif hashes and fingerprint.file_digest(path, heard) != file.sha256:
            wrong.append(f"{file.path} differs from its hash")
    return wrong
