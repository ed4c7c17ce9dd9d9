"""Where folders live: a disk in the embedded default, S3 elsewhere, and the code above cannot tell.

`store_for(uri)` gives the store of a URI's scheme; every method takes whole URIs. A folder is made with `publish`:

    with store.publish(uri) as draft:
        write_shards(draft.path)
        draft.commit(manifest)        # hash, fsync, manifest last, rename; or nothing at all
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote, urlsplit

from refit import files
from refit.errors import BadInput, Damaged, StoreUnavailable
from refit.fingerprint import file_digest
from refit.manifest import MANIFEST, Manifest, damage, describe


def cache_folder() -> Path:
    """Where demo data, base models and fetched copies are kept: outside REFIT_HOME, so that a fresh home is cheap."""
    return Path(os.environ.get("REFIT_CACHE") or Path.home() / ".cache" / "refit")


def join(uri: str, *parts: str) -> str:
    """A URI below another."""
    return "/".join([uri.rstrip("/"), *(part.strip("/") for part in parts)])


_PATTERN = re.compile(r"[*?\[]")


def matching(uri: str) -> list[str]:
    """The addresses that `uri` names: where its last part is a pattern (`*`, `?`, `[…]`) those that match, in order."""
    folder, _, name = uri.rstrip("/").rpartition("/")
    if not _PATTERN.search(name):
        return [uri]
    return [join(folder, child) for child in sorted(store_for(folder).children(folder)) if fnmatchcase(child, name)]


Heard = Callable[[], None]
"""Told, now and then, that work goes on."""


def unheard() -> None:
    """Tell nobody."""


Check = Callable[[], None]
"""Raises where something must not be."""


Judge = Callable[[Path, Manifest, Heard], list[str]]
"""Says what of a folder differs from its manifest, in words; empty when it is whole."""


def hashed(folder: Path, manifest: Manifest, heard: Heard) -> list[str]:
    """Judge a folder by every byte of it."""
    return damage(folder, manifest, heard=heard)


@dataclass(frozen=True)
class Copy:
    """A file on this machine's disk, and the sha256 of its bytes in hex."""

    path: Path
    digest: str


class Draft:
    """A folder in the making: write below `path`, then `commit` once."""

    def __init__(self, path: Path, finish: Callable[[Path, Manifest, Check, Heard], Manifest]) -> None:
        self.path = path
        self.manifest: Manifest | None = None
        self._finish = finish

    def commit(self, manifest: Manifest, check: Check = unheard, heard: Heard = unheard) -> Manifest:
        """Hash and publish the folder; returns the manifest with its files.

        Where another writer published the same folder first, theirs stands, ours is discarded, and theirs is returned.
        `check` is called right before the folder comes to be, minutes after hashing began where it is large; what it
        raises keeps the folder from being. `heard` is told as long as bytes go to where the folder is elsewhere.
        """
        if self.manifest is not None:
            raise RuntimeError("a draft is committed once")
        sealed = manifest.model_copy(update={"files": describe(self.path)}).sealed()
        self.manifest = self._finish(self.path, sealed, check, heard)
        return self.manifest


class Store(ABC):
    """Files and folders by URI."""

    @abstractmethod
    def read(self, uri: str, *, first: int | None = None) -> bytes:
        """The bytes at `uri`, or only the first so many of them; FileNotFoundError where nothing is."""

    @abstractmethod
    def write(self, uri: str, data: bytes) -> None:
        """Replace what is at `uri`, whole or not at all."""

    @abstractmethod
    def create(self, uri: str, data: bytes) -> bool:
        """Write only where nothing is; False where something is. The fence between two writers."""

    @abstractmethod
    def exists(self, uri: str) -> bool:
        """Whether a file is at `uri`."""

    @abstractmethod
    def modified(self, uri: str) -> float:
        """When the file at `uri` was written, by the store's own clock: seconds since 1970, on S3 whole ones."""

    @abstractmethod
    def version(self, uri: str) -> str | None:
        """What names the bytes at `uri` as they are now, without reading them; None where nothing can be trusted to.

        FileNotFoundError where nothing is.
        """

    @abstractmethod
    def children(self, uri: str) -> list[str]:
        """Names directly below a folder, sorted; empty where it is not there."""

    @abstractmethod
    def local(self, uri: str, heard: Heard = unheard) -> Path:
        """A file or committed folder as a path on this machine's disk (fetched and checked where it is elsewhere).

        `heard` is called for as long as bytes come, so that who waits for a long one is not taken for dead.
        """

    def copy(self, uri: str, heard: Heard = unheard) -> Copy:
        """A file as `local` gives it, with its digest; where it has to be fetched, it is read once for both."""
        path = self.local(uri, heard)
        return Copy(path, file_digest(path))

    def judged(
        self, uri: str, manifest: Manifest, heard: Heard = unheard, by: Judge = hashed
    ) -> tuple[Path, list[str]]:
        """A committed folder as `local` gives it, and what of it is not as it was committed.

        Where that is a copy of what lies elsewhere, a copy that went bad here is thrown away and fetched once more: it
        says nothing about the store.

        Raises:
            FileNotFoundError: it is not there.
            Damaged: what the store holds is not what was committed.
            StoreUnavailable: its store does not answer, or what comes from there does not stay whole here.
        """
        folder = self.local(uri, heard)
        return folder, by(folder, manifest, heard)

    def let_go(self, manifest: Manifest) -> None:
        """Say that this process needs its copy of a committed folder no more, where `local` has made one."""
        return

    @abstractmethod
    def damage(self, uri: str, manifest: Manifest, heard: Heard = unheard) -> list[str]:
        """What of a committed folder differs from its manifest, every byte read, in words; nothing is kept of it."""

    @abstractmethod
    def publish(self, uri: str) -> AbstractContextManager[Draft]:
        """A context with a `Draft` that becomes the folder at `uri` when it is committed."""

    @abstractmethod
    def remove(self, uri: str) -> None:
        """Take a folder away, its manifest first: from then on it does not exist, whatever a kill leaves of it."""

    @abstractmethod
    def sweep(self, uri: str, ours: Callable[[str], bool]) -> None:
        """Take away what kills left below a folder of committed folders: those without a manifest whose names are
        `ours`, drafts, and uploads that never ended.

        Only the one writer of the folder may: what is left and what is being written look alike.
        """

    def manifest(self, uri: str) -> Manifest | None:
        """The manifest of the folder at `uri`; None where the folder is not committed.

        Raises:
            Damaged: it is there, and is not what was written.
        """
        try:
            text = self.read(join(uri, MANIFEST))
        except FileNotFoundError:
            return None
        try:
            return Manifest.parse(text)
        except ValueError as error:
            raise Damaged(
                f"{uri}: manifest.json cannot be read: {error}. Remove the folder to make it anew."
            ) from error

    def require(self, uri: str, kind: str) -> Manifest:
        """The manifest of a folder that must be there, of the kind it must be."""
        manifest = self.manifest(uri)
        if manifest is None:
            raise BadInput(
                f"{uri}: no manifest.json there; expected a committed {kind}. Check the address, or make it first."
            )
        if manifest.kind != kind:
            raise BadInput(f"{uri}: holds a {manifest.kind}, expected a {kind}.")
        return manifest


class FileStore(Store):
    """`file://` and `cache://`: folders on a disk."""

    def read(self, uri: str, *, first: int | None = None) -> bytes:
        with self.path(uri).open("rb") as file:
            return file.read(first)

    def write(self, uri: str, data: bytes) -> None:
        files.write(self.path(uri), data)

    def create(self, uri: str, data: bytes) -> bool:
        return files.create(self.path(uri), data)

    def exists(self, uri: str) -> bool:
        return self.path(uri).is_file()

    def modified(self, uri: str) -> float:
        return self.path(uri).stat().st_mtime

    def version(self, uri: str) -> str | None:
        return None  # a time tells little, and a size less

    def children(self, uri: str) -> list[str]:
        folder = self.path(uri)
        return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []

    def local(self, uri: str, heard: Heard = unheard) -> Path:
        path = self.path(uri)
        if not path.exists():
            raise FileNotFoundError(uri)
        return path

    def damage(self, uri: str, manifest: Manifest, heard: Heard = unheard) -> list[str]:
        return damage(self.path(uri), manifest, heard=heard)

    def remove(self, uri: str) -> None:
        folder = self.path(uri)
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, uri: str, ours: Callable[[str], bool]) -> None:
        place = self.path(uri)
        for left in place.glob(".draft-*"):
            shutil.rmtree(left, ignore_errors=True)
        for name in filter(ours, self.children(uri)):
            if not (place / name / MANIFEST).exists():  # a removal begins with it
                shutil.rmtree(place / name, ignore_errors=True)

    @contextmanager
    def publish(self, uri: str) -> Iterator[Draft]:
        final = self.path(uri)
        final.parent.mkdir(parents=True, exist_ok=True)
        _sweep(final.parent)
        folder = final.with_name(f".draft-{final.name}-{_MACHINE}-{os.getpid()}-{secrets.token_hex(4)}")
        folder.mkdir()
        try:
            yield Draft(folder, lambda path, manifest, check, _: self._finish(uri, path, manifest, check))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _finish(self, uri: str, draft: Path, manifest: Manifest, check: Check) -> Manifest:
        files.write(draft / MANIFEST, manifest.model_dump_json(indent=1).encode())
        files.sync_tree(draft)
        check()
        final = self.path(uri)
        if files.rename_folder(draft, final):
            return manifest
        theirs = self.manifest(uri)
        if theirs is not None:
            return theirs
        # What is there was never committed: it does not exist, and makes room.
        shutil.rmtree(final)
        if not files.rename_folder(draft, final):
            raise StoreUnavailable(f"{uri}: another writer keeps making this folder.")
        return manifest

    def path(self, uri: str) -> Path:
        """The disk path of a `file://` or `cache://` URI (or a plain path)."""
        parts = urlsplit(uri)
        if parts.scheme == "cache":
            root = cache_folder().resolve()
            path = (root / unquote(parts.netloc) / unquote(parts.path).lstrip("/")).resolve()
            if not path.is_relative_to(root):
                raise BadInput(f"{uri}: leads out of the cache folder.")
            return path
        if parts.scheme == "file":
            if parts.netloc:
                raise BadInput(f"{uri}: a file address has three slashes, as in file:///data/x.")
            return Path(unquote(parts.path))
        if parts.scheme:
            raise BadInput(f"{uri}: unknown scheme {parts.scheme!r}; use file://, cache:// or s3://.")
        return Path(uri).absolute()


_MACHINE = re.sub(r"[^A-Za-z0-9]", "", socket.gethostname())[:32] or "here"
_DRAFT = re.compile(rf"\.draft-.+-{_MACHINE}-(\d+)-[0-9a-f]{{8}}")


def _sweep(parent: Path) -> None:
    """Take away what killed writers of this machine left; other machines' drafts are theirs to judge."""
    for draft in parent.glob(".draft-*"):
        found = _DRAFT.fullmatch(draft.name)
        if found and not Path("/proc", found[1]).exists():
            shutil.rmtree(draft, ignore_errors=True)


def store_for(uri: str) -> Store:
    """The store that serves a URI's scheme."""
    if urlsplit(uri).scheme == "s3":
        from refit.store_s3 import S3Store  # boto3 is only needed where S3 is

        return S3Store()
    return FileStore()
