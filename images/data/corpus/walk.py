"""A phase, and how one is run: named by what decides its bytes, answered from its manifest where that is there."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from corpus.settings import Settings
from corpus.task import Facts, Report, Task
from refit import fingerprint, log
from refit.manifest import MANIFEST, Manifest, damage
from refit.spec import Pipeline
from refit.store import FileStore, Store, join


@dataclass(frozen=True)
class Input:
    """What a phase reads: what it counts as, and how to get it onto this machine (only where the phase must run)."""

    digest: str
    fetch: Callable[[], Path]


def _no_more_modules(settings: Any) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A step of the stage. Its code is the module `corpus.<name>`, imported only when it has to run.

    `modules` names code that shapes the output and is not imported from the package by that module; `libraries` are
    packages of which another version may give other bytes.
    """

    name: str
    settings: Callable[[Pipeline], Settings]
    libraries: tuple[str, ...]
    modules: Callable[[Any], list[str]] = _no_more_modules
    kind: str = "records"

    def code(self, settings: Settings) -> str:
        """Digest of what decides the bytes besides settings and inputs."""
        modules = {name: fingerprint.code_digest(name) for name in (f"corpus.{self.name}", *self.modules(settings))}
        return fingerprint.digest({"modules": modules, "libraries": self.versions()})

    def versions(self) -> dict[str, str]:
        """The installed versions of its libraries."""
        return {name: version(name) for name in self.libraries}


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
        """The phase's line of the result."""
        counts = {name: self.facts[name] for name in ("records_in", "records_out", "quarantined")}
        return {"name": self.phase, "cached": self.cached, **counts, "seconds": round(self.seconds, 3)}

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
        manifest = self.store.manifest(uri)
        if manifest is None:
            return None
        if isinstance(self.store, FileStore):
            wrong = damage(self.store.path(uri), manifest, hashes=False)
            if wrong:
                log.event("damaged", phase=phase.name, folder=uri, why=wrong[0])
                self.store.remove(uri)
                return None
        return Done(phase=phase.name, uri=uri, manifest=manifest, cached=True, seconds=time.monotonic() - started)

    def run(self, phase: Phase, inputs: Mapping[str, Input], report: Report, history: list[dict[str, Any]]) -> Done:
        """The phase's output, made now if need be. `history` is what the phases before told; it goes into the facts."""
        done = None if self.force else self.find(phase, inputs)
        if done is None:
            done = self._make(phase, inputs, report, history)
        log.event("phase", **done.summary())
        return done

    def _make(self, phase: Phase, inputs: Mapping[str, Input], report: Report, history: list[dict[str, Any]]) -> Done:
        started = time.monotonic()
        settings, uri = phase.settings(self.spec), self.address(phase, inputs)
        module = importlib.import_module(f"corpus.{phase.name}")
        with self.store.publish(uri) as draft:
            here = {role: one.fetch() for role, one in inputs.items()}
            facts: Facts = module.run(Task(settings=settings, inputs=here, folder=draft.path, report=report))
            seconds = time.monotonic() - started
            if self.force:
                self.store.remove(uri)
            manifest = draft.commit(
                Manifest(
                    kind=phase.kind, fingerprint=uri.rsplit("/", 1)[-1], code=phase.code(settings),
                    inputs={role: one.digest for role, one in inputs.items()},
                    facts={
                        **facts, "seconds": seconds, "settings": settings.model_dump(mode="json"),
                        "versions": phase.versions(), "before": history,
                    },
                )
            )  # fmt: skip
        return Done(phase=phase.name, uri=uri, manifest=manifest, cached=False, seconds=time.monotonic() - started)


def manifest_uri(done: Done) -> str:
    """The address of a phase's manifest."""
    return join(done.uri, MANIFEST)
