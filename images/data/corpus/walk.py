"""A phase, and how one is run: named by what decides its bytes, answered from its manifest where that is there."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unicodedata import unidata_version

from corpus.settings import Settings
from corpus.task import Facts, Report, Task
from refit import fingerprint, log
from refit.manifest import MANIFEST, Manifest, damage
from refit.spec import Pipeline
from refit.store import FileStore, Store, join

AT_ONCE = 16
"""So many folders are asked after at once: on S3 each answer takes tens of milliseconds."""


@dataclass(frozen=True)
class Input:
    """What a phase reads: what it counts as, and how to get it onto this machine (only where the phase must run)."""

    digest: str
    fetch: Callable[[], Path]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A step of the stage. Its code is the module `corpus.<name>`, imported only when it has to run. A phase's name is
    also that of the folder where its outputs are.

    `modules` names code that shapes the output and is not imported from the package by that module; `libraries` are
    packages of which another version may give other bytes, `more_libraries` those that only some settings use.
    A phase in shards (`corpus.sharded`) sees one source at a time: `of_source` is what its settings come to for one.
    `merges` names a file of every shard; the module's `merge` writes of a source's files what they tell together. Of a
    phase that is `wide` a shard takes all cores and the memory that there is: they are made one after the other.
    """

    name: str
    settings: Callable[[Pipeline], Any]
    libraries: tuple[str, ...]
    modules: Callable[[Any], list[str]] | None = None
    more_libraries: Callable[[Any], list[str]] | None = None
    of_source: Callable[[Any, str], Any] | None = None
    merges: str | None = None
    wide: bool = False
    kind: str = "records"

    def settings_of(self, spec: Pipeline, source: str) -> Settings:
        """The settings that decide a shard of a source."""
        settings = self.settings(spec)
        found: Settings = self.of_source(settings, source) if self.of_source else settings
        return found

    def code(self, settings: Settings) -> str:
        """Digest of what decides the bytes besides settings and inputs."""
        more = self.modules(settings) if self.modules else []
        modules = {name: fingerprint.code_digest(name) for name in (f"corpus.{self.name}", *more)}
        versions = {**self.versions(settings), "unicode": unidata_version}
        return fingerprint.digest({"modules": modules, "libraries": versions})

    def versions(self, settings: Settings) -> dict[str, str]:
        """The installed versions of its libraries."""
        more = self.more_libraries(settings) if self.more_libraries else []
        return {name: version(name) for name in sorted({*self.libraries, *more})}


@dataclass(frozen=True, kw_only=True)
class Done:
    """A phase that has its output; `seconds` is what it took now (next to nothing where it was there already)."""

    phase: str
    uri: str
    manifest: Manifest
    cached: bool
    seconds: float

    @property
    def facts(self) -> Facts:
        """What the phase told."""
        return self.manifest.facts

    def summary(self) -> dict[str, Any]:
        """The phase's line of the result; of a phase in shards also how many it has, and how many were made now."""
        found = {name: self.facts[name] for name in ("records_in", "records_out", "quarantined")}
        if "shards" in self.facts:
            found |= {"shards": self.facts["shards"], "shards_made": 0 if self.cached else self.facts["shards_made"]}
        return {"name": self.phase, "cached": self.cached, **found, "seconds": round(self.seconds, 3)}

    def as_input(self, store: Store) -> Input:
        """The output as the input of a later phase."""
        return Input(self.manifest.content_digest(), partial(store.local, self.uri))


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Where phases leave their folders, and what is told of them."""

    spec: Pipeline
    store: Store
    root: str
    force: bool = False

    def address(self, phase: Phase, inputs: Mapping[str, Input]) -> str:
        """The folder that a phase with these inputs has."""
        settings = phase.settings(self.spec)
        digests = {role: one.digest for role, one in inputs.items()}
        return join(self.root, phase.name, fingerprint.fingerprint(phase.name, phase.code(settings), settings, digests))

    def find(self, phase: Phase, inputs: Mapping[str, Input]) -> Done | None:
        """The phase's output where it is there, whole."""
        started = time.monotonic()
        uri = self.address(phase, inputs)
        manifest = self._whole(uri)
        if manifest is None:
            return None
        return Done(phase=phase.name, uri=uri, manifest=manifest, cached=True, seconds=time.monotonic() - started)

    def manifests(self, uris: Sequence[str]) -> list[Manifest | None]:
        """The manifests of folders, None of those that are not there whole."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._whole, uris))

    def run(
        self, phase: Phase, inputs: Mapping[str, Input], report: Report, history: list[dict[str, Any]],
        shards: Mapping[str, Callable[[], Sequence[Path]]],
    ) -> Done:  # fmt: skip
        """The phase's output, made now if need be. `history` is what the phases before told; it goes into the facts.
        `shards` are the folders of those inputs that are in shards, fetched only if the phase must run."""
        done = None if self.force else self.find(phase, inputs)
        if done is None:
            started = time.monotonic()
            settings = phase.settings(self.spec)

            def work(folder: Path) -> Facts:
                here = {role: one.fetch() for role, one in inputs.items()}
                parts = {role: fetch() for role, fetch in shards.items()}
                task = Task(settings=settings, inputs=here, shards=parts, folder=folder, report=report)
                facts: Facts = importlib.import_module(f"corpus.{phase.name}").run(task)
                return facts

            uri, manifest = self.commit(phase, inputs, work, history, started)
            seconds = time.monotonic() - started
            done = Done(phase=phase.name, uri=uri, manifest=manifest, cached=False, seconds=seconds)
        log.event("phase", **done.summary())
        return done

    def commit(
        self, phase: Phase, inputs: Mapping[str, Input], work: Callable[[Path], Facts], history: list[dict[str, Any]],
        started: float,
    ) -> tuple[str, Manifest]:  # fmt: skip
        """Let `work` write a phase's folder and publish it with what it told; returns its address and manifest."""
        settings, uri = phase.settings(self.spec), self.address(phase, inputs)
        with self.store.publish(uri) as draft:
            facts = work(draft.path)
            if self.force:
                self.store.remove(uri)
            manifest = draft.commit(
                Manifest(
                    kind=phase.kind, fingerprint=uri.rsplit("/", 1)[-1], code=phase.code(settings),
                    inputs={role: one.digest for role, one in inputs.items()},
                    facts={
                        **facts, "seconds": time.monotonic() - started, "settings": settings.model_dump(mode="json"),
                        "versions": phase.versions(settings), "before": history,
                    },
                )
            )  # fmt: skip
        return uri, manifest

    def _whole(self, uri: str) -> Manifest | None:
        """The manifest of a folder that is there; what is damaged on a disk is taken away to be made again."""
        manifest = self.store.manifest(uri)
        if manifest and isinstance(self.store, FileStore):
            wrong = damage(self.store.path(uri), manifest, hashes=False)
            if wrong:
                log.event("damaged", folder=uri, why=wrong[0])
                self.store.remove(uri)
                return None
        return manifest


def manifest_uri(done: Done) -> str:
    """The address of a phase's manifest."""
    return join(done.uri, MANIFEST)
